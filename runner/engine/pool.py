"""The warm pool's keeper: creates slots, hands them out, replaces them, and ends those that are dead or too many.

A slot's row is written before anything of the slot is created, and removed when nothing of it is left or when it has
become a workspace. Each slot has a task that holds its sandbox open. The caller ensures that a store has one keeper at
a time; slots that exist when a keeper starts belong to a dead one, see ``clear``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import cast

import trio
from msgspec import Struct, field
from msgspec.structs import replace

from runner.core.errors import RunnerError, WorkspaceLost
from runner.core.model import Handle, PoolMissReason, SlotKey, SlotState
from runner.core.nurseries import first_of
from runner.lifecycle.pool import PREFIX, Failures, decide, name_of, why_missed
from runner.ports.provider import Images, Provider, SandboxHandoff, Slot, WarmSlots, WorkspaceRequest
from runner.ports.store import SlotRow, Store

LOOK = 2.0  # seconds between looks at how many slots are wanted
_ANSWER = 2.0  # seconds that a slot has to answer; a pod does it by way of the API server
_AT_ONCE = 2  # slots that are made at a time
_HEAD_START = 0.1  # seconds for who got a slot, before what replaces it takes the machine

Deliver = Callable[[Handle, SandboxHandoff], Awaitable[bool]]


class _Kept(Struct, eq=False, kw_only=True):
    """A slot and its task. ``left`` is set when the task no longer touches the sandbox.

    ``assigned`` is the workspace that it has become.
    """

    row: SlotRow
    key: SlotKey
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    wanted: trio.Event = field(default_factory=trio.Event)
    left: trio.Event = field(default_factory=trio.Event)
    handle: Handle | None = None
    slot: Slot | None = None
    handoff: SandboxHandoff | None = None
    assigned: Handle | None = None

    def become(self, state: SlotState) -> None:
        self.row = replace(self.row, state=state)


class Keeper:
    """Keeps the pools of a store filled. ``tell`` hears of errors that are retried; ``name`` identifies the keeper in
    rows.

    Every ``look`` seconds it compares the slots with the wanted sizes.
    """

    def __init__(
        self,
        store: Store,
        provider: Callable[[str], Provider],
        *,
        name: str,
        new_id: Callable[[], str],
        tell: Callable[[RunnerError], None] = lambda error: None,
        look: float = LOOK,
    ) -> None:
        self._store, self._provider, self._name = store, provider, name
        self._new_id, self._tell, self._pause = new_id, tell, look
        self._kept: dict[str, _Kept] = {}
        self._failures: dict[str, Failures] = {}
        self._keys: dict[str, SlotKey] = {}
        self._making = trio.CapacityLimiter(_AT_ONCE)
        self._woken = trio.Event()

    async def run(self) -> None:
        """Keep as many slots as the store says until cancelled; then end every slot that nobody has claimed."""
        async with trio.open_nursery() as nursery:
            while True:
                self._woken = trio.Event()
                pause = self._pause
                try:
                    pause = min(pause, await self._look(nursery))
                except* RunnerError as group:
                    self._tell_all(group)
                with trio.move_on_after(pause):
                    await self._woken.wait()

    async def _look(self, nursery: trio.Nursery) -> float:
        """Create and end slots as wanted. Returns the seconds until something is due again."""
        pools = {pool.name: pool for pool in await self._store.pools()}
        self._keys = {name: pool.key for name, pool in pools.items() if pool.size}
        sizes = {name: pool.size for name, pool in pools.items()}
        now = await self._store.now()
        change = decide([kept.row for kept in self._kept.values()], sizes, self._failures, now)
        ending = [(self._kept[id], self._kept[id].row.state) for id in change.end]
        for kept, _ in ending:  # before anything is awaited: meanwhile others may be taken, or die
            kept.become(SlotState.DRAINING)
            kept.scope.cancel()
        for kept, before in ending:
            await self._store.move_slot(kept.row.id, before, SlotState.DRAINING)
        for pool, count in change.make.items():
            for _ in range(count):
                wish = SlotRow(id=PREFIX + self._new_id(), pool=pool, state=SlotState.WARMING, keeper=self._name)
                kept = _Kept(row=await self._store.put_slot(wish), key=pools[pool].key)
                self._kept[kept.row.id] = kept
                nursery.start_soon(self._keep, kept)
        return self._pause if change.again is None else (change.again - now) / 1e6

    async def _keep(self, kept: _Kept) -> None:
        """Run one slot until it is claimed or ended."""
        try:
            with kept.scope:
                await self._warm(kept)
        except* RunnerError as group:  # of a sandbox that dies, what its tasks raise comes in groups
            before = self._failures.get(kept.row.pool, Failures())
            self._failures[kept.row.pool] = Failures(before.count + 1, await self._store.now())
            self._tell_all(group)
        finally:
            kept.left.set()
            if kept.row.state is not SlotState.CLAIMED:
                with trio.CancelScope(shield=True):
                    await self._end(kept)

    async def _warm(self, kept: _Kept) -> None:
        provider, key, row = self._provider(kept.key.provider), kept.key, kept.row
        async with AsyncExitStack() as stack:
            async with self._making:
                request = WorkspaceRequest(
                    id=row.id, run="", nonce=self._store.nonce, limits=key.limits, image=key.image
                )
                if key.image is not None and isinstance(provider, Images):
                    await provider.pull(key.image, key.image)
                kept.handle = await provider.create(request)
                slots = cast("WarmSlots", provider)
                kept.slot = await stack.enter_async_context(slots.open_slot(kept.handle, key.toolchains, key.protected))
            if await self._store.move_slot(row.id, SlotState.WARMING, SlotState.READY):
                kept.become(SlotState.READY)
                self._failures.pop(row.pool, None)
                await first_of(kept.wanted.wait, kept.slot.wait_ended)
                if not kept.wanted.is_set():
                    raise WorkspaceLost(f"the warm workspace `{row.id}` has ended by itself")
                kept.handoff = kept.slot.detach()

    async def _end(self, kept: _Kept, *, given: bool = False) -> None:
        """Forget a slot and, unless it was given away, remove all of it; the row stays if that fails."""
        provider, row = self._provider(kept.key.provider), kept.row
        self._kept.pop(row.id, None)
        if kept.handoff is not None:
            kept.handoff.close()
        try:
            for handle in [] if given else await provider.list_owned(self._store.nonce):
                if handle.id == row.id or (kept.assigned and handle.id == kept.assigned.id):
                    await provider.destroy(handle)
            await self._store.remove_slot(row.id)
        except* RunnerError as group:
            self._tell_all(group)
        finally:
            self._woken.set()

    async def claim(self, key: SlotKey, request: WorkspaceRequest, deliver: Deliver) -> PoolMissReason | None:
        """Turn a slot into the requested workspace, or return why none can be.

        ``deliver`` brings the sandbox to the requester once nobody else has it, and returns whether it has arrived; if
        not, the workspace is removed, and there was no miss. Cancelling does so as well.
        """
        died = False
        while kept := self._take(name_of(key)):
            if await self._is_given(kept, request, deliver):
                return None
            died = True
        return PoolMissReason.DEAD if died else why_missed(key, self._keys.values())

    def _take(self, pool: str) -> _Kept | None:
        """Reserve a ready slot of a pool."""
        for kept in self._kept.values():
            if kept.row.pool == pool and kept.row.state is SlotState.READY:
                kept.become(SlotState.CLAIMED)
                return kept
        return None

    async def _is_given(self, kept: _Kept, request: WorkspaceRequest, deliver: Deliver) -> bool:
        """Assign a slot to the requested workspace and deliver it. Returns whether it was assigned; if it did not
        arrive, it is ended."""
        assert kept.slot is not None
        assert kept.handle is not None
        arrived = False
        try:
            with trio.fail_after(_ANSWER):
                await kept.slot.ping()
            kept.wanted.set()  # the task leaves the sandbox meanwhile: nobody else gets it, whatever comes now
            if await self._store.move_slot(kept.row.id, SlotState.READY, SlotState.CLAIMED, request.id):
                kept.assigned = await cast("WarmSlots", self._provider(kept.key.provider)).assign(kept.handle, request)
                await kept.left.wait()
                if kept.handoff is not None:
                    arrived = await deliver(kept.assigned, kept.handoff)
                    await trio.sleep(_HEAD_START if arrived else 0)
                    return True
        except* RunnerError as group:
            self._tell_all(group)
        except* trio.TooSlowError:
            self._tell(WorkspaceLost(f"the warm workspace `{kept.row.id}` did not answer in {_ANSWER:g} s"))
        finally:
            with trio.CancelScope(shield=True):
                await self._let_go(kept, arrived=arrived)
        return False

    def _tell_all(self, errors: BaseExceptionGroup[RunnerError]) -> None:
        for error in errors.exceptions:
            if isinstance(error, BaseExceptionGroup):
                self._tell_all(error)
            else:
                self._tell(error)

    async def _let_go(self, kept: _Kept, *, arrived: bool) -> None:
        if not arrived:
            kept.become(SlotState.DRAINING)
            kept.scope.cancel()
        if kept.left.is_set():  # else its task ends it
            await self._end(kept, given=arrived)


async def clear(store: Store, providers: Sequence[Provider], *, dry_run: bool = False) -> dict[str, str | None]:
    """End the slots of a dead keeper. Returns each with ``None``, or with the reason for which something remains.

    A slot that had become a workspace is left to the owner of that.
    """
    found: dict[str, str | None] = {}
    taken = {row.slot for row in await store.workspaces()}
    for provider in providers:
        for handle in await provider.list_owned(store.nonce):
            if handle.id.startswith(PREFIX) and handle.id not in taken:
                found[handle.id] = None
                try:
                    if not dry_run:
                        await provider.destroy(handle)
                except RunnerError as error:
                    found[handle.id] = error.message
    for row in [] if dry_run else await store.slots():
        if found.get(row.id) is None:
            await store.remove_slot(row.id)
    return found
