"""``runner store``: carry it to another database, or read a lost one anew; exit 7 when something cannot be read."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from runner.cli.output import Output
from runner.core.sanitize import sanitize

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runner.ops.host.rebuild_store import RebuildResult

SUMMARY = "the journal of all runs: carry it to another database, rebuild it from what their directories have"
GROUP = "this host"
EXAMPLES = (
    "runner store export store.jsonl",
    "runner store import store.jsonl",
    "runner store rebuild",
)
UNREAD = 7


def add_arguments(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    summary = "add what a lost, damaged or older store lacks; one that cannot be read is put beside"
    rebuild = verbs.add_parser("rebuild", help=summary, description=summary, allow_abbrev=False)
    summary = "write all that the store has to a new file, one state of it, while others may use it"
    export = verbs.add_parser("export", help=summary, description=summary, allow_abbrev=False)
    export.add_argument("file", metavar="FILE", type=Path, help="a new file, which only you can read")
    summary = "fill an empty store with what an export has"
    import_ = verbs.add_parser("import", help=summary, description=summary, allow_abbrev=False)
    import_.add_argument("file", metavar="FILE", type=Path, help="what `runner store export` has written")
    for verb in (rebuild, export, import_):
        verb.add_argument("--output", choices=("text", "json"), default="text")


def main(args: Namespace, out: Output) -> int:
    import trio

    from runner.core.settings import current

    if args.what == "rebuild":
        return _rebuild(args, out)
    from runner.ops.host.move_store import export_store, import_store

    rows = trio.run(export_store if args.what == "export" else import_store, current(), args.file)
    if args.output == "json":
        out.json({"file": str(args.file), "rows": rows})
    else:
        out.line(f"{rows} rows {'written to' if args.what == 'export' else 'read from'} {sanitize(str(args.file))}")
    return 0


def _rebuild(args: Namespace, out: Output) -> int:
    import trio

    from runner.core.codec import plain
    from runner.core.settings import current
    from runner.ops.host.rebuild_store import rebuild_store

    rebuilt = trio.run(rebuild_store, current())
    if args.output == "json":
        out.json(plain(rebuilt))
    else:
        for line in _lines(rebuilt):
            out.line(sanitize(line, 1_000))
    return UNREAD if rebuilt.unread else 0


def _lines(rebuilt: RebuildResult) -> Iterator[str]:
    if rebuilt.aside is not None:
        yield f"kept     {rebuilt.aside}: {rebuilt.damage}"
    yield from (f"read     run {run}" for run in rebuilt.runs)
    yield from (f"read     workspace {workspace}" for workspace in rebuilt.workspaces)
    yield from (f"NOT READ {what}" for what in rebuilt.unread)
    if not rebuilt.events:
        yield "nothing is missing"
        return
    yield f"{rebuilt.events} events; `runner recover` ends what has lost its runner"
    yield "projects of `runner project create` and warm pools are in no directory: make them again"
