"""``runner gc``: remove leftovers of ended runs older than ``RUN_RETENTION``; exit 7 when some of it stays."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from runner.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runner.ops.runs.gc import Collection

SUMMARY = "remove what runs have kept for longer than RUN_RETENTION, and expired workspaces"
GROUP = "this host"
EXAMPLES = ("runner gc --dry-run",)
LEFT = 7
AGAIN = "if the clock is right now, run it again"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only show what would be removed")
    parser.add_argument("--output", choices=("text", "json"), default="text")


def main(args: Namespace, out: Output) -> int:
    from functools import partial

    import trio

    from runner.core.codec import plain
    from runner.core.errors import ClockJumped, StoreDamaged
    from runner.core.sanitize import sanitize
    from runner.core.settings import current
    from runner.ops.runs.gc import collect
    from runner.store.sqlite import REBUILD_HINT

    collection = trio.run(partial(collect, current(), dry_run=args.dry_run))
    if args.output == "json":
        out.json(
            {
                **plain(collection),
                "count": collection.count,
                "bytes": collection.bytes,
                "clean": collection.clean,
            }
        )
    else:
        for line in _lines(collection):
            out.line(sanitize(line, 1_000))
    if collection.clock is not None:
        out.findings([ClockJumped(f"nothing is removed: {collection.clock}", hint=AGAIN)])
    if collection.unknown:
        first, *others = collection.unknown
        more = f", and of {len(others)} more" if others else ""
        message = f"nothing is removed: the store does not know all of {first.kind} `{first.id}`{more}"
        out.findings([StoreDamaged(message, hint=REBUILD_HINT)])
    return 0 if collection.clean else LEFT


def _lines(collection: Collection) -> Iterator[str]:
    from runner.ops.runs.gc import GcVerdict
    from runner.report.format import size

    removed = "would be removed" if collection.dry_run else "removed"
    for kept in collection.found:
        age = f"{kept.age_seconds / 86_400:.1f}d old"
        if kept.left is not None:
            yield f"LEFT BEHIND  {kept.kind} {kept.path}: {kept.left}"
        elif kept.verdict.goes:
            setting = "RUNNER_MIRROR_LIMIT" if kept.kind == "mirror" else "RUNNER_DEPENDENCIES_LIMIT"
            over = f", over {setting}" if kept.verdict is GcVerdict.OVER_LIMIT else ""
            yield f"{removed}  {kept.kind} {kept.path}  {age}, {size(kept.bytes)}{over}"
        else:
            yield f"left alone  {kept.kind} {kept.path}  {age}, {kept.verdict.value}"
    for reaped in collection.reaped:
        if reaped.left is not None:
            yield f"{'left alone' if reaped.in_use else 'LEFT BEHIND'}  workspace {reaped.workspace}: {reaped.left}"
        else:
            saved = f", its work is in {reaped.saved}" if reaped.saved else ""
            stays = ", all files stay" if reaped.adopted else ""
            yield f"{removed}  workspace {reaped.workspace} {reaped.tree}  expired{saved}{stays}"
    for copy in collection.copies:
        age = f"{copy.age_seconds / 86_400:.1f}d old"
        yield f"LEFT BEHIND  copy {copy.place}: {copy.left}" if copy.left else f"{removed}  copy {copy.place}  {age}"
    if collection.artifacts_fault is not None:
        yield f"not looked at: {collection.artifacts_fault}"
    yield f"{collection.count} {removed}, {size(collection.bytes)}" if collection.count else f"nothing {removed}"
