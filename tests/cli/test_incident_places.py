"""Where a run on an incident finds its inputs and its skill, and where it leaves what it was sent and has printed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from runner.core.settings import shipped
from runner.ops.planning.make_plan import make_plan
from runner.runtime.incident_files import is_latest, keep_earlier, open_log
from tests.ops.runs.test_recover import kill, run_in_agent
from tests.support.runs import apply
from tests.support.situations import Project, document, step

INCIDENT = "incident: {directory: incident}"
SKILL = "skills: [k8s-troubleshooter]"
LOG = re.compile(r"triage_script_\d{8}_\d{6}(-\d+)?\.log")


@pytest.fixture
def incident(project: Project) -> Path:
    directory = project.folder / "incident"
    directory.mkdir()
    (directory / "incident.json").write_text("{}")
    return directory


def log_of(incident: Path) -> Path:
    (found,) = (path for path in (incident / "output").iterdir() if path.suffix == ".log")
    assert LOG.fullmatch(found.name)
    return found


LOOK = """
cd /; echo "== $(echo *)"
awk '$5 !~ "^/(proc|sys|dev)(/|$)" && $5 != "/" {print "mount", $5, substr($6, 1, 2)}' /proc/self/mountinfo | sort -u
ls /workspace | sed 's/^/work /'; ls -A /home/agent | sed 's/^/home /'
echo x > /workspace/incident.json; echo x > /workspace/new && echo x > /output/new && echo written
"""
WRITABLE = {"/workspace", "/output", "/home/agent", "/tmp"}
OWN = {*WRITABLE, "/workspace/incident.json", "/incident", "/run/runner", "/run/guest"}
SYSTEM = re.compile(r"/(usr|bin|sbin|lib|lib32|lib64)|/etc/(java-[\w.-]+/)?[\w.-]+|/run/channel")


@pytest.mark.scenario("TRI-05", only="provider")
@pytest.mark.parametrize("provider", ["local", "docker"])
def test_a_command_sees_the_incident_the_output_and_nothing_else_of_this_host(
    project: Project, incident: Path, provider: str
) -> None:
    (project.folder / "secret.txt").write_text("not for agents")
    project.script(LOOK, run=INCIDENT, provider=provider)
    done, record = project.apply()

    said = project.logs("agent").splitlines()
    mounts = {line.split()[1]: line.split()[2] for line in said if line.startswith("mount ")}
    assert record["exit_code"] == 0, done.out + done.err
    assert {place for place in mounts if not SYSTEM.fullmatch(place)} == OWN
    assert {place for place, how in mounts.items() if how == "rw"} <= WRITABLE
    assert [line for line in said if line.startswith(("work ", "home "))] == ["work incident.json"]
    assert said[-1] == "written"
    assert "Read-only file system" in project.logs("agent", "stderr")
    assert (incident / "output" / "new").read_text() == "x\n"
    assert (incident / "incident.json").read_text() == "{}"


@pytest.mark.parametrize("provider", ["local", "docker"])
def test_a_large_log_is_in_the_incident_only_and_stops_nothing(project: Project, incident: Path, provider: str) -> None:
    with (incident / "app.log").open("wb") as file:
        file.truncate(20 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b"the last line")
    (incident / "other.log").symlink_to("/etc/hostname")
    project.script(
        "ls /incident /workspace; tail -c 8 /incident/app.log; echo x >> /incident/app.log",
        run=INCIDENT,
        provider=provider,
    )
    done, record = project.apply()

    assert project.logs("agent").split() == [
        *("/incident:", "app.log", "incident.json"),
        *("/workspace:", "incident.json"),
        *("ast", "line"),
    ]
    assert "Read-only file system" in project.logs("agent", "stderr")
    said = [
        ("triage.large", "the incident's `app.log` is in /incident only, planned by size and time, not content"),
        (
            "triage.left-out",
            "left out of the incident: `other.log` (a link, and none is followed)",
        ),
    ]
    assert [(one["code"], one["message"]) for one in record["warnings"] if one["code"].startswith("triage.")] == said
    for code, message in said:
        assert f"warning[{code}]: {message}" in done.err
        assert message in done.out


async def test_a_large_log_that_is_written_meanwhile_or_gone_stops_no_run(project: Project, incident: Path) -> None:
    for name in ("grows", "goes"):
        with (incident / name).open("wb") as file:
            file.truncate(20 << 20)
    (incident / "small").write_text("planned")
    project.script("wc -c < /incident/grows; cat /incident/small; echo; ls /incident", run=INCIDENT)
    settings = project.settings()
    planned = await make_plan(project.folder, settings)
    for name in ("grows", "small"):
        with (incident / name).open("ab") as file:
            file.write(b"more")
    (incident / "goes").unlink()

    (record,) = await apply(planned, settings, [])

    assert record.exit_code == 0
    assert project.logs("agent").split() == [str(20 << 20), "planned", "grows", "incident.json", "small"]
    assert "`goes` (No such file or directory)" in record.warnings[-1][1]


@pytest.mark.scenario("TRI-07")
def test_a_skill_is_at_its_place_and_where_the_clis_look_for_it(project: Project, incident: Path) -> None:
    project.script(
        """
        cd /skills/k8s-troubleshooter && find . -type f | sort > $RUNNER_OUTPUT/files
        ls -d SKILL.md references scripts && scripts/incident_triage.sh --help > $RUNNER_OUTPUT/help
        for place in .claude .agents; do cmp ~/$place/skills/k8s-troubleshooter/SKILL.md SKILL.md && echo linked; done
        echo x > SKILL.md || rm -r scripts; ls /skills
        """,
        agent=SKILL,
        run=INCIDENT,
    )
    plan = project.runner("plan", ".")
    done, record = project.apply()

    source = shipped("skills") / "k8s-troubleshooter"
    names = sorted(f"./{path.relative_to(source)}" for path in source.rglob("*") if path.is_file())
    assert re.search(r"/skills/k8s-troubleshooter ro +all.runner.yaml:7\n", plan.out), plan.out
    assert record["exit_code"] == 0, done.err
    assert project.logs("agent").split() == [
        *("SKILL.md", "references", "scripts"),
        "linked",
        "linked",
        "k8s-troubleshooter",
    ]
    assert (incident / "output" / "files").read_text().splitlines() == names
    assert "incident_triage" in (incident / "output" / "help").read_text()


def test_a_skill_that_there_is_none_of_is_said_with_the_nearest(project: Project) -> None:
    project.script("true", agent="skills: [k8s-troubleshoter]")
    planned, validated = (project.runner(verb, str(project.folder)) for verb in ("plan", "validate"))

    for done in (planned, validated):
        assert done.code == 2
        assert "error[manifest.unknown-reference]: `k8s-troubleshoter` is not a skill of this installation" in done.err
        assert "did you mean `k8s-troubleshooter`?" in done.err
        assert re.search(r"all.runner.yaml:\d+:12", done.err), done.err


def test_a_provider_without_mounts_has_the_skill_where_the_clis_look(project: Project) -> None:
    project.script(
        "bash ~/.agents/skills/k8s-troubleshooter/scripts/incident_triage.sh --help", agent=SKILL, provider="process"
    )
    done, record = project.apply()

    assert record["exit_code"] == 0, done.out + done.err
    assert "incident_triage" in project.logs("agent")


def test_manifests_of_a_fork_may_use_shipped_skills(project: Project) -> None:
    project.script("true", agent=SKILL)

    assert project.runner("plan", ".", "--untrusted").code == 0


@pytest.mark.scenario("TRI-09")
def test_what_an_agent_prints_is_in_a_log_with_the_incident_without_secrets(project: Project, incident: Path) -> None:
    project.env["TOKEN"] = "tell-nobody-4711"
    project.script(
        "echo one; sleep 0.05; echo two >&2; sleep 0.05; echo three $TOKEN; exit 3",
        agent="secrets: [{name: TOKEN, from: {env: TOKEN}, steps: [agent]}]",
        run=INCIDENT,
    )
    done, record = project.apply()

    log = log_of(incident)
    assert log.read_text() == "one\ntwo\nthree [redacted:TOKEN]\n"
    assert record["log"] == str(log)
    assert f"  log         {log}" in done.out
    assert step(record, "agent")["outcome"]["reason"] == "exit"


def test_two_runs_of_one_second_have_logs_of_their_own(project: Project, incident: Path) -> None:
    output = incident / "output"
    logs = [open_log(output, "claude", 1_763_780_647_000_000 + moment) for moment in (0, 1, 999_999)]
    (output / "triage_claude_20251122_030408.log").symlink_to(project.folder / "elsewhere")
    logs.append(open_log(output, "claude", 1_763_780_648_000_000))
    (output / "triage_claude_20991231_235959.log").mkdir()
    for number, log in enumerate(logs):
        log.write(b"%d" % number)
        log.close()

    names = [f"triage_claude_20251122_0304{end}.log" for end in ("07", "07-2", "07-3", "08-2")]
    assert [log.path.name for log in logs] == names
    assert [(output / name).read_text() for name in names] == ["0", "1", "2", "3"]
    assert [is_latest(log.path) for log in logs] == [False, False, False, True]
    assert not is_latest(project.folder / "removed since" / names[0])
    assert not (project.folder / "elsewhere").exists()


def test_nothing_is_written_through_a_link_in_an_incident(project: Project, incident: Path) -> None:
    """An incident's directory may come from anywhere, and so may the links in it."""
    elsewhere = project.folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("as it was")
    (incident / "prompt-sent.md").symlink_to(elsewhere / "kept")
    project.script("echo never", run=INCIDENT)
    (incident / "output").symlink_to(elsewhere)
    _, refused = project.apply()
    (incident / "output").unlink()
    _, record = project.apply()

    assert refused["exit_code"] == 4
    assert step(refused, "agent")["outcome"]["reason"] == "platform"
    assert record["exit_code"] == 0
    assert sorted(path.name for path in elsewhere.iterdir()) == ["kept"]
    assert (elsewhere / "kept").read_text() == "as it was"
    assert not (incident / "prompt-sent.md").is_symlink()


