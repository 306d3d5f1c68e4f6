"""Plain view of an apply: what happens and what is printed, or the events themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from runner.cli.output import Output
from runner.events import events as ev
from runner.ports.sink import Sink

if TYPE_CHECKING:
    from runner.core.settings import Settings
    from runner.events.record import RunRecord
    from runner.plan.model import RunPlan


@asynccontextmanager
async def open_console(
    out: Output, form: str, plans: Sequence[RunPlan], settings: Settings, *, quiet: bool = False
) -> AsyncIterator[Sink]:
    """Open the sink for one apply, in ``form`` text or jsonl. From here on the runs outlive their reader."""
    if form == "jsonl":
        out.outlive()
        yield lambda recorded: out.json(ev.as_json(recorded), indent=None)
        return
    from runner.cli.live_view import open_screen
    from runner.ops.runs.header import header_of

    headers = {plan.name: header_of(plan) for plan in plans}
    async with open_screen(out, headers, settings, quiet=quiet) as screen:
        yield screen


def show_ends(records: Sequence[RunRecord], settings: Settings, out: Output) -> None:
    """Show how each run ended, and what a person does next."""
    from runner.artifacts.run_files import read_account
    from runner.core.sanitize import sanitize
    from runner.ops.runs.history import directory_of
    from runner.report.progress import ending
    from runner.report.text import WIDEST

    out.line()
    for record in records:
        for line in ending(read_account(record, directory_of(settings, record.id)), several=len(records) > 1):
            out.line(sanitize(line, WIDEST))
