"""``runner plan [PATH]``: what apply would do. Nothing is started and nothing is written but ``--save``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path

from runner.cli.output import Output

SUMMARY = "show what apply would do; starts nothing"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", type=Path, default=Path(".runner"), help="file or folder (default: .runner)")
    parser.add_argument("--run", metavar="NAME", help="only this run")
    parser.add_argument("--save", metavar="FILE", type=Path, help="write the plan for a later `runner apply FILE`")
    parser.add_argument("--output", choices=("text", "json"), default="text")


def main(args: Namespace, out: Output) -> int:
    import trio

    from runner.app.planning import make_plan, save
    from runner.report.plan import render_plan
    from runner.settings import current

    result = trio.run(partial(make_plan, args.path, current(), only=args.run))
    out.findings(result.warnings)
    if args.output == "json":
        out.json(result.plan.document())
    else:
        out.line(render_plan(result.plan))
    if args.save is not None:
        save(result, args.save, only=args.run)
        if args.output == "text":
            out.line(f"Saved. Run it with: runner apply {args.save}")
    return 0
