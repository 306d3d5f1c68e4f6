"""Call tools in a workspace outside of runs: those that it allows, one call at a time, each a use of it.

A workspace is open for as long as calls may come, with its lease held and its sandbox running. Nobody else changes it
in that time. Its journal says which tools were called, and not with what.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Any

import trio
from msgspec import Struct

from runner.core.errors import LeaseError, RunnerError, ToolNotEnabled, ToolStopped, WorkspaceLost
from runner.core.nurseries import unwrapping_groups
from runner.events.events import ToolCalled
from runner.ops.tools import TOOLS
from runner.ops.tools._sandbox import Outputs, Sandbox
from runner.ops.workspaces.create_checks import require_isolation
from runner.ops.workspaces.exec import protected_paths
from runner.ops.workspaces.workspace_lease import HeldWorkspace, WorkspaceEnv, hold
from runner.ops.workspaces.workspaces import own_workspace, require_ready, use_of
from runner.ports.provider import SandboxSpec
from runner.ports.store import WorkspaceRow

TOGETHER = 0.1  # seconds between writes of the journal
UNWRITTEN = 100  # calls that may wait to be written to the journal
IDLE = 60.0  # seconds that a workspace stays open without a call
SERVE = "serve"  # the command that keeps a workspace open for calls


def tool(name: str) -> ModuleType:
    """Return the module of a tool, one of ``TOOLS``."""
    assert name in TOOLS
    return import_module(f"runner.ops.tools.{name}")


def require_tool(row: WorkspaceRow, name: str) -> None:
    """Raise ``ToolNotEnabled`` unless a tool may be called in a workspace."""
    if row.tools is not None and name not in row.tools:
        hint = f"it has {', '.join(row.tools)}" if row.tools else "it has none"
        raise ToolNotEnabled(f"Tool '{name}' is not enabled for this agent type", hint=hint)


def outputs_of(env: WorkspaceEnv, id: str) -> Outputs:
    """Return the long outputs of a workspace's commands, which go when it does."""
    return Outputs(env.folder(id) / "outputs")


class OpenWorkspace(Struct, eq=False):
    """A workspace that is open for tool calls."""

    row: WorkspaceRow
    sandbox: Sandbox
    journal: trio.MemorySendChannel[ToolCalled]

    async def call(self, name: str, arguments: Struct, *, by: str = "") -> Struct:
        """Call a tool and return its result. Raises what it raises; what was begun will be in the journal."""
        begun = trio.current_time()
        outcome = "stopped"
        try:
            with unwrapping_groups():
                result: Struct = await tool(name).call(self.sandbox, arguments)
            outcome = "ok"
        except RunnerError as error:
            outcome = error.code
            raise
        finally:
            with trio.CancelScope(shield=True):
                await self.journal.send(ToolCalled(name, outcome, round((trio.current_time() - begun) * 1000), by))
        return result


@asynccontextmanager
async def open_for_tools(
    env: WorkspaceEnv, text: str, command: str, *, isolated: bool = False
) -> AsyncIterator[OpenWorkspace]:
    """Open a workspace for calls. Raises ``WorkspaceState`` unless it is ready, ``LeaseHeld`` and ``WorkspaceLost``.

    ``isolated`` raises ``IsolationTooWeak`` for a provider that does not isolate.
    """
    row = await own_workspace(env, text)
    require_ready(row)
    async with hold(env, row, command) as held:
        require_ready(held.row)
        provider, handle = await held.handle()
        if isolated:
            require_isolation(await provider.probe())
        spec = SandboxSpec(protected=await protected_paths(env, held.row))
        journal, calls = trio.open_memory_channel[ToolCalled](UNWRITTEN)
        async with provider.open(handle, spec) as workspace, trio.open_nursery() as nursery:
            nursery.start_soon(_write_journal, held, calls)
            with journal:
                yield OpenWorkspace(held.row, Sandbox(workspace, outputs_of(env, row.id)), journal)


