"""``runner triage`` as an engineer on call types it, with each real CLI and a script in its model's place."""

from __future__ import annotations

import json
import os
import re
import signal
import tarfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from runner.fake_model.provider import serve_fake_model
from runner.fake_model.script import Turn
from tests.cli.test_agent_clis import CLIS, KEY, WORK, places_with, tap_port, toolchain
from tests.cli.test_rehearse import STAND_IN, claude
from tests.support import dockerd
from tests.support.kubernetes import KUBECTL, POD, TOKEN, serving
from tests.support.situations import Done, Project, processes_of, step, until
from tests.support.terminal import on_terminal

__all__ = ["claude", "toolchain"]

REPORT = """\
# checkout in payments: CrashLoopBackOff

## Summary

**The memory limit is too small.** P1, high.

## Root Cause

Memory limit cut 512Mi -> 256Mi by rollout 118 [FACT-1].

## Evidence

- **FACT-1** the incident says so (`cat /incident/incident.json`)

## Blast Radius

3 of 5 pods.

## Commands Executed

- `cat /incident/incident.json`

## Next Steps

1. `kubectl -n payments rollout undo deploy/checkout` (not run: read only)

## Unchecked

- configmaps (no right)
"""
MARKED = "> REHEARSAL: no model was asked, a.turns.yaml stood for it. This is no investigation.\n\n"
TURNS: list[dict[str, Any]] = [
    {"say": "I read the incident.", "run": "cat /incident/incident.json; printf 'probe %d' 0x2a"},
    {"say": "I write.", "write": {"path": "/output/investigation.md", "content": REPORT}},
    {"say": "The memory limit was cut by rollout 118.", "usage": {"input": 2000, "output": 20}},
]
DESCRIBED = ("--namespace", "payments", "--resource", "deploy/checkout")


def triage(project: Project, *arguments: str, turns: list[dict[str, Any]] | None = None) -> Done:
    return project.runner("triage", *words_of(project, TURNS if turns is None else turns), *arguments)


def words_of(project: Project, turns: list[dict[str, Any]]) -> tuple[str, ...]:
    """The options of a rehearsal with these turns."""
    (project.folder / "a.turns.yaml").write_text(json.dumps({"turns": turns}))
    return ("-w", "INC-1", "--turns", "a.turns.yaml")


def record_of(project: Project) -> dict[str, Any]:
    found: dict[str, Any] = project.record()
    return found


def place(project: Project, provider: str, tools: Path) -> tuple[str, ...]:
    """The options for a place that has the CLIs. A container sees of this host Node, libraries, and certificates."""
    if provider == "local":
        return ("--provider", "local", "--toolchain", str(tools))
    project.env["DOCKER_HOST"] = dockerd.host()
    seen = (str(tools), "/usr", "/etc/ssl")
    return ("--provider", provider, "-i", dockerd.IMAGE, *(word for path in seen for word in ("--toolchain", path)))


# What could have the key inside: environments, command lines, temporary files, and the home directory.
SEARCH = f"; {WORK.strip().partition(chr(10))[2]}\ncp -r ~ $RUNNER_OUTPUT/home"


async def investigate(project: Project, name: str, provider: str, tools: Path) -> Done:
    """Rehearse in a container. Here, with a key, which the double in the provider's place hears, and nobody else."""
    words = ("-a", name, *DESCRIBED, "-d", *place(project, provider, tools), "Why does it restart?")
    variable, header = CLIS[name]
    project.env[variable] = KEY
    if provider != "local":
        return await trio.to_thread.run_sync(partial(triage, project, *words))
    look, *others = TURNS
    turns = [Turn.model_validate(turn) for turn in ({**look, "run": look["run"] + SEARCH}, *others)]
    heard = bytearray()
    async with serve_fake_model(turns) as port, tap_port(port, heard) as front:
        url = f"http://127.0.0.1:{front}"
        project.env |= {"RUNNER_ANTHROPIC_URL": url, "RUNNER_OPENAI_URL": f"{url}/v1", "RUNNER_GEMINI_URL": url}
        done = await trio.to_thread.run_sync(partial(project.runner, "triage", "-w", "INC-1", *words))
    assert header.lower() in heard.decode(errors="replace").lower()
    return done


