"""Stopping whole runs by signals and deadlines: what is saved, what is left, how long it takes, and what is said."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from typing import Any

import pytest

from runner.cli.signals import FATAL
from tests.support.situations import REPO, Project, processes_of, step, until

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


def hanging(project: Project, where: str, how: str = OBEDIENT, **more: str) -> None:
    """A run that makes something, and then does not get past one of its steps."""
    commands = {"setup": "true", "agent": "true", "verify": "true", where: how}
    project.script(
        commands["agent"],
        workspace=f"{REPO}\nsetup_commands: {json.dumps([WORK, commands['setup']])}",
        run=f"verify: {{commands: [{{run: {json.dumps(commands['verify'])}}}]}}",
        **more,
    )


def start_in_step(project: Project, where: str) -> subprocess.Popen[str]:
    """An apply that has come to print something in a step."""
    process = project.start("apply", ".")
    logs = project.home / "state" / "runs"
    until(lambda: process.poll() is not None or any(log.stat().st_size for log in logs.glob(f"*/logs/{where}.stdout")))
    return process


def wait_for_end(project: Project, process: subprocess.Popen[str]) -> tuple[int, dict[str, Any], str]:
    """The exit code, the run's record and what was printed."""
    out, err = process.communicate(timeout=120)
    (run,) = (project.home / "state" / "runs").iterdir()
    types = [json.loads(line)["type"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert types.count("RunEnded") == 1, out + err
    return process.returncode, json.loads((run / "run.json").read_text()), out + err


def stop_lines(text: str, where: str) -> list[str]:
    """What was said about ending a step's command while it was done, without how long it had."""
    lines = [line.removeprefix(f"  ! {where}: ").partition(",")[0] for line in text.splitlines()]
    return [line for line in lines if line.startswith(("TERM (", "KILL (", "sandbox killed ("))]


def check_end(project: Project, record: dict[str, Any]) -> None:
    """The work is saved, and nothing is left."""
    assert "+work" in (project.directory(record) / "work.patch").read_text()
    assert record["left_behind"] == []
    assert processes_of(project.home) == []


@pytest.mark.slow
@pytest.mark.scenario("BEY-06")
@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize(("number", "where"), FATAL_THERE)
def test_a_fatal_signal_ends_the_work_which_is_saved_and_nothing_is_left(
    project: Project, number: signal.Signals, where: str
) -> None:
    hanging(project, where)
    process = start_in_step(project, where)

    process.send_signal(number)
    code, record, text = wait_for_end(project, process)

    assert code == 130, text
    assert (record["status"], record["exit_code"], record["cancelled_by"]) == ("cancelled", 130, "signal")
    assert step(record, where)["status"] == "cancelled"
    check_end(project, record)


@pytest.mark.slow
def test_a_lost_terminal_ends_nothing(project: Project) -> None:
    project.script("echo begun; sleep 1; echo whole")
    process = start_in_step(project, "agent")

    process.send_signal(signal.SIGHUP)
    code, record, text = wait_for_end(project, process)

    assert code == 0, text
    assert record["status"] == "succeeded"
    assert project.logs("agent") == "begun\nwhole\n"


@pytest.mark.slow
@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize("provider", ["local", pytest.param("process", marks=pytest.mark.nightly)])
def test_a_second_signal_takes_no_grace_and_says_what_is_left(project: Project, provider: str) -> None:
    project.script(f"{WORK}; {STUBBORN}", workspace=REPO, provider=provider)
    process = start_in_step(project, "agent")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None

    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    code, record, text = wait_for_end(project, process)

    assert time.monotonic() - began < 9, "the grace is ten seconds"
    assert code == 130, text
    assert stop_lines(text, "agent") == ["TERM (signal)", "KILL (second signal)"]
    assert [left.split()[0] for left in record["left_behind"]] == ["lease", "workspace"]
    assert f"LEFT BEHIND  {record['left_behind'][0]}" in text
    assert f"clean up   runner recover {record['id']}" in text
    assert processes_of(project.home) == []
    (tree,) = (project.home / "state" / "projects" / "default" / "workspaces").iterdir()
    assert (tree / "work").read_text() == "work\n"
    assert project.runner("recover").code == 0


KILL_BUDGET = "KILL (stop budget)"
DEADLINES = {
    "run": (OBEDIENT, "", "timeout: 5s", ["TERM (run deadline)"]),
    "run, ignoring TERM": (STUBBORN, "stop_budget: 4s", "timeout: 5s", ["TERM (run deadline)", KILL_BUDGET]),
    "step": (OBEDIENT, "timeouts: {agent: 1s}", "", ["TERM (step deadline)"]),
    "step, ignoring TERM": (
        *(STUBBORN, "timeouts: {agent: 1s}", ""),
        ["TERM (step deadline)", "KILL (step deadline)"],  # the grace is ten seconds
    ),
    "step and then run, ignoring TERM": (
        *(STUBBORN, "timeouts: {agent: 1s}\nstop_budget: 4s", "timeout: 6s"),
        ["TERM (step deadline)", KILL_BUDGET],
    ),
}
BY_DAY = ("step", "step and then run, ignoring TERM")


@pytest.mark.slow
@pytest.mark.scenario("BEY-06")
@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize(
    ("agent", "timeouts", "run", "stop_stages"),
    [pytest.param(*each, id=id, marks=() if id in BY_DAY else pytest.mark.nightly) for id, each in DEADLINES.items()],
)
def test_at_a_deadline_the_last_process_inside_is_gone_and_the_work_saved(
    project: Project, agent: str, timeouts: str, run: str, stop_stages: list[str]
) -> None:
    project.script(f"{WORK}; {agent}", workspace=REPO, agent=timeouts, run=run)

    code, record, text = wait_for_end(project, project.start("apply", "."))

    assert code == 124, text
    whose = "its deadline of 1s" if "timeouts" in timeouts else "the run's deadline"
    assert (record["outcome"]["reason"], record["outcome"]["message"]) == ("timeout", f"agent: stopped at {whose}")
    told = stop_lines(text, "agent")  # a daemon may have needed more than its command
    assert told[: len(stop_stages)] == stop_stages
    check_end(project, record)


@pytest.mark.slow
@pytest.mark.scenario("BEY-06")
@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize(
    ("provider", "where"),
    [
        ("local", "setup"),
        ("local", "verify"),
        *(pytest.param("docker", where, marks=pytest.mark.nightly) for where in ("setup", "agent", "verify")),
    ],
)
def test_each_step_has_a_deadline_at_which_all_that_it_started_is_gone(
    project: Project, where: str, provider: str
) -> None:
    hanging(project, where, "sleep 300 & sleep 300", provider=provider, agent=f"timeouts: {{{where}: 2s}}")

    code, record, text = wait_for_end(project, project.start("apply", "."))

    assert code == 124, text
    assert record["outcome"]["message"] == f"{where}: stopped at its deadline of 2s"
    check_end(project, record)


@pytest.mark.nightly
@pytest.mark.usefixtures("repository")
def test_after_one_signal_all_is_over_within_the_stop_budget(project: Project) -> None:
    """As of a CI that sends TERM, and KILL when its own patience is over."""
    project.script(f"{WORK}; {STUBBORN}", workspace=REPO, agent="stop_budget: 8s")
    process = start_in_step(project, "agent")

    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, record, text = wait_for_end(project, process)

    assert 4 <= time.monotonic() - began < 8
    assert code == 130, text
    assert stop_lines(text, "agent") == ["TERM (signal)", KILL_BUDGET]
    check_end(project, record)


@pytest.mark.nightly
@pytest.mark.parametrize("provider", ["local", "process"])
def test_what_a_command_leaves_running_is_killed_and_said(project: Project, provider: str) -> None:
    project.script("setsid sleep 1000 & echo done", provider=provider)

    code, record, text = wait_for_end(project, project.start("apply", "."))

    assert code == 0, text
    assert stop_lines(text, "agent") == ["KILL (left running)"]
    (stopped,) = step(record, "agent")["stopped"]
    assert (stopped["stage"], stopped["reason"]) == ("kill", "left running")
    shown = project.runner("runs", "show", "last").out.splitlines()
    assert shown[[line.split()[1] for line in shown].index("agent") + 1] == "      KILL (left running)"
    assert processes_of(project.home) == []
