"""What ``apply`` shows while runs go on and when they have ended: live, once, bounded, and with the next step."""

from __future__ import annotations

import fcntl
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_rehearse import claude
from tests.cli.test_triage import TURNS, line, record_of
from tests.support.situations import REPO, Project, document, step, until
from tests.support.terminal import CODES, on_terminal

__all__ = ["claude"]

WAITING = "echo first; until [ -e $RUNNER_OUTPUT/go ]; do sleep 0.05; done; echo last; exit 7"


def test_what_is_wrong_is_shown_once_and_with_its_end(project: Project) -> None:
    """The command of a failed check stood there four times, and nothing of what it printed."""
    command = "seq 1 30; echo E assert >&2; exit 2"
    checks = f'[{{run: [sh, -c, "{command}"]}}, {{run: [sh, -c, "seq 31 60"]}}]'
    project.script("echo works; echo x > new", run=f"verify: {{commands: {checks}}}\nsnapshot: {{message: m}}")
    done, record = project.apply()

    lines = done.out.splitlines()
    failed = next(at for at, text in enumerate(lines) if text.startswith("  ✗ verify"))
    assert lines[failed].endswith(f"1 of 2 checks failed: `{command}` exited 2")
    assert lines[failed + 1 : failed + 21] == [*(f"   | {n}" for n in range(12, 31)), "   | E assert"]
    assert lines[failed + 21].endswith(f":17   all of it: runner runs logs {record['id']} verify")
    assert done.out.count(command) == 1
    assert done.out.count("   | works\n") == 1
    assert f"FAILED work at verify in {record_seconds(record)}   its work is kept: 1 file\n" in done.out
    assert f"  again from here   runner resume {record['id']}\n" in done.out
    assert project.runner("resume", record["id"], "--explain").code == 0
    shown = project.runner("runs", "show", "last").out
    assert shown.count(command) == 1
    assert "   | 30\n   | E assert\n" in shown


def record_seconds(record: dict[str, Any]) -> str:
    return f"{(record['ended'] - record['started']) / 1e6:.1f}s"


def test_quiet_shows_only_what_fails(project: Project) -> None:
    """Also when the run is resumed."""
    project.script(
        "echo chatter; echo x >made",
        run='verify: {commands: [{run: [sh, -c, "echo because; exit 1"]}]}\nsnapshot: {message: m}',
    )
    for done in (project.apply("-q")[0], project.runner("resume", "last", "-q")):
        assert "chatter" not in done.out.replace("✓ agent", "").split("✗ verify")[1]
        assert "   | chatter" not in done.out
        assert done.out.count("   | because\n") == 1


@pytest.mark.scenario("TRI-10")
def test_a_terminal_shows_what_an_agent_prints_while_it_works(project: Project) -> None:
    """The agent goes on only when its first word was seen; its exit status is that of the step."""
    project.script(WAITING, run="incident: {directory: incident}", provider="process")
    (project.folder / "incident").mkdir()
    with on_terminal(project, "apply", ".", "--yes") as terminal:
        assert terminal.until("   | first\r\n")
        assert "last" not in terminal.text
        assert [log.read_text() for log in project.folder.glob("incident/output/*.log")] == ["first\n"]
        (output,) = (project.home / "state" / "sandboxes").glob("*/output")
        (output / "go").touch()
        shown = CODES.sub("", terminal.rest())

    assert "   | last\r\n" in shown
    assert "✗ agent" in shown
    assert "exited 7" in shown
    record = record_of(project)
    assert Path(record["log"]).read_text() == "first\nlast\n"
    assert step(record, "agent")["outcome"]["message"].startswith("exited 7")


@pytest.mark.slow
@pytest.mark.scenario("TRI-10")
def test_a_terminal_shows_what_a_cli_says_while_it_works(project: Project, claude: Path) -> None:
    waits = f"until [ -e {claude}/go ]; do sleep 0.05; done"
    words = line(project, claude, [{"say": "I look.", "run": waits}, {"say": "Ok."}])
    with on_terminal(project, *words) as terminal:
        assert terminal.until("   | I look.\r\n")
        assert "✓ agent" not in terminal.text
        (claude / "go").touch()
        shown = terminal.rest()

    assert f"   | $ until [ -e {claude}/go ]" in shown
    assert "   | Ok.\r\n" in shown
    assert "I look." in Path(record_of(project)["log"]).read_text()


def test_several_runs_are_told_apart(project: Project) -> None:
    workers = [project.worker(name, f"echo this is {name}; test {name} = one\n") for name in ("one", "other")]
    project.write(*workers, document("IncidentRun", "all", "matrix: {agent_type: [one, other]}"))
    done, _ = project.apply()

    assert re.search(r"^all\.one     run \w+   script   local   stops ", done.out, re.MULTILINE), done.out
    assert "all.one      | this is one\n" in done.out
    assert "all.other    | this is other\n" in done.out
    assert "all.one     ✓ agent" in done.out
    assert done.out.count("this is other") <= 3  # as it was printed, and as the end of what failed
    assert "\nSUCCEEDED all.one in " in done.out
    assert "\nFAILED all.other at agent in " in done.out