@pytest.mark.scenario("TRI-35")
def test_the_prompt_is_with_the_incident_before_the_agent_starts(project: Project, incident: Path) -> None:
    (incident / "prompt-sent.md").write_text("of an earlier run, and longer than this one's")
    project.script("cat > $RUNNER_OUTPUT/stdin", run=f"{INCIDENT}\nprompt: find it")
    _, record = project.apply()

    sent = (incident / "prompt-sent.md").read_bytes()
    assert sent == (incident / "output" / "stdin").read_bytes() == b"find it"
    assert sent == (project.directory(record) / "prompt-sent.md").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "later", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["the last run", "a run before another"]
)
def test_a_recovered_run_delivers_to_its_incident_unless_another_came_after(
    project: Project, incident: Path, later: bool
) -> None:
    forged = "echo > $RUNNER_OUTPUT/triage_x_20991231_235959.log"
    project.script(forged, run=INCIDENT)
    before = project.runner("apply", ".")
    assert "output left behind: 'triage_x_20991231_235959.log'" in before.out + before.err
    work = f"{forged}; echo draft > $RUNNER_OUTPUT/report.md; echo said; echo > made; sleep 300"
    project.script(work, run=INCIDENT)
    with run_in_agent(project) as (runner, run):
        kill(runner)
        logs = project.home / "state" / "runs" / run / "logs"
        (logs / "agent-session.tar.gz").write_bytes(b"archive")
        (logs / "agent-commands-executed.log").write_text("ls\n")
        if later:
            project.script("echo final > $RUNNER_OUTPUT/report.md", run=INCIDENT)
            done = project.runner("apply", ".")
            assert done.code == 0, done.out + done.err
        recovered = project.runner("recover", run)
        assert (recovered.code, recovered.err) == (0, ""), recovered.out
        assert ("another run has worked on the incident since" in recovered.out) == later

    delivered = sorted(str(path.relative_to(incident)) for path in incident.rglob("*") if path.is_file())
    mine = ["logs/agent-commands-executed.log", "logs/agent-session.tar.gz"]
    assert [name for name in delivered if name.startswith("logs/")] == ([] if later else mine)
    assert (incident / "output" / "report.md").read_text() == ("final\n" if later else "draft\n")
    kept = project.home / "state" / "runs" / run / "output" / "report.md"
    assert kept.read_text() == "draft\n"


