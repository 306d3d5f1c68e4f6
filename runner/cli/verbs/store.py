"""``runner store rebuild``: read a lost or damaged store anew; exit 7 when something cannot be read."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from runner.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runner.ops.host.rebuild_store import RebuildResult

SUMMARY = "the journal of all runs: rebuild it from what their directories have"
GROUP = "this host"
EXAMPLES = ("runner store rebuild",)
UNREAD = 7


def add_arguments(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    summary = "add what a lost, damaged or older store lacks; one that cannot be read is put beside"
    rebuild = verbs.add_parser("rebuild", help=summary, description=summary, allow_abbrev=False)
    rebuild.add_argument("--output", choices=("text", "json"), default="text")


def main(args: Namespace, out: Output) -> int:
    import trio

    from runner.core.codec import plain
    from runner.core.sanitize import sanitize
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
