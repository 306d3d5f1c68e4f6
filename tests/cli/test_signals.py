"""Stopping whole runs by signals and deadlines: what is saved, what is left, how long it takes, and what is said."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from runner.ops.signals import FATAL
from tests.support import dockerd
from tests.support.guest_driver import descendants
from tests.support.situations import Project, processes_of, step

REPOSITORY = "repo_source: {type: local, path: repo}"
WORK = "echo work > work"
DAEMON = "(setsid sh -c \"trap '' TERM; exec sleep 1000\" >/dev/null 2>&1 &)"
OBEDIENT = f"{DAEMON}; echo begun; sleep 1000"
STUBBORN = f"{DAEMON}; trap '' TERM; echo begun; while :; do sleep 0.1; done"


def at_night(number: signal.Signals, where: str) -> bool:
    """Where a run is when a signal comes matters, and hardly which: by day a person's, a CI's and one of the rest."""
    return number is not signal.SIGTERM and (where != "agent" or number not in (signal.SIGINT, signal.SIGXCPU))


FATAL_THERE = [
    pytest.param(
        number, where, id=f"{number.name}-{where}", marks=[pytest.mark.nightly] if at_night(number, where) else []
    )
    for number in FATAL
    for where in ("setup", "agent", "verify")
]


def hanging(project: Project, where: str, how: str = OBEDIENT) -> None:
    """A run that makes something, and then does not get past one of its steps."""
    commands = {"setup": "true", "agent": "true", "verify": "true", where: how}
    project.script(
        commands["agent"],
        workspace=f"{REPOSITORY}\nsetup_commands: {json.dumps([WORK, commands['setup']])}",
        run=f"verify: {{commands: [{{run: {json.dumps(commands['verify'])}}}]}}",
    )


def started(project: Project, where: str) -> subprocess.Popen[str]:
    """An apply that has come to print something in a step."""
    process = project.start("apply", str(project.folder))
    logs = project.home / "state" / "runs"
    until(lambda: process.poll() is not None or any(log.stat().st_size for log in logs.glob(f"*/logs/{where}.stdout")))
    return process


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def ended(project: Project, process: subprocess.Popen[str]) -> tuple[int, dict[str, Any], str]:
    """The exit code, the run's record and what was printed."""
    out, err = process.communicate(timeout=120)
    (run,) = (project.home / "state" / "runs").iterdir()
    types = [json.loads(line)["type"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert types.count("RunEnded") == 1, out + err
    return process.returncode, json.loads((run / "run.json").read_text()), out + err


def said(text: str, where: str) -> list[str]:
    """What was said about ending a step's command while it was done, without how long it had."""
    lines = [line.removeprefix(f"  ! {where}: ").partition(",")[0] for line in text.splitlines()]
    return [line for line in lines if line.startswith(("TERM (", "KILL (", "sandbox killed ("))]


def saved(project: Project, record: dict[str, Any]) -> bool:
    return "+work" in (project.directory(record) / "work.patch").read_text()


@pytest.mark.slow
@pytest.mark.scenario("BEY-06")
@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize(("number", "where"), FATAL_THERE)
def test_a_fatal_signal_ends_the_work_which_is_saved_and_nothing_is_left(
    project: Project, number: signal.Signals, where: str
) -> None:
    hanging(project, where)
    process = started(project, where)

    process.send_signal(number)
    code, record, text = ended(project, process)

    assert code == 130, text
    assert (record["status"], record["exit_code"], record["cancelled_by"]) == ("cancelled", 130, "signal")
    assert step(record, where)["status"] == "cancelled"
    assert saved(project, record)
    assert record["left_behind"] == []
    assert processes_of(project.home) == []


@pytest.mark.slow
def test_a_lost_terminal_ends_nothing(project: Project) -> None:
    project.script("echo begun; sleep 1; echo whole")
    process = started(project, "agent")

    process.send_signal(signal.SIGHUP)
    code, record, text = ended(project, process)

    assert code == 0, text
    assert record["status"] == "succeeded"
    assert project.logs("agent") == "begun\nwhole\n"


@pytest.mark.slow
@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize("provider", ["local", "process"])
def test_a_second_signal_takes_no_grace_and_says_what_is_left(project: Project, provider: str) -> None:
    project.script(f"{WORK}; {STUBBORN}", workspace=REPOSITORY, provider=provider)
    process = started(project, "agent")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None

    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    code, record, text = ended(project, process)

    assert time.monotonic() - began < 9, "the grace is ten seconds"
    assert code == 130, text
    assert said(text, "agent") == ["TERM (signal)", "KILL (second signal)"]
    assert [left.split()[0] for left in record["left_behind"]] == ["lease", "workspace"]
    assert f"LEFT BEHIND  {record['left_behind'][0]}" in text
    assert f"clean up   runner recover {record['id']}" in text
    assert processes_of(project.home) == []
    (tree,) = (project.home / "state" / "projects" / "default" / "workspaces").iterdir()
    assert (tree / "work").read_text() == "work\n"
    assert project.runner("recover").code == 0


@pytest.mark.slow
def test_no_process_of_a_sandbox_outlives_a_killed_runner(project: Project) -> None:
    project.script(STUBBORN)
    process = started(project, "agent")
    assert len(processes_of(project.home)) > 3

    process.kill()
    process.communicate()
    until(lambda: processes_of(project.home) == [])

    assert project.runner("recover").code == 0


AT_RUN, AT_STEP = "agent: stopped at the run's deadline", "agent: stopped at its deadline of 1s"
KILL_BUDGET = "KILL (stop budget)"


@pytest.mark.slow
@pytest.mark.scenario("BEY-06")
@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize(
    ("agent", "timeouts", "run", "message", "stop_stages"),
    [
        pytest.param(OBEDIENT, "", "timeout: 5s", AT_RUN, ["TERM (run deadline)"], id="run"),
        pytest.param(
            STUBBORN,
            "stop_budget: 4s",
            "timeout: 5s",
            AT_RUN,
            ["TERM (run deadline)", KILL_BUDGET],
            marks=pytest.mark.nightly,
            id="run, ignoring TERM",
        ),
        pytest.param(OBEDIENT, "timeouts: {agent: 1s}", "", AT_STEP, ["TERM (step deadline)"], id="step"),
        pytest.param(
            STUBBORN,
            "timeouts: {agent: 1s}",
            "",
            AT_STEP,
            ["TERM (step deadline)", "KILL (step deadline)"],
            marks=pytest.mark.nightly,  # the grace is ten seconds
            id="step, ignoring TERM",
        ),
        pytest.param(
            STUBBORN,
            "timeouts: {agent: 1s}\nstop_budget: 4s",
            "timeout: 6s",
            AT_STEP,
            ["TERM (step deadline)", KILL_BUDGET],
            id="step and then run, ignoring TERM",
        ),
    ],
)
def test_at_a_deadline_the_last_process_inside_is_gone_and_the_work_saved(
    project: Project, agent: str, timeouts: str, run: str, message: str, stop_stages: list[str]
) -> None:
    project.script(f"{WORK}; {agent}", workspace=REPOSITORY, agent=timeouts, run=run)

    code, record, text = ended(project, project.start("apply", str(project.folder)))

    assert code == 124, text
    assert (record["outcome"]["reason"], record["outcome"]["message"]) == ("timeout", message)
    assert said(text, "agent")[: len(stop_stages)] == stop_stages  # a daemon may have needed more than its command
    assert processes_of(project.home) == []
    assert saved(project, record)
    assert record["left_behind"] == []


@pytest.mark.slow
@pytest.mark.scenario("BEY-06")
@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize("where", ["setup", "agent", "verify"])
@pytest.mark.parametrize("provider", ["local", "docker"])
def test_each_step_has_a_deadline_at_which_all_that_it_started_is_gone(
    project: Project, where: str, provider: str
) -> None:
    commands = {**dict.fromkeys(("setup", "agent", "verify"), "true"), where: "sleep 300 & sleep 300"}
    project.env["DOCKER_HOST"] = dockerd.host() if provider == "docker" else ""
    image = f"\nbase_image: {dockerd.IMAGE}" if provider == "docker" else ""
    project.script(
        commands["agent"],
        provider=provider,
        workspace=f"{REPOSITORY}{image}\nsetup_commands: {json.dumps([WORK, commands['setup']])}",
        agent=f"timeouts: {{{where}: 2s}}",
        run=f"verify: {{commands: [{{run: {json.dumps(commands['verify'])}}}]}}",
    )

    code, record, text = ended(project, project.start("apply", str(project.folder)))

    assert code == 124, text
    assert record["outcome"]["message"] == f"{where}: stopped at its deadline of 2s"
    assert processes_of(project.home) == []
    assert saved(project, record)
    assert record["left_behind"] == []


@pytest.mark.slow
@pytest.mark.usefixtures("repository")
def test_after_one_signal_all_is_over_within_the_stop_budget(project: Project) -> None:
    """As of a CI that sends TERM, and KILL when its own patience is over."""
    project.script(f"{WORK}; {STUBBORN}", workspace=REPOSITORY, agent="stop_budget: 8s")
    process = started(project, "agent")

    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, record, text = ended(project, process)

    assert 4 <= time.monotonic() - began < 8
    assert code == 130, text
    assert said(text, "agent") == ["TERM (signal)", KILL_BUDGET]
    assert saved(project, record)
    assert record["left_behind"] == []


@pytest.mark.slow
@pytest.mark.usefixtures("repository")
def test_a_hook_that_never_ends_leaves_half_of_the_stop_budget_to_save_and_tear_down(project: Project) -> None:
    project.script(
        f"{WORK}; {OBEDIENT}",
        workspace=REPOSITORY,
        agent=f"stop_budget: 4s\npost_hooks: [{json.dumps(STUBBORN)}]",
        run="timeout: 5s",
    )

    code, record, text = ended(project, project.start("apply", str(project.folder)))

    assert code == 124, text
    assert project.logs("post_hook") == "begun\n"
    assert step(record, "post_hook")["outcome"]["reason"] == "timeout"
    assert saved(project, record)
    assert record["left_behind"] == []
    assert processes_of(project.home) == []


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["local", "process"])
def test_what_a_command_leaves_running_is_killed_and_said(project: Project, provider: str) -> None:
    project.script("setsid sleep 1000 & echo done", provider=provider)

    code, record, text = ended(project, project.start("apply", str(project.folder)))

    assert code == 0, text
    assert said(text, "agent") == ["KILL (left running)"]
    (stopped,) = step(record, "agent")["stopped"]
    assert (stopped["stage"], stopped["reason"]) == ("kill", "left running")
    shown = project.runner("runs", "show", "last").out.splitlines()
    assert shown[[line.split()[1] for line in shown].index("agent") + 1] == "      KILL (left running)"
    assert processes_of(project.home) == []


@pytest.mark.slow
@pytest.mark.usefixtures("repository")
def test_an_agent_whose_sandbox_is_killed_is_unknown_and_its_work_saved(project: Project) -> None:
    hanging(project, "agent")
    process = started(project, "agent")

    sandbox = [pid for pid in descendants(process.pid) if Path(f"/proc/{pid}/comm").read_text() == "bwrap\n"]
    assert sandbox
    for pid in sandbox:
        with suppress(ProcessLookupError):  # it went with the one before
            os.kill(pid, signal.SIGKILL)
    code, record, text = ended(project, process)

    assert code == 4, text
    outcome = step(record, "agent")["outcome"]
    assert (outcome["status"], outcome["reason"]) == ("unknown", "unknown")
    assert outcome["message"].startswith("the sandbox was lost while a command ran in it: ")
    assert "UNKNOWN work" in text
    assert saved(project, record)
    assert record["left_behind"] == []
    assert processes_of(project.home) == []