def test_members_of_a_matrix_that_share_an_incident_do_not_write_over_each_other(
    project: Project, incident: Path
) -> None:
    reports = {"one": "echo 1 > /output/report.md", "two": "echo 2 > /output/report.md"}
    types = [project.worker(name, script) for name, script in reports.items()]
    run = f"matrix: {{agent_type: [one, two]}}\nprompt: 'find it'\n{INCIDENT}"
    project.write(*types, document("IncidentRun", "work", run))

    done = project.runner("apply", ".")

    assert done.code == 0, done.out + done.err
    found = {place.name: (place / "report.md").read_text() for place in (incident / "output").glob("work.*")}
    assert found == {"work.one": "1\n", "work.two": "2\n"}
    assert [(incident / "logs" / name / "prompt-sent.md").read_text() for name in found] == ["find it"] * 2
    assert len(list((incident / "output").glob("triage_script_*.log"))) == 2


def test_a_report_of_another_run_is_kept_and_nothing_else_is_touched(tmp_path: Path) -> None:
    there, new = tmp_path / "there", tmp_path / "new"
    for folder in (there, new):
        folder.mkdir()
    (there / "report.md").write_text("complete")

    assert keep_earlier(there / "report.md", new / "report.md") == []  # a run without one
    assert [path.name for path in there.iterdir()] == ["report.md"]
    (new / "report.md").write_text("draft")
    assert keep_earlier(there / "report.md", new / "report.md") == []
    (kept,) = there.iterdir()
    assert (bool(re.fullmatch(r"report\.\d{8}_\d{6}\.md", kept.name)), kept.read_text()) == (True, "complete")
    (there / "report.md").symlink_to(kept)
    assert keep_earlier(there / "report.md", new / "report.md") == []
    assert (there / "report.md").is_symlink()


def test_a_second_run_of_an_incident_keeps_the_first_ones_report(project: Project, incident: Path) -> None:
    verify = f"{INCIDENT}\nverify: {{report: {{path: r.md, min_bytes: 3}}}}"
    for text, code in (("complete", 0), ("x", 1)):
        project.script(f"printf {text} > /output/r.md", run=verify)
        assert project.apply()[1]["exit_code"] == code

    (kept,) = (incident / "output").glob("r.*.md")
    assert (kept.read_text(), (incident / "output" / "r.md").read_text()) == ("complete", "x")
