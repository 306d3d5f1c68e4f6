"""A limit on the disk where no file system keeps it: a run looks at its workspace from outside while a step works."""

from __future__ import annotations

import time
from pathlib import Path

import trio

from runner.core.model import Feature
from runner.plan.model import Step
from runner.runtime.context import RunContext
from runner.safefs.trees import bytes_on_disk

EVERY = 5.0  # seconds between two looks at least
_SHARE = 20  # times as long as a look took: it must not become what the host is busy with


def watched(run: RunContext, step: Step) -> tuple[Path, ...]:
    """List the directories that commands of a step fill, if the run must enforce their limit itself."""
    if not step.fills_disk:
        return ()
    handle, probe = run.workspace.handle, run.workspace.probe
    if handle is None or probe is None or run.plan.limits.disk_bytes is None or handle.project_tree is not None:
        return ()
    if step.kind == "dependencies":
        return (run.paths.installation,)  # which is on no disk of the workspace
    return (handle.private, handle.tree) if Feature.DISK in probe.watched else ()


async def outgrown(paths: tuple[Path, ...], limit: int) -> int:
    """Wait until the directories together exceed ``limit`` bytes on disk, and return their size.

    Cancelling leaves a measurement under way to end by itself.
    """
    pause = EVERY
    while True:
        await trio.sleep(pause)
        began = time.monotonic()
        size = await size_of(paths)
        if size > limit:
            return size
        pause = max(EVERY, _SHARE * (time.monotonic() - began))


async def size_of(paths: tuple[Path, ...]) -> int:
    """Measure bytes on disk. Cancelling leaves the measurement to end by itself."""
    return await trio.to_thread.run_sync(lambda: sum(map(bytes_on_disk, paths)), abandon_on_cancel=True)


def too_large(size: int, limit: int) -> str:
    return f"its workspace grew to {size >> 20} MiB, and may have {limit >> 20} MiB"
