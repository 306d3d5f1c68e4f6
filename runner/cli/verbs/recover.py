"""``runner recover [RUN]``: end runs whose runner has died; exit 7 when something could not be removed."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from runner.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runner.ops.runs.recover import Recovery

SUMMARY = "end runs whose runner has died: save their work, remove what they left"
GROUP = "runs"
EXAMPLES = ("runner recover --dry-run", "runner recover last")
LEFT = 7
NAMED = 10  # files that an agent put out
NOTHING = "no change"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", help="only this one: an id, its beginning, or `last`")
    parser.add_argument("--dry-run", action="store_true", help="only show what would be done")
    parser.add_argument("--output", choices=("text", "json"), default="text")


def main(args: Namespace, out: Output) -> int:
    from functools import partial

    import trio

    from runner.core.codec import plain
    from runner.core.errors import StoreDamaged
    from runner.core.sanitize import sanitize
    from runner.core.settings import current
    from runner.ops.runs.recover import recover_store
    from runner.store.sqlite import REBUILD_HINT

    recovery = trio.run(partial(recover_store, current(), args.run, dry_run=args.dry_run))
    if args.output == "json":
        out.json({**plain(recovery), "clean": recovery.clean})
    else:
        for line in _lines(recovery):
            out.line(sanitize(line, 1_000))
    if recovery.damage is not None:
        out.findings([StoreDamaged(f"nothing is recovered: {recovery.damage}", hint=REBUILD_HINT)])
    elif behind := [one for one in recovery.unknown if one.directory is not None]:
        message = f"the store does not know all of what was begun here: {len(behind)} directories know more"
        out.findings([StoreDamaged(message, hint=REBUILD_HINT)])
    return 0 if recovery.clean else LEFT


def _lines(recovery: Recovery) -> Iterator[str]:
    would = "would be " if recovery.dry_run else ""
    for run in recovery.runs:
        yield f"{run.run} {run.name}: {would}{run.outcome}"
        if run.saved is not None and not (run.outputs and run.saved == NOTHING):
            yield f"  {would}saved    {run.saved}"
        yield from (f"  saved    {path}" for path in run.outputs[:NAMED])
        if len(run.outputs) > NAMED:
            yield f"  saved    {len(run.outputs) - NAMED} more files beside them"
        yield from (f"  {would}removed  {what}" for what in run.removed)
        yield from (f"  kept     {what}" for what in run.kept)
        yield from (f"  LEFT BEHIND  {what}" for what in run.left)
    yield from (f"{would}removed  {what} (never started)" for what in recovery.strays)
    for one in recovery.workspaces:
        yield f"workspace {one.workspace} {one.done}" + (f"; its work is in {one.saved}" if one.saved else "")
        yield from [f"  LEFT BEHIND  {one.left}"] if one.left is not None else []
    for what in recovery.unknown:
        yield f"LEFT ALONE  {what.kind} {what.id}: {what.why}"
        yield from (f"  there    {place}" for place in (what.directory, *what.there) if place is not None)
    yield from (f"{run}: its files are sent" for run in recovery.sent)
    yield from (f"UNSENT  {one.run}: {one.why}" for one in recovery.unsent)
    idle = not any((recovery.runs, recovery.strays, recovery.workspaces, recovery.sent, recovery.unsent))
    if recovery.clean and idle:
        yield "nothing to recover"
