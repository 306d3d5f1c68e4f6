"""Confirmation that ``apply`` asks of a person at a terminal before anything starts."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from runner.cli.output import Output
from runner.core.output_style import in_ci

if TYPE_CHECKING:
    from runner.core.settings import Settings
    from runner.ops.planning.make_plan import PlanResult

MOST_CHANGES = 10  # lines of each run's changes that are shown
_YES = ("y", "yes")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("-y", "--yes", action="store_true", help="start without asking, at a terminal as elsewhere")


def asks(args: Namespace, out: Output) -> bool:
    """Tell whether to ask: not in a CI, or without a terminal."""
    if args.yes or args.output != "text" or in_ci():
        return False
    return out.live and sys.stdin.isatty()


async def agreed(planned: PlanResult, settings: Settings, out: Output, *, jobs: bool = False) -> bool:
    """Show what would start here, or as ``jobs``, and return whether the person agrees; end of input means no.

    Raises ``Rejected`` instead when it would be refused anyway.
    """
    import trio

    from runner.ops.planning.compare import compare
    from runner.ops.planning.refusals import outside_of, refuse
    from runner.report.plan import render_question

    if jobs:
        from runner.ops.runs.jobs import check_jobs

        check_jobs(planned, settings)
    else:
        await refuse(planned, planned.plan.runs, settings, outside_of(settings))
    compared = await compare(planned, settings, None)
    out.line(render_question(planned.plan, compared=compared, most=MOST_CHANGES))
    try:
        out.verbatim("Start? [y/N] ")
        said = await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
    except trio.Cancelled:  # by a signal
        out.line("\nNothing started.")
        raise
    if said.strip().lower() in _YES:
        return True
    out.line("Nothing started." if said.endswith("\n") else "\nNothing started.")
    return False
