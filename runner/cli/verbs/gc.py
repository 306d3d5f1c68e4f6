"""``runner gc``: remove what ended runs have kept for longer than ``RUN_RETENTION``; exit 7 when some of it stays."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from runner.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runner.app.gc import Collection

SUMMARY = "remove what runs have kept for longer than RUN_RETENTION"
LEFT = 7


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only show what would be removed")
    parser.add_argument("--output", choices=("text", "json"), default="text")


def main(args: Namespace, out: Output) -> int:
    from functools import partial

    import trio

    from runner.app.gc import collect
    from runner.errors import printable
    from runner.plan.model import plain_fields
    from runner.settings import current

    collection = trio.run(partial(collect, current(), dry_run=args.dry_run))
    if args.output == "json":
        out.json({**plain_fields(collection), "bytes": collection.bytes, "clean": collection.clean})
    else:
        for line in _lines(collection):
            out.line(printable(line, 1_000))
    return 0 if collection.clean else LEFT


def _lines(collection: Collection) -> Iterator[str]:
    from runner.app.gc import Verdict
    from runner.report.words import size

    removed = "would be removed" if collection.dry_run else "removed"
    for kept in collection.found:
        age = f"{kept.age_seconds / 86_400:.1f}d old"
        if kept.left is not None:
            yield f"LEFT BEHIND  {kept.kind} {kept.path}: {kept.left}"
        elif kept.verdict is Verdict.STALE:
            yield f"{removed}  {kept.kind} {kept.path}  {age}, {size(kept.bytes)}"
        else:
            yield f"left alone  {kept.kind} {kept.path}  {age}, {kept.verdict.value}"
    yield f"{size(collection.bytes)} {removed}"
