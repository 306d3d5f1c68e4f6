"""See ``plan``."""

from __future__ import annotations

import trio

from runner.core.errors import HostRefused
from runner.core.model import Outcome, succeeded
from runner.core.plural import plural
from runner.runtime.context import RunContext
from runner.runtime.policy_scan import broken, scan_tree
from runner.safefs import trees
from runner.steps.scan.plan import ScanBody


async def perform(body: ScanBody, run: RunContext) -> Outcome:
    await _flush(run)
    result = await scan_tree(run, "scan", body.policies)
    if result.violations:
        return broken(result.violations)
    text = f"{plural(result.outside, 'new path')} in submodules: no part of the work"
    return succeeded(plural(result.files, "file"), warnings=(text,) * bool(result.outside))


async def _flush(run: RunContext) -> None:
    """A workspace with a limit on its disk is a sparse file on the host's. When that is full, whoever writes inside
    hears nothing of it: what was written is gone once memory lets go of it. Raises ``HostRefused``."""
    _, handle = run.workspace.require()
    if not handle.private.is_mount():
        return
    try:
        await trio.to_thread.run_sync(trees.flush, handle.private)
    except OSError as error:
        raise HostRefused(
            f"the disk of this host did not take all that was written in the workspace: {error.strerror}",
            hint="make room, as with `runner gc`, and start again: what is kept of this run may lack files or bytes",
        ) from error