KEYS = {"claude": "TRI-12", "codex": "TRI-13", "gemini": "TRI-14", "goose": "BEY-18"}


@pytest.mark.slow
@pytest.mark.scenario("TRI-02", only="provider")
@pytest.mark.scenario("TRI-17", only="provider")
@pytest.mark.parametrize(
    ("name", "provider"),
    [
        *(pytest.param(name, "local", marks=pytest.mark.scenario(scenario)) for name, scenario in KEYS.items()),
        *(pytest.param(name, "docker", marks=() if name == "claude" else pytest.mark.nightly) for name in KEYS),
    ],
)
async def test_each_cli_investigates_an_incident_and_writes_its_report(
    project: Project, toolchain: Path, name: str, provider: str
) -> None:
    done = await investigate(project, name, provider, toolchain)

    incident, record = project.folder / "INC-1", record_of(project)
    log = Path(record["log"])
    assert done.code == 0, done.out + done.err
    assert done.out.startswith("REHEARSAL ") is (provider == "docker")
    assert ("REHEARSED in " if provider == "docker" else "INVESTIGATED in ") in done.out
    assert "  Agent says  Memory limit cut 512Mi -> 256Mi by rollout 118 [FACT-1]." in done.out
    report = (incident / "output" / "investigation.md").read_text().strip()
    assert report.startswith(MARKED) is (provider == "docker")
    assert report.removeprefix(MARKED) == REPORT.strip()
    assert log.parent == incident / "output"
    assert re.fullmatch(rf"triage_{name}_\d{{8}}_\d{{6}}\.log", log.name)
    assert "probe 42" in log.read_text()
    assert "payments" in log.read_text().partition("probe 42")[0]
    sent = (incident / "prompt-sent.md").read_text()
    assert sent.index("<incident") < sent.index("Why does it restart?")
    assert [used["requests"] >= 3 and used["input_tokens"] > 2000 for used in record["models"].values()] == [True]
    assert step(record, "agent")["outcome"]["message"] == "The memory limit was cut by rollout 118."
    assert record["observed"]["limits"]["memory_bytes"] == 2 << 30
    commands = (incident / "logs" / "agent-commands-executed.log").read_text()
    assert "$ cat /incident/incident.json; printf" in commands
    with tarfile.open(incident / "logs" / "agent-session.tar.gz") as archive:
        assert archive.getnames()
    login = incident / "output" / "home" / ".codex" / "auth.json"
    assert provider != "local" or login.exists() is (name == "codex")
    assert provider != "local" or {"home", "processes", "temporary"} <= set(os.listdir(incident / "output"))
    assert places_with(KEY, project.home) + places_with(KEY, project.folder) == []
    assert KEY not in done.out + done.err


HANGS: list[dict[str, Any]] = [
    {"say": "A draft first.", "write": {"path": "/output/investigation.md", "content": REPORT.partition("## Root")[0]}},
    {"say": "I look deeper.", "run": "echo begun; sleep 1000 & setsid sleep 1000 & wait"},
]
SAID = 'print(json.dumps({"type": "assistant", "message": {"content": content}}), flush=True)'
TALKS = STAND_IN.replace("    calls = [", f"    {SAID}\n    calls = [")
WAITS: list[dict[str, Any]] = [{"say": "I wait.", "run": "sleep 3"}, *TURNS]


def line(project: Project, tools: Path, turns: list[dict[str, Any]]) -> list[str]:
    """The command of a rehearsal by a stand-in that says what it does."""
    (tools / "bin" / "claude").write_text(TALKS)
    return ["triage", *words_of(project, turns), *DESCRIBED, *place(project, "local", tools)]


