"""The screen of a triage: what is redrawn, and what is found at the end."""

from __future__ import annotations

import io
from pathlib import Path

from runner.cli.live_view import Screen
from runner.cli.output import Output
from runner.events import events as ev
from runner.events.record import RunRecord
from runner.ops.runs.previous_attempt import result_of
from runner.report import triage
from runner.report.triage import Header

SECOND = 1_000_000
STEPS = {"provision": "provision", "agent": "agent"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_of_now_is_written_when_it_changes(tmp_path: Path) -> None:
    """It was, ten times a second."""
    terminal, moment = Terminal(), [2 * SECOND]
    out = Output(terminal, terminal)
    screen = Screen(out, {}, tmp_path.joinpath, face=triage, quiet=False, raw=False, now=lambda: moment[0], clock=str)
    for seq, event in enumerate(
        (ev.RunStarted(name="t", plan="x", runner="1", steps=STEPS, deadline_seconds=600.0), ev.StepStarted("agent")),
        start=1,
    ):
        screen(ev.Recorded("7k3q", seq, seq * SECOND, event))
    for tick in range(30):
        moment[0] = 2 * SECOND + tick * SECOND // 10
        screen.tick()
    screen.close()

    assert [line.strip() for line in terminal.getvalue().split("\r\x1b[2K")[1:]] == [
        *(f"▸ agent        0:0{second}" for second in range(3)), ""
    ]  # fmt: skip


def test_a_report_that_is_too_large_to_be_shown_is_there(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    report = tmp_path / "output" / "r.md"
    header = Header(agent="claude", report="r.md")

    assert result_of(RunRecord(id="x"), header, tmp_path).place is None
    report.symlink_to("/etc/passwd")
    assert result_of(RunRecord(id="x"), header, tmp_path).report is None
    report.unlink()
    with report.open("wb") as file:
        file.truncate(20 << 20)

    found = result_of(RunRecord(id="x"), header, tmp_path)

    assert (found.report, found.place) == (None, report)
