"""``runner plan [PATH]``: show what apply would do. Starts nothing, and writes nothing but ``--save``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from shlex import quote
from shutil import get_terminal_size
from typing import TYPE_CHECKING

from runner.cli import remote
from runner.cli.output import Output
from runner.cli.requests import WHERE, add_request_arguments, manifests_of, request_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.core.errors import RunnerError
    from runner.ops.planning.make_plan import PlanResult
    from runner.plan.model import Plan
    from runner.report.plan import PlanComparison

SUMMARY = "show what apply would do; starts nothing"
GROUP = "start here"
EXAMPLES = ("runner plan", "runner plan --run fix --save PLAN.json", "runner -C ../shop plan")
DIFFERS = 9


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", type=Path, help=WHERE)
    remote.add_argument(parser)
    add_request_arguments(parser)
    parser.add_argument("--offline", action="store_true", help="look at nothing but the manifests; cannot be applied")
    parser.add_argument("--save", metavar="FILE", type=Path, help="write the plan for a later `runner apply FILE`")
    parser.add_argument("--against", metavar="FILE", type=Path, help="compare with a saved plan, not the last runs")
    parser.add_argument("--exit-code", action="store_true", help=f"0 no difference, {DIFFERS} it differs")
    parser.add_argument("--summary", action="store_true", help="one line a run")
    parser.add_argument("--output", choices=("text", "json", "html", "mermaid", "dot"), default="text")


def main(args: Namespace, out: Output) -> int:
    from runner.cli.signals import run_cancellable
    from runner.core.errors import Rejected, UsageError
    from runner.core.settings import current
    from runner.ops.planning.compare import compare
    from runner.ops.planning.make_plan import draft_plan
    from runner.ops.planning.refusals import outside_of, refusals

    settings = current()
    if (server := remote.server_of(args, settings)) is not None:
        return remote.plan(args, settings, server, out)
    path = manifests_of(args)
    if path.suffix == ".json":
        word = quote(str(path))
        hint = f"`runner apply {word}` carries it out, `runner plan --against {word}` compares"
        raise UsageError(f"`{path}` is not manifests but a saved plan, by its name", hint=hint)
    if args.save is not None:
        from runner.ops.planning.plan_file import check_place

        check_place(args.save)
    request = request_of(args, settings, offline=args.offline)
    planned = run_cancellable(draft_plan, path, settings, request)
    compared: Sequence[PlanComparison] = ()
    if args.against or args.exit_code or args.output in ("text", "html"):
        compared = run_cancellable(compare, planned, settings, args.against)
    missing: Sequence[RunnerError] = ()
    if not args.offline:
        missing = run_cancellable(refusals, planned, planned.plan.runs, settings, outside_of(settings))
    out.findings(planned.warnings)
    _show(planned.plan, compared, missing, args, out)
    if args.save is not None:
        said = _save(planned, args.save)
        if args.output == "text":
            out.line(said)
    if missing:
        raise Rejected(missing)
    return DIFFERS if args.exit_code and any(one.changes for one in compared) else 0


def _save(planned: PlanResult, to: Path) -> str:
    """Save a plan, and say so. Keys and programs may be elsewhere; what the plan pins must be here."""
    from runner.ops.planning.plan_file import save

    if planned.missing:
        return "Not saved: what it would pin is not here."
    save(planned, to)
    return "Saved." if planned.plan.open else f"Saved. Run it with: runner apply {quote(str(to))}"


def _show(
    plan: Plan, compared: Sequence[PlanComparison], missing: Sequence[RunnerError], args: Namespace, out: Output
) -> None:
    from runner.report.diagnostics import as_json
    from runner.report.plan import render_plan, render_summary

    match args.output:
        case "json":
            out.json({**plan.document(), "missing": [as_json(one) for one in missing]})
        case "html":
            from runner.report.html.plan import render_plan as render_page

            out.verbatim(render_page(plan, compared, missing))
        case "mermaid" | "dot":
            from runner.report.plan_graph import render_dot, render_mermaid

            out.line((render_dot if args.output == "dot" else render_mermaid)(plan))
        case _ if args.summary:
            out.line(render_summary(plan, compared=compared, missing=len(missing)))
        case _:
            width = get_terminal_size((120, 24)).columns
            out.line(render_plan(plan, width=width, compared=compared, missing=len(missing)))
