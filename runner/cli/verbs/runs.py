"""``runner runs``: show runs from the journal, and deliver their work. A RUN is a unique prefix or ``last``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial
from typing import TYPE_CHECKING

from runner.cli import remote
from runner.cli.output import Output
from runner.cli.verbs import _deliver, _list, _logs, _network, _show

if TYPE_CHECKING:
    from runner.core.settings import Settings
    from runner.ops.runs.history import StoredRun

SUMMARY = "what happened, and what came of it: list, show, logs, attach, cancel, patch, branch, apply, push, export"
GROUP = "runs"
EXAMPLES = (
    "runner runs list --status failed --since 2d",
    "runner runs show last",
    "runner runs logs last verify",
    "runner runs network last",
    "runner runs attach last",
    "runner runs cancel 7k3q --server https://runner.example.org",
    "runner runs compare 3f9c 7k3q",
    "runner runs patch last",
    "runner runs branch last --name fix/totals",
    "runner runs apply last --check",
    "runner runs push last --to origin",
    "runner runs export last --to ticket-4711.tar.gz",
)


def add_arguments(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    listed = verbs.add_parser("list", help=_list.SUMMARY, description=_list.SUMMARY, allow_abbrev=False)
    _list.add_arguments(listed)
    remote.add_argument(listed)

    def add(name: str, summary: str) -> ArgumentParser:
        verb: ArgumentParser = verbs.add_parser(name, help=summary, allow_abbrev=False)
        verb.add_argument("run", metavar="RUN", help="an id, its beginning, or `last`")
        return verb

    for name, summary in (("show", "the report of a run"), ("logs", "what its steps printed"), ("patch", "its work")):
        verb = add(name, summary)
        if name == "show":
            verb.add_argument("--output", choices=_show.FORMS, default="text")
        if name == "logs":
            _logs.add_arguments(verb)
        if name in remote.OF_RUNS:
            remote.add_argument(verb)
    remote.add_argument(
        add("cancel", "end the work of a run, wherever its runner is; again: end its finalize phase too")
    )
    reached = add("network", "the hosts that its commands reached, and those that were refused")
    reached.add_argument("--output", choices=_network.FORMS, default="text")
    attached = add("attach", "follow a run to its end; Ctrl-C stops the looking, never the run")
    attached.add_argument("-q", "--quiet", action="store_true", help="do not show what the agent says")
    compare = verbs.add_parser("compare", help="several runs beside each other", allow_abbrev=False)
    compare.add_argument("runs", nargs="+", metavar="RUN", help="ids, their beginnings, or `last`")
    compare.add_argument("--output", choices=_show.COMPARED, default="text")
    _deliver.add_arguments(add)


def main(args: Namespace, out: Output) -> int:
    from runner.core.settings import current

    settings = current()
    if (server := remote.server_of(args, settings)) is not None:
        return remote.runs(args, settings, server, out)
    if args.what == "cancel":
        import trio

        from runner.ops.runs.cancel import cancel_run

        out.line(f"run {trio.run(cancel_run, settings, args.run)} was told to stop")
        return 0
    if args.what == "list":
        _list.show(args, settings, out)
        return 0
    if args.what == "compare":
        _show.compare([_find(run, args.what, settings, out) for run in args.runs], args.output, out)
        return 0
    stored = _find(args.run, args.what, settings, out)
    match args.what:
        case what if what in _deliver.VERBS:
            _deliver.deliver(stored, args, settings, out)
        case "attach":
            return _attach(stored, args, settings, out)
        case "show":
            _show.show(stored, args.output, settings, out)
        case "network":
            _network.show(stored.record, args.output, out)
        case "logs":
            _logs.show(stored, args, settings, out)
        case "patch":
            from runner.ops.runs.history import patch_of

            _logs.print_file(patch_of(stored), out)
    return 0


def _find(run: str, what: str, settings: Settings, out: Output) -> StoredRun:
    """Find a run, and bring what a verb needs of one of another host here; what can be shown without is shown."""
    import trio

    from runner.cli.signals import run_cancellable
    from runner.core.errors import ArtifactsMissing, RunnerError
    from runner.ops.runs.fetched import read_back
    from runner.ops.runs.history import find_run, is_here

    stored = trio.run(find_run, settings, run)
    if what == "network" or settings.artifacts is None:
        if what in ("logs", "patch") and not is_here(settings, stored.record.id):
            raise ArtifactsMissing(
                f"the files of run `{stored.record.id}` are not in `{settings.home}`",
                hint="ask the host that it ran on; RUNNER_ARTIFACTS names a place for the files of all hosts",
            )
        return stored
    try:
        run_cancellable(partial(read_back, stored, settings, whole=what in _deliver.VERBS))
    except RunnerError as error:
        if what not in ("attach", "compare", "show"):
            raise
        error.severity = "warning"
        out.findings([error])
    return stored


def _attach(stored: StoredRun, args: Namespace, settings: Settings, out: Output) -> int:
    from msgspec.structs import replace

    from runner.cli.live_view import RunView, open_screen
    from runner.cli.plain_view import show_ends
    from runner.cli.signals import run_cancellable
    from runner.ops.runs.header import header_of
    from runner.ops.runs.secret_values import make_redactor
    from runner.ops.runs.watch import planned, watch
    from runner.ops.triage.place import flags_of
    from runner.report import progress, triage

    out.clean = make_redactor(settings).text
    run = planned(stored)
    header = replace(header_of(run), flags=flags_of(run, settings))

    async def whole() -> int:
        incident = header.incident is not None
        face: RunView = triage if incident else progress
        async with open_screen(out, {stored.record.name: header}, settings, face=face, quiet=args.quiet) as screen:
            record = await watch(stored, settings, [screen])
        if incident:
            screen.finish(record)
        else:
            show_ends([record], settings, out)
        return record.exit_code or 0

    try:
        return run_cancellable(whole)
    except KeyboardInterrupt:
        out.complain(f"no longer following; the run continues: runner runs attach {stored.record.id}")
        raise
