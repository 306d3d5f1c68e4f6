"""Remove a run's workspace: at the run's end, and when it falls back to another provider."""

from __future__ import annotations

from functools import partial

import trio

from runner.core.errors import HostRefused, PlatformError
from runner.core.model import Outcome
from runner.events import events as ev
from runner.ports.provider import Provider
from runner.runtime.context import RunContext
from runner.safefs import trees


async def remove(run: RunContext, step: str, provider: Provider, workspace: str) -> None:
    """Remove a workspace of the run, asking again where that may help. Raises what the provider raises."""
    await run.emit(ev.ResourceRemovalStarted(step, "workspace", workspace))
    # Asked of the provider, not remembered: making it may have been cancelled half-way.
    for handle in await provider.list_owned(run.deps.nonce):
        if handle.id == workspace:
            run.lease_holder.require()
            await run.retry("removing the workspace", partial(provider.destroy, handle))
    await run.emit(ev.ResourceRemoved(step, "workspace", workspace))


async def fall_back(run: RunContext, step: str, outcome: Outcome, attempt: int, again: tuple[str, ...]) -> None:
    """Leave the workspace in which ``step`` failed, and take the lease of one that is still to be made.

    Remains of the old one are a warning, and the run's end tries again. Cancelled, the old one is the run's, without
    any work to save.
    """
    provider, left, name = run.workspace.provider, run.workspace_id, run.workspace.provider_name
    assert provider is not None  # only what has a workspace is fallen back from
    assert name is not None
    run.workspace.handle = None
    if not await _is_removed(run, step, provider, left):
        run.workspace.abandoned[left] = provider
    await trio.to_thread.run_sync(trees.remove, run.paths.repository)
    run.workspace.rejected_providers[name] = f"{step}: {outcome.message}"
    fallen = ev.FallbackStarted(step=step, provider=name, reason=outcome.message, attempt=attempt, repeated=again)
    await run.lease_holder.move(f"{run.id}-{attempt}", run.emit, fallen)
    run.workspace.reset()
    run.results.context = b""


async def remove_abandoned(run: RunContext, step: str) -> None:
    """Retry removing workspaces that a fallback has left behind; failures become warnings."""
    for workspace, provider in run.workspace.abandoned.items():
        await _is_removed(run, step, provider, workspace)


async def _is_removed(run: RunContext, step: str, provider: Provider, workspace: str) -> bool:
    try:
        await run.sandboxes.close()
        await remove(run, step, provider, workspace)
    except (PlatformError, OSError) as failure:
        error = HostRefused.of(failure) if isinstance(failure, OSError) else failure
        await run.emit(ev.WarningIssued(error.code, f"workspace {workspace} remains: {error.message}", step))
        return False
    return True
