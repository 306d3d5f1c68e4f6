"""``runner apply [PATH]``: execute the runs of a folder, or of a saved plan exactly as it was made."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from runner.cli import confirm, remote
from runner.cli.output import Output
from runner.cli.reports import Reports, add_report_arguments, open_reports, show_comparisons
from runner.cli.requests import add_quiet_argument, add_request_arguments, manifests_of, request_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.events.record import RunRecord
    from runner.ports.gateway import Gateway

CANCELLED = 130
SUMMARY = "carry out a folder of manifests, or a saved plan"
GROUP = "start here"
EXAMPLES = ("runner apply", "runner apply --run fix --task pull_request_number=42", "runner apply PLAN.json")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "path",
        nargs="?",
        type=Path,
        help="manifests or a saved plan; - reads standard input",
    )
    add_request_arguments(parser)
    remote.add_argument(parser)
    parser.add_argument("--run-key", metavar="KEY", help="a second apply with this key attaches to the first's runs")
    parser.add_argument("--output", choices=("text", "jsonl"), default="text", help="jsonl: every event as it happens")
    add_quiet_argument(parser)
    add_report_arguments(parser)
    confirm.add_arguments(parser)


def main(args: Namespace, out: Output) -> int:
    from runner.core.settings import current

    settings = current()
    if (server := remote.server_of(args, settings)) is not None:
        return remote.apply(args, settings, server, out)
    return apply(args, out)


def apply(args: Namespace, out: Output, turns: Path | None = None) -> int:
    """Apply, or with a file of ``turns`` rehearse."""
    from runner.cli.plain_view import open_console, show_ends
    from runner.cli.signals import run_cancellable, stop_at_signals
    from runner.core.errors import UsageError
    from runner.core.settings import current
    from runner.ops.init.quickstart import refuse_installed
    from runner.ops.planning.make_plan import Request, draft_plan
    from runner.ops.runs.secret_values import make_redactor
    from runner.ops.runs.start import start_runs

    if args.run_key == "":
        raise UsageError("the key of `--run-key` is empty", hint="look at the variable that it comes from")
    settings = current()
    redactor = make_redactor(settings)
    gateway = rehearsal(turns) if turns is not None else None
    out.clean = redactor.text

    async def whole(reports: Reports) -> Sequence[RunRecord] | None:
        path, request = manifests_of(args), request_of(args, settings)
        if path.suffix == ".json":
            from runner.ops.planning.saved_plan import load_plan

            if request != Request():
                raise UsageError("a saved plan runs as it is", hint="plan with these arguments, and save that")
            planned = await load_plan(path, settings)
            refuse_installed(planned.path)
        else:
            refuse_installed(path)
            planned = await draft_plan(path, settings, request)
        reports.findings(planned.warnings)
        if turns is None and confirm.asks(args, out) and not await confirm.agreed(planned, settings, out):
            return None
        reports.order = tuple(run.name for run in planned.plan.runs)
        async with open_console(out, args.output, planned.plan.runs, settings, quiet=args.quiet) as sink:
            starting = start_runs(
                planned,
                settings,
                [sink, reports],
                key=args.run_key,
                gateway=gateway,
                advise=lambda advice: reports.findings([advice]),
                redactor=redactor,
            )
            async with starting as started, stop_at_signals(started.cancel):
                return await started.wait()

    with open_reports(args, out, settings) as reports:
        records = run_cancellable(whole, reports)
        if records is None:
            return CANCELLED
        if args.output == "text":
            show_ends(records, settings, out)
            show_comparisons(reports.accounts(), out)
    return max((record.exit_code or 0 for record in records), default=0)


def rehearsal(turns: Path) -> Gateway:
    """Return the scripted model of a file, which replaces every model. Raises ``Rejected``."""
    from runner.fake_model.provider import RehearsalGateway
    from runner.fake_model.script import read_turns

    return RehearsalGateway(str(turns), read_turns(turns))
