"""``runner apply [PATH]``: execute the runs of a folder, or of a saved plan exactly as it was made."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from runner.cli import confirm, remote
from runner.cli.output import Output
from runner.cli.reports import add_report_arguments, open_reports, show_comparisons
from runner.cli.requests import add_quiet_argument, add_request_arguments, manifests_of, request_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from runner.core.errors import RunnerError
    from runner.core.redact import Redactor
    from runner.core.settings import Settings
    from runner.events.record import RunRecord
    from runner.ops.planning.make_plan import PlanResult
    from runner.ops.runs.dependencies import Advise
    from runner.ports.gateway import Gateway
    from runner.ports.sink import Sink


CANCELLED = 130
SUMMARY = "carry out a folder of manifests, or a saved plan"
GROUP = "start here"
EXAMPLES = (
    "runner apply",
    "runner apply --run fix --task pull_request_number=42",
    "runner apply PLAN.json",
    "runner apply --on kubernetes",
)


class Started(Protocol):
    """Runs that were started, here or as Jobs. ``errors`` are those that kept one from having a record."""

    @property
    def errors(self) -> Sequence[RunnerError]: ...

    def cancel(self) -> None: ...

    async def wait(self) -> Sequence[RunRecord]: ...


def add_arguments(parser: ArgumentParser) -> None:
    add_common_arguments(parser)
    words = "make each run a Job of the cluster that workspaces are made in, and follow it from here"
    parser.add_argument("--on", metavar="kubernetes[:CONTEXT]", help=words)


def add_common_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "path",
        nargs="?",
        type=Path,
        help="manifests or a saved plan; - reads standard input",
    )
    add_request_arguments(parser)
    remote.add_argument(parser)
    add_run_arguments(parser)
    confirm.add_arguments(parser)


def add_run_arguments(parser: ArgumentParser) -> None:
    """Add what is said of runs that start, wherever their plan is from."""
    parser.add_argument("--run-key", metavar="KEY", help="a second apply with this key attaches to the first's runs")
    parser.add_argument("--output", choices=("text", "jsonl"), default="text", help="jsonl: every event as it happens")
    add_quiet_argument(parser)
    add_report_arguments(parser)


def main(args: Namespace, out: Output) -> int:
    from runner.core.settings import current

    settings = current()
    server = remote.server_of(args, settings)
    if args.on is not None:
        from runner.cli.places import place_of
        from runner.core.errors import UsageError

        settings = place_of(args.on, settings)
        if server is not None:
            raise UsageError("`--on` does not work on a server", hint="leave it out, or unset RUNNER_SERVER")
    elif server is not None:
        return remote.apply(args, settings, server, out)
    return apply(args, out, settings)


def apply(args: Namespace, out: Output, settings: Settings, turns: Path | None = None) -> int:
    """Apply, or with a file of ``turns`` rehearse."""

    async def planned() -> PlanResult:
        from runner.core.errors import UsageError
        from runner.ops.init.quickstart import refuse_installed
        from runner.ops.planning.make_plan import Request, draft_plan

        path, request = manifests_of(args), request_of(args, settings)
        if path.suffix == ".json":
            from runner.ops.planning.saved_plan import load_plan

            if request != Request():
                raise UsageError("a saved plan runs as it is", hint="plan with these arguments, and save that")
            found = await load_plan(path, settings)
            refuse_installed(found.path)
            return found
        refuse_installed(path)
        return await draft_plan(path, settings, request)

    gateway = rehearsal(turns) if turns is not None else None
    is_job = getattr(args, "on", None) is not None

    def start(
        planned: PlanResult, sinks: Sequence[Sink], advise: Advise, redactor: Redactor
    ) -> AbstractAsyncContextManager[Started]:
        if is_job:
            from runner.ops.runs.jobs import submit_runs

            return submit_runs(planned, settings, sinks, key=args.run_key, advise=advise)
        from runner.ops.runs.start import start_runs

        key = args.run_key
        return start_runs(planned, settings, sinks, key=key, advise=advise, gateway=gateway, redactor=redactor)

    async def agreed(planned: PlanResult) -> bool:
        asks = turns is None and confirm.asks(args, out)
        return not asks or await confirm.agreed(planned, settings, out, jobs=is_job)

    return carry_out(planned, start, args, out, settings, agreed=agreed)


def carry_out(
    plan: Callable[[], Awaitable[PlanResult]],
    start: Callable[[PlanResult, Sequence[Sink], Advise, Redactor], AbstractAsyncContextManager[Started]],
    args: Namespace,
    out: Output,
    settings: Settings,
    *,
    agreed: Callable[[PlanResult], Awaitable[bool]] | None = None,
) -> int:
    """Start the runs of what ``plan`` makes, if that is ``agreed`` to, show them, and return the exit code."""
    from runner.cli.plain_view import open_console, show_ends
    from runner.cli.signals import run_cancellable, stop_at_signals
    from runner.core.errors import UsageError
    from runner.ops.runs.secret_values import make_redactor

    if args.run_key == "":
        raise UsageError("the key of `--run-key` is empty", hint="look at the variable that it comes from")
    redactor = make_redactor(settings)
    out.clean = redactor.text

    async def whole() -> tuple[Sequence[RunRecord], Sequence[RunnerError]] | None:
        planned = await plan()
        reports.findings(planned.warnings)
        if agreed is not None and not await agreed(planned):
            return None
        reports.order = tuple(run.name for run in planned.plan.runs)
        async with open_console(out, args.output, planned.plan.runs, settings, quiet=args.quiet) as sink:
            starting = start(planned, [sink, reports], lambda advice: reports.findings([advice]), redactor)
            async with starting as started, stop_at_signals(started.cancel):
                return await started.wait(), started.errors

    with open_reports(args, out, settings) as reports:
        ended = run_cancellable(whole)
        if ended is None:
            return CANCELLED
        records, errors = ended
        reports.findings(errors)
        if args.output == "text":
            show_ends(records, settings, out)
            show_comparisons(reports.accounts(), out)
    return max((*(record.exit_code or 0 for record in records), *(error.exit_code for error in errors)), default=0)


def rehearsal(turns: Path) -> Gateway:
    """Return the scripted model of a file, which replaces every model. Raises ``Rejected``."""
    from runner.fake_model.provider import RehearsalGateway
    from runner.fake_model.script import read_turns

    return RehearsalGateway(str(turns), read_turns(turns))
