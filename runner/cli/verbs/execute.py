"""``runner execute PLAN``: carry out a saved plan for somebody on another host, as the worker of a Job does."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from runner.cli.output import Output
from runner.cli.verbs import apply

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractAsyncContextManager

    from runner.core.redact import Redactor
    from runner.ops.planning.make_plan import PlanResult
    from runner.ops.runs.dependencies import Advise
    from runner.ops.runs.start import StartedRuns
    from runner.ports.sink import Sink

SUMMARY = "carry out a saved plan for another host, which watches it in the shared store: what a Job runs"
GROUP = "runs"
EXAMPLES = ("runner execute PLAN.json", "runner execute PLAN.json --id 7k3q9m2x4c6p")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", type=Path, help="a file of `runner plan --save`")
    parser.add_argument("--id", metavar="ID", help="the id of its only run, by which others look for it")
    apply.add_run_arguments(parser)


def main(args: Namespace, out: Output) -> int:
    from runner.core.errors import Rejected
    from runner.core.settings import current
    from runner.ops.planning.job_fitness import store_faults

    settings = current()
    if faults := [*store_faults(settings)]:
        raise Rejected(faults)

    async def planned() -> PlanResult:
        from runner.ops.planning.saved_plan import load_plan

        return await load_plan(args.plan, settings)

    def start(
        planned: PlanResult, sinks: Sequence[Sink], advise: Advise, redactor: Redactor
    ) -> AbstractAsyncContextManager[StartedRuns]:
        from runner.ops.runs.start import start_runs

        ids = None if args.id is None else {_only_run(planned): args.id}
        return start_runs(planned, settings, sinks, key=args.run_key, ids=ids, advise=advise, redactor=redactor)

    return apply.carry_out(planned, start, args, out, settings)


def _only_run(planned: PlanResult) -> str:
    """Return the name of the run of a plan that has one. Raises ``UsageError``."""
    from runner.core.errors import UsageError

    if len(planned.plan.runs) != 1:
        message = f"the plan has {len(planned.plan.runs)} runs, and `--id` names one"
        raise UsageError(message, hint="save one of them: runner plan --run NAME --save FILE")
    return planned.plan.runs[0].name
