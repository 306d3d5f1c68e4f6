"""A limit on the disk where no file system keeps it: a run looks at its workspace from outside while a step works."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import trio

from runner.core.model import Feature
from runner.plan.model import Step
from runner.ports.provider import DiskUse
from runner.runtime.context import RunContext
from runner.safefs.trees import bytes_on_disk

Measure = Callable[[], Awaitable[int]]  # bytes

EVERY = 5.0  # seconds between two looks at least
_SHARE = 20  # times as long as a look took: it must not become what the host is busy with


def watched(run: RunContext, step: Step) -> Measure | None:
    """Return the measure of what commands of a step fill, if the run must enforce its limit itself."""
    if not step.fills_disk:
        return None
    handle, probe, provider = run.workspace.handle, run.workspace.probe, run.workspace.provider
    if handle is None or probe is None or run.plan.limits.disk_bytes is None or handle.project_tree is not None:
        return None
    if step.kind == "dependencies":
        return partial(size_of, (run.paths.installation,))  # which is on no disk of the workspace
    if Feature.DISK not in probe.watched:
        return None
    here = partial(size_of, (handle.private, handle.tree))
    return partial(provider.disk_bytes, handle, here) if isinstance(provider, DiskUse) else here


async def outgrown(measure: Measure, limit: int) -> int:
    """Wait until more than ``limit`` bytes are measured, and return their number.

    Cancelling leaves a measurement under way to end by itself.
    """
    pause = EVERY
    while True:
        await trio.sleep(pause)
        began = time.monotonic()
        size = await measure()
        if size > limit:
            return size
        pause = max(EVERY, _SHARE * (time.monotonic() - began))


async def size_of(paths: tuple[Path, ...]) -> int:
    """Measure bytes on disk. Cancelling leaves the measurement to end by itself."""
    return await trio.to_thread.run_sync(lambda: sum(map(bytes_on_disk, paths)), abandon_on_cancel=True)


def too_large(size: int, limit: int) -> str:
    return f"its workspace grew to {size >> 20} MiB, and may have {limit >> 20} MiB"
