from pathlib import Path

import pytest

from runner.agents.script import agent
from runner.core.model import Exit, Reason, Status
from runner.ports.agent import AgentResult


@pytest.mark.parametrize(
    ("exit", "stderr", "status", "reason", "message"),
    [
        (Exit(0), b"a warning\n", Status.SUCCEEDED, None, "wrote it"),
        (Exit(1), b"looking\nno memory kill\n", Status.FAILED, Reason.EXIT, "exited 1: no memory kill"),
        (Exit(3), b"", Status.FAILED, Reason.EXIT, "exited 3"),
        (Exit(3), b" \n\n", Status.FAILED, Reason.EXIT, "exited 3"),
        (Exit(signal=15), b"bye", Status.FAILED, Reason.EXIT, "died by signal 15: bye"),
        (Exit(137, oom=True), b"x", Status.FAILED, Reason.OOM, "was killed: out of memory"),
        (Exit(), b"x", Status.UNKNOWN, Reason.UNKNOWN, "ended, status unknown: x"),
        (Exit(1), "\x1b]0;owned\a \u202eevil\xff".encode("latin-1", "ignore"), Status.FAILED, Reason.EXIT,
         "exited 1: \\x1b]0;owned\\x07 evil\ufffd"),
    ],
    ids=["success", "failure", "silent", "blank", "signal", "memory", "unknown", "control characters"],
)  # fmt: skip
def test_the_exit_status_is_the_verdict(
    tmp_path: Path, exit: Exit, stderr: bytes, status: Status, reason: Reason | None, message: str
) -> None:
    (tmp_path / "stdout").write_bytes(b"looking\nwrote it\n")
    (tmp_path / "stderr").write_bytes(stderr)

    outcome = agent.outcome(AgentResult(exit, stdout=tmp_path / "stdout", stderr=tmp_path / "stderr"))

    assert (outcome.status, outcome.reason, outcome.message) == (status, reason, message)


def test_a_long_last_line_is_cut(tmp_path: Path) -> None:
    (tmp_path / "stderr").write_bytes(b"first\n" + b"x" * 100_000)

    message = agent.outcome(AgentResult(Exit(1), stdout=tmp_path / "stdout", stderr=tmp_path / "stderr")).message

    assert message == "exited 1: " + "x" * 197 + "..."