def wait_for_first_words(project: Project) -> None:
    """Wait until an agent has said something."""
    until(lambda: [log for log in (project.folder / "INC-1" / "output").glob("*.log") if log.stat().st_size])


@pytest.mark.slow
@pytest.mark.scenario("TRI-16")
def test_a_time_out_ends_with_what_there_is_and_nothing_lives(project: Project, claude: Path) -> None:
    (claude / "bin" / "claude").write_text(TALKS)
    done = triage(project, *DESCRIBED, "--timeout", "4", *place(project, "local", claude), turns=HANGS)

    record = record_of(project)
    assert (done.code, record["status"], record["exit_code"]) == (124, "failed", 124), done.out + done.err
    assert re.search(r"^TIMED OUT after [\d.]+s in agent \(exit 124\)", done.out, re.MULTILINE)
    assert "  Report      draft, 1 of 7 sections\n" in done.out
    assert (project.folder / "INC-1" / "output" / "investigation.md").read_text().startswith(f"{MARKED}# checkout")
    assert '  Last words  "I look deeper."\n' in done.out, done.out
    assert processes_of(project.home) == []


@pytest.mark.slow
@pytest.mark.scenario("TRI-10")
def test_a_run_outlives_its_terminal_and_is_returned_to_from_another(project: Project, claude: Path) -> None:
    with on_terminal(project, *line(project, claude, WAITS), own=True) as terminal:
        wait_for_first_words(project)
        assert terminal.until("\x1b[2K")
        terminal.hang_up()

        attached = project.runner("runs", "attach", "last")
        assert terminal.process.wait(60) == 0
    again = project.runner("runs", "attach", "last", "-q")

    assert "claude/sonnet in local   stops " in terminal.text
    assert (attached.code, again.code) == (0, 0), attached.err
    assert "   | I read the incident.\n" in attached.out
    assert "REHEARSED in " in attached.out
    assert "\x1b" not in attached.out
    assert "   | " not in again.out
    assert attached.out.split("\n")[-7:] == again.out.split("\n")[-7:]
    assert f"  Second opinion: runner triage -w INC-1 -a codex --provider local --toolchain {claude}" in again.out
    assert (project.folder / "INC-1" / "output" / "investigation.md").exists()


@pytest.mark.nightly
def test_whoever_stops_looking_stops_nothing(project: Project, claude: Path) -> None:
    running = project.start(*line(project, claude, WAITS))
    wait_for_first_words(project)
    attached = project.start("runs", "attach", "last")
    assert attached.stdout is not None
    assert attached.stdout.readline().startswith("REHEARSAL")

    attached.send_signal(signal.SIGINT)
    said = attached.communicate(timeout=60)[1]

    assert attached.returncode == 130
    assert "the run continues: runner runs attach " in said
    running.communicate(timeout=60)
    assert running.returncode == 0


def test_any_run_can_be_looked_at(project: Project) -> None:
    project.script("echo one; printf 'two\\033[2J'; exit 3")
    project.apply()

    attached = project.runner("runs", "attach", "last")

    assert attached.code == 1
    assert "   | one\n   | two\n" in attached.out
    assert "FAILED work at agent in " in attached.out


@pytest.mark.slow
def test_what_is_printed_is_what_is_applied(project: Project, claude: Path) -> None:
    where = place(project, "local", claude)
    done = triage(project, *DESCRIBED, *where, "-o", "json", "--max-turns", "9", "why {{ x }}?")
    first = json.loads(done.out)
    printed = triage(project, *where, "--max-turns", "9", "--print", "why {{ x }}?")
    (project.folder / "sub").mkdir()
    (project.folder / "sub" / "printed.runner.yaml").write_text(printed.out)

    applied = project.runner("rehearse", "sub", "--turns", "a.turns.yaml", "--output", "jsonl")
    second = record_of(project)

    assert (done.code, printed.code, applied.code) == (0, 0, 0), applied.err
    assert first["id"] != second["id"]
    assert [s["outcome"]["message"] for s in first["steps"]][:2] != []
    assert first["plan"] == second["plan"]
    assert "why {{ x }}?" in (project.folder / "INC-1" / "prompt-sent.md").read_text()
    assert json.loads(applied.out.splitlines()[0])["type"] == "RunStarted"