async def _write_journal(held: HeldWorkspace, calls: trio.MemoryReceiveChannel[ToolCalled]) -> None:
    """Write calls until there will be no more, ten times a second at most: none waits for the disk."""
    written = -math.inf
    with trio.CancelScope(shield=True):
        async for call in calls:
            await trio.sleep_until(written + TOGETHER)
            written = trio.current_time()
            more = [calls.receive_nowait() for _ in range(calls.statistics().current_buffer_used)]
            await held.write(call, *more, use_of(held.env.settings))


class _Kept(Struct, eq=False, kw_only=True):
    opened: OpenWorkspace
    turn: trio.Lock
    closing: trio.Event
    closed: trio.Event
    work: trio.CancelScope | None = None  # the call that runs
    used: float


class KeptWorkspaces:
    """Workspaces that stay open between calls, so that a call costs no sandbox, until nobody has called for a while."""

    def __init__(self, env: WorkspaceEnv, nursery: trio.Nursery, *, idle_seconds: float = IDLE) -> None:
        self._env, self._nursery, self._idle = env, nursery, idle_seconds
        self._kept: dict[str, _Kept] = {}
        self._opening: defaultdict[str, trio.Lock] = defaultdict(trio.Lock)

    def row(self, id: str) -> WorkspaceRow | None:
        """Return a workspace that is open: of what it is and belongs to, nothing changes in that time."""
        kept = self._kept.get(id)
        return None if kept is None or kept.closing.is_set() else kept.opened.row

    async def call(self, row: WorkspaceRow, name: str, arguments: Struct, *, by: str) -> Any:
        """Call a tool in its turn. Raises ``ToolStopped`` when the workspace is closed before the call has ended."""
        require_tool(row, name)
        while True:
            kept = await self._open(row.id)
            async with kept.turn:
                if not kept.closing.is_set():
                    with trio.CancelScope() as kept.work:
                        return await self._call(kept, name, arguments, by)
                    message = f"the call of `{name}` was ended: workspace `{row.id}` is being stopped or destroyed"
                    raise ToolStopped(message)
            await kept.closed.wait()

    async def open(self, id: str) -> None:
        """Open a workspace before the first call. If it cannot be, that call says why."""
        with suppress(RunnerError):
            await self._open(id)

    async def _open(self, id: str) -> _Kept:
        async with self._opening[id]:
            kept = self._kept.get(id)
            if kept is None:
                kept = self._kept[id] = await self._nursery.start(self._keep, id)
        return kept

    async def _call(self, kept: _Kept, name: str, arguments: Struct, by: str) -> Any:
        try:
            return await kept.opened.call(name, arguments, by=by)
        except (LeaseError, WorkspaceLost):
            kept.closing.set()  # the next call opens it anew
            raise
        finally:
            kept.work, kept.used = None, trio.current_time()

    @asynccontextmanager
    async def closed(self, id: str) -> AsyncIterator[None]:
        """End the call that runs in a workspace, within its grace, and keep it closed for the block; calls wait."""
        async with self._opening[id]:
            kept = self._kept.get(id)
            if kept is not None:
                kept.closing.set()
                if kept.work is not None:
                    kept.work.cancel()
                await kept.closed.wait()
            yield

    async def _keep(self, id: str, *, task_status: trio.TaskStatus[_Kept]) -> None:
        kept: _Kept | None = None
        try:
            async with open_for_tools(self._env, id, SERVE, isolated=True) as opened:
                kept = _Kept(
                    opened=opened,
                    turn=trio.Lock(),
                    closing=trio.Event(),
                    closed=trio.Event(),
                    used=trio.current_time(),
                )
                task_status.started(kept)
                await self._until_idle(kept)
                async with kept.turn:
                    pass  # the call that was ended has its grace
        except RunnerError as error:
            if kept is None:
                raise
            self._env.advise(error)
        finally:
            self._kept.pop(id, None)
            if kept is not None:
                kept.closing.set()
                kept.closed.set()

    async def _until_idle(self, kept: _Kept) -> None:
        """Wait until the workspace is to be closed, or nobody has called for a while."""
        while not kept.closing.is_set():
            with trio.move_on_after(self._idle):
                await kept.closing.wait()
            if not kept.turn.locked() and trio.current_time() >= kept.used + self._idle:
                kept.closing.set()