def test_a_success_says_what_now(project: Project, repository: Path) -> None:
    project.script(
        "echo more >> README",
        workspace=REPO,
        run="verify: {commands: [{run: [test, -s, README]}]}\nsnapshot: {message: m}",
    )
    done, record = project.apply()
    (deliver,) = re.findall(r"^  deliver    runner (runs branch \w+) ", done.out, re.MULTILINE)

    assert f"SUCCEEDED work in {record_seconds(record)}   1 file changed\n" in done.out
    assert f"  look       runner runs patch {record['id']}     evidence  runner runs show {record['id']}\n" in done.out
    assert project.runner(*deliver.split()).code == 0


def test_every_violation_is_named_with_its_rule(project: Project, repository: Path) -> None:
    """The headline said one: the other is found when the work is saved."""
    project.script(
        "echo x > .env; mkdir tests; echo x > tests/new.txt",
        workspace=REPO,
        run="snapshot: {message: m}",
        policy='allowed_paths: ["src/**"]\nforbidden_patterns: ["**/.env"]',
    )
    done, _ = project.apply()
    shown = project.runner("runs", "show", "last").out

    at = next(n for n, text in enumerate(project.manifest.read_text().splitlines(), start=1) if "Policy" in text) + 2
    assert done.code == 3
    assert "  2 violations of policy: .env, tests/new.txt\n" in done.out
    assert re.search(
        rf"^    \.env: forbidden:\*\*/\.env   policy house, \S*all.runner.yaml:{at}", done.out, re.MULTILINE
    )
    rule = rf"^    tests/new.txt: not-allowed   policy house allows src/\*\*, \S*all.runner.yaml:{at}"
    assert re.search(rule, done.out, re.MULTILINE), done.out
    assert done.out.count("tests/new.txt: not-allowed") == 1
    assert "  because    scan: 2 violations: .env: forbidden:**/.env; tests/new.txt: not-allowed\n" in shown


def test_a_timeout_is_called_so(project: Project) -> None:
    project.script("echo begun; sleep 60", agent="timeouts: {agent: 1s}")
    done, record = project.apply()

    assert done.code == 124
    assert "\nTIMED OUT work at agent in " in done.out
    (again,) = re.findall(r"^  again from here   runner (resume .*)$", done.out, re.MULTILINE)
    assert re.fullmatch(rf"resume {record['id']} --timeout \d+", again)


def test_a_want_of_the_workspace_is_said_with_the_way(project: Project) -> None:
    project.script("true", workspace="setup_commands: [nonesuch --version]")
    done, _ = project.apply()

    assert "`nonesuch` is not in the workspace" in done.out
    assert "= hint: " in done.out


def test_what_is_too_much_is_not_shown_whole(project: Project) -> None:
    project.script("seq 1 3000000; echo the end")
    done, _ = project.apply()

    assert len(done.out) < 1 << 20
    assert re.search(r"^   \| \[.* not shown\]$", done.out, re.MULTILINE)
    assert "   | the end\n" in done.out
    assert project.logs("agent").count("\n") > 3_000_000 - 1


@pytest.mark.slow
def test_a_run_does_not_wait_for_who_reads_of_it(project: Project) -> None:
    """A pager that shows the first page holds nothing up: the pipe is full, and the run ends."""
    project.script("for n in $(seq 1 9); do yes 'a line that takes its place' | head -n 999; sleep 0.2; done")
    process = project.start("apply", ".")
    assert process.stdout is not None
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
    until(lambda: [*project.home.glob("state/runs/*/run.json")])
    assert process.poll() is None  # there is something left to be read
    out, _ = process.communicate(timeout=60)

    assert process.returncode == 0
    assert "SUCCEEDED work in " in out


def test_nothing_printed_can_command_a_terminal(project: Project) -> None:
    project.script("printf '\\033[31mred\\033[0m \\033]0;title\\007 10%%\\r100%%\\a done\\n'")
    done, _ = project.apply()

    assert "   | 100% done\n" in done.out
    assert "\x1b" not in done.out


@pytest.mark.slow
def test_logs_of_an_agent_are_words_and_of_all_else_what_was_printed(project: Project, claude: Path) -> None:
    assert project.runner(*line(project, claude, TURNS)).code == 0

    read = project.runner("runs", "logs", "last", "agent")
    raw = project.runner("runs", "logs", "last", "agent", "--raw")
    followed = project.runner("runs", "logs", "last", "--follow")

    assert read.out.startswith("I read the incident.\n$ cat /incident/incident.json; printf 'probe %d' 0x2a\n")
    assert [json.loads(text)["type"] for text in raw.out.splitlines()][-1] == "result"
    assert "--- agent\nI read the incident.\n" in followed.out
    assert project.runner("runs", "logs", "last", "--follow", "--raw").code == 2


def test_logs_follow_a_run_to_its_end(project: Project) -> None:
    project.script(WAITING, provider="process", workspace='setup_commands: ["echo set up"]')
    running = project.start("apply", "-q", ".")
    until(lambda: [*project.home.glob("state/runs/*/logs/agent.stdout")])
    following = project.start("runs", "logs", "last", "-f")
    assert following.stdout is not None
    heard = [following.stdout.readline() for _ in range(4)]
    (output,) = (project.home / "state" / "sandboxes").glob("*/output")
    (output / "go").touch()
    rest, err = following.communicate(timeout=60)
    running.communicate(timeout=60)

    assert heard == ["--- setup\n", "set up\n", "--- agent\n", "first\n"]
    assert (rest, following.returncode) == ("last\n", 0), err
