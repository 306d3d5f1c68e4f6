"""``runner apply [PATH]``: carry out the runs of a folder, or of a saved plan exactly as it promised."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from runner.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.record import RunRecord

SUMMARY = "carry out a folder of manifests, or a saved plan"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "path", nargs="?", type=Path, default=Path(".runner"), help="manifests or a saved plan (default: .runner)"
    )
    parser.add_argument("--run", metavar="NAME", help="only this run")
    parser.add_argument("--output", choices=("text", "jsonl"), default="text", help="jsonl: every event as it happens")


def main(args: Namespace, out: Output) -> int:
    import trio

    from runner.app.apply import apply
    from runner.app.planning import make_plan, make_saved_plan
    from runner.cli.console import open_console
    from runner.errors import UsageError
    from runner.settings import current

    settings = current()

    async def whole() -> Sequence[RunRecord]:
        if args.path.suffix == ".json":
            if args.run is not None:
                raise UsageError("a saved plan runs whole", hint="plan with --run, and save that")
            planned = await make_saved_plan(args.path, settings)
        else:
            planned = await make_plan(args.path, settings, only=args.run)
        out.findings(planned.warnings)
        with open_console(out, args.output) as sink:
            return await apply(planned, settings, [sink])

    records = trio.run(whole)
    if args.output == "text":
        from runner.report.text import render_run

        for record in records:
            out.line()
            out.line(render_run(record, settings.home / "runs" / record.id))
    return max((record.exit_code or 0 for record in records), default=0)