HERE = ("--provider", "local", "--toolchain", "tools")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        pytest.param((), 2, "an incident workspace directory is required", id="no directory"),
        pytest.param(("-w", "/"), 3, "the root of this host", id="the root"),
        pytest.param(("-w", "INC-1", *DESCRIBED, "--provider", "lcoal"), 2, "local", id="no provider"),
        pytest.param(("-w", "/etc", *DESCRIBED), 3, "this host's own system", id="a system's directory"),
        pytest.param(("-w", "INC-1", *DESCRIBED, *HERE), 2, "ANTHROPIC_API_KEY", id="no key"),
        pytest.param(("-w", "INC-1", *DESCRIBED, *HERE, "-a", "goose"), 2, "OPENAI_API_KEY", id="no other key"),
        pytest.param(
            ("-w", "INC-1", *DESCRIBED, *HERE), 2, "--check` shows all that is missing", id="no key, and more"
        ),
        pytest.param(
            ("-w", "INC-1", *DESCRIBED, "--provider", "local", "-a", "goose"), 2, "or --toolchain DIR", id="no CLI"
        ),
        pytest.param(
            ("-w", "INC-1", *DESCRIBED, "--provider", "local", "-a", "codex", "-t", "Bash"),
            2,
            "`codex` cannot be told which tools it has",
            id="tools that cannot be kept",
        ),
    ],
)
def test_what_cannot_begin_says_why_before_anything_is_made(
    project: Project, arguments: tuple[str, ...], code: int, words: str
) -> None:
    """Cases 139 and 212."""
    for name in ("claude", "goose"):
        (project.folder / "tools" / "bin").mkdir(parents=True, exist_ok=True)
        (project.folder / "tools" / "bin" / name).touch(mode=0o755)

    done = project.runner("triage", *arguments)

    assert (done.code, done.out) == (code, "")
    assert words in done.err
    assert not (project.folder / "INC-1").exists()
    assert not (project.home / "state" / "runs").exists() or not os.listdir(project.home / "state" / "runs")


def alive(word: str) -> list[str]:
    """Processes of this host that were started with a word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += [path.parent.name] if word.encode() in path.read_bytes().split(b"\0") else []
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "provider",
    [
        pytest.param("local", marks=pytest.mark.scenario("TRI-16", only="local")),
        pytest.param("docker", marks=pytest.mark.scenario("TRI-16", only="docker")),
    ],
)
def test_a_time_out_kills_what_a_real_cli_has_started_inside(project: Project, toolchain: Path, provider: str) -> None:
    mark = f"{1000 + os.getpid() / 1e7:.7f}"
    wait = f"timeout {mark} tail -f /dev/null"
    turns: list[dict[str, Any]] = [{"say": "I look.", "run": f"setsid {wait} & {wait}"}, {"say": "late"}]
    where = place(project, provider, toolchain)
    project.env["CONTAINER_TIMEOUT"] = "12"

    running = project.start("triage", *words_of(project, turns), *DESCRIBED, *where)
    until(lambda: len(alive(mark)) >= 2)
    out, err = running.communicate(timeout=120)

    assert running.returncode == 124, out + err
    assert re.search(r"^TIMED OUT after 1\d(\.\d)?s in agent \(exit 124\)", out, re.MULTILINE), out
    assert alive(mark) == []


@pytest.mark.slow
@pytest.mark.scenario("TRI-18")
def test_a_list_of_tools_is_all_that_the_real_claude_has(project: Project, toolchain: Path) -> None:
    where = place(project, "local", toolchain)

    done = triage(project, *DESCRIBED, *where, "-t", "Read,Grep,Bash")

    assert done.code in (0, 1), done.out + done.err  # without a tool to write, the report may be missing
    raw = (project.directory(record_of(project)) / "logs" / "agent.stdout").read_text()
    first = next(line for line in map(json.loads, raw.splitlines()) if line.get("subtype") == "init")
    assert sorted(first["tools"]) == ["Bash", "Grep", "Read"]
    argv = next(
        json.loads(line)["argv"]
        for line in (project.directory(record_of(project)) / "events.jsonl").read_text().splitlines()
        if '"AgentStarted"' in line
    )
    assert {"--tools=Read,Grep,Bash", "--allowedTools=Read,Grep,Bash"} <= {*argv}


INVENTED = REPORT.replace("`cat /incident/incident.json`)", "`incident.json:3`, `pods.txt:14`)").replace(
    "- `cat /incident/incident.json`", "- `cat /incident/incident.json`\n- `kubectl -n payments get events`"
)
CITES: list[dict[str, Any]] = [
    {"run": "cat /incident/incident.json"},
    {"write": {"path": "/output/investigation.md", "content": INVENTED}},
    {"say": "Found it."},
]


@pytest.mark.nightly
def test_a_report_that_cites_what_is_not_there_fails_and_a_command_that_never_ran_is_told(
    project: Project, claude: Path
) -> None:
    (project.folder / "INC-1" / "kubectl").mkdir(parents=True)
    (project.folder / "INC-1" / "kubectl" / "pods.txt").write_text("NAME\ncheckout\n")
    where = place(project, "local", claude)
    wrong = triage(project, *DESCRIBED, *where, turns=CITES)
    failed = record_of(project)
    (project.folder / "INC-1" / "kubectl" / "pods.txt").write_text("x\n" * 14)
    right = triage(project, *where, turns=CITES)

    text = "report references: 1 of 2 are wrong: `pods.txt:14`: there is no line 14: it has 2"
    assert (wrong.code, failed["outcome"]["reason"]) == (1, "verify"), wrong.out + wrong.err
    assert text in wrong.out
    assert " ! the report claims a command that its agent did not run: `kubectl -n payments get events`\n" in wrong.out
    assert [one["code"] for one in failed["warnings"]].count("report.command-not-run") == 1
    assert right.code == 0, right.out + right.err
    assert "9 of 9 checks" in right.out


# Of root a user who is not, though the files are its own, on a host without control groups.
_HIDE = 'mount -t tmpfs none /sys/fs/cgroup && exec unshare --user --map-user=1000 --map-group=1000 "$@"'
ORDINARY = () if os.geteuid() else ("unshare", "--mount", "sh", "-c", _HIDE, "sh")


@pytest.mark.slow
def test_an_ordinary_user_types_no_options_for_the_place_and_is_told_what_is_not_limited(
    project: Project, claude: Path
) -> None:
    (claude / "bin" / "claude").write_text(TALKS)
    project.within = ORDINARY
    project.env |= {"PATH": f"{claude}/bin:/usr/bin:/bin", "DOCKER_HOST": f"unix://{project.home}/none"}

    done = triage(project, *DESCRIBED)
    asked = triage(project, *DESCRIBED, "--memory", "2g")
    cpus = triage(project, *DESCRIBED, "--cpus", "1")

    assert done.code == 0, done.out + done.err
    assert "claude/sonnet in local   stops " in done.out
    assert "runner triage -w INC-1 -a codex --provider local\n" in done.out
    assert "warning[plan.not-enforced]: memory is not limited here: " in done.err
    assert "error[plan.unenforceable]: --memory: `local` cannot enforce memory 2G: " in asked.err
    assert "error[plan.unenforceable]: --cpus: `local` cannot enforce 1 CPU: " in cpus.err
    assert "--memory" not in cpus.err
    assert (asked.code, cpus.code) == (2, 2)


def test_the_place_is_docker_where_that_works_for_the_user_and_is_not_asked_for_otherwise(
    project: Project, claude: Path
) -> None:
    project.env |= {"PATH": f"{claude}/bin:/usr/bin:/bin", "DOCKER_HOST": dockerd.host()}
    described = ("triage", "-w", "INC-1", *DESCRIBED, "--print")

    with_docker = project.runner(*described)
    project.env["DOCKER_HOST"] = f"unix://{project.home}/none"
    without = project.runner(*described)
    named = project.runner(*described, "--provider", "docker")

    assert "    providers: [docker]\n" in with_docker.out, with_docker.err
    assert "    base_image: {ref: k8s-triage-agent, pull: never}\n" in with_docker.out
    assert "    providers: [local]\n" in without.out, without.err
    assert f"    toolchains: [{claude}/bin]\n" in without.out
    assert "    providers: [docker]\n" in named.out


def test_an_image_that_is_not_there_names_what_builds_it(project: Project) -> None:
    project.env["DOCKER_HOST"] = dockerd.host()
    project.env["ANTHROPIC_API_KEY"] = KEY

    done = project.runner("triage", "-w", "INC-1", *DESCRIBED, "-i", "k8s-triage-agent:none")

    assert (done.code, done.out) == (4, "")
    assert "k8s-triage-agent:none" in done.err
    assert "= hint: runner image build" in done.err


LOOKS: list[dict[str, Any]] = [
    {"say": "I look.", "run": f"kubectl get pods -o name; kubectl logs {POD}; kubectl get secrets"},
    *TURNS[1:],
]


@pytest.mark.nightly
@pytest.mark.usefixtures("kubectl")
def test_a_cluster_is_read_through_the_runner_and_told_of(project: Project, claude: Path, authority: Path) -> None:
    (claude / "bin" / "claude").write_text(TALKS)
    with serving(authority) as api:
        kubeconfig = str(api.write(project.home / "kubeconfig"))
        where = (*place(project, "local", claude), "--toolchain", str(KUBECTL), "--kubeconfig", kubeconfig)
        project.env["ANTHROPIC_API_KEY"] = KEY
        project.env["RUNNER_ANTHROPIC_URL"] = "http://127.0.0.1:1"
        checked = project.runner("triage", *where, "--check")
        done = triage(project, *DESCRIBED, *where, turns=LOOKS)

    assert checked.code == 3
    assert "✗ key       127.0.0.1 cannot be reached: connection refused\n" in checked.out
    assert "hint: look at `RUNNER_ANTHROPIC_URL`, `HTTPS_PROXY` and `SSL_CERT_FILE`" in checked.out
    assert f"✓ cluster   prod-eu https://127.0.0.1:{api.port} answers; read only" in checked.out
    assert "! rights    pods logs events deployments services configmaps in payments; no nodes" in checked.out
    assert not list((project.home / "state").glob("runs/*/plan.json"))[1:]
    assert done.code == 0, done.out + done.err
    assert f"cluster    prod-eu https://127.0.0.1:{api.port}, namespace payments   READ ONLY (get list" in done.out
    parts = r"incident [\d.]+k \+ (permissions|rights) [\d.]+k \+ baseline [\d.]+k = "
    assert re.search(rf"^ ✓ preload +[\d.]+s  {parts}", done.out, re.MULTILINE), done.out
    assert "     baseline: " in done.out
    assert re.search(r"^  Cluster     prod-eu: \d+ requests, \d+ refused \(list secrets\)$", done.out, re.MULTILINE)
    assert TOKEN not in done.out + done.err
    assert places_with(TOKEN, project.home / "state") + places_with(TOKEN, project.folder / "INC-1") == []
