"""A run's exclusive use of its workspace, from the first step to the last."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import trio

from runner.core.errors import LeaseHeld, LeaseLost, RunnerError
from runner.core.model import Fence, Holder, Lease
from runner.events.events import Event, LeaseAcquired, LeaseRefreshed, LeaseReleased
from runner.lifecycle.lease import REFRESH, RETRY, TTL, lost

Emit = Callable[..., Awaitable[None]]


class LeaseHolder:
    """Holds the lease of a workspace. ``fence`` goes with everything that the holder writes; ``None`` before and after.

    ``until`` is the moment (trio time) from which somebody else may have the lease, counted from before the request.
    """

    def __init__(
        self, workspace: str, holder: Holder, read: Callable[[str], Awaitable[Lease]], *, ttl: float = TTL
    ) -> None:
        self.workspace, self.holder, self._ttl = workspace, holder, ttl
        self.fence: Fence | None = None
        self.until = -math.inf
        self.began = trio.Event()
        self._read = read
        self._regaining = trio.Lock()
        self._changing = trio.Lock()

    async def acquire(self, emit: Emit, *, forced: bool = False) -> Lease:
        """Take the lease and return its previous row: free, expired, or with ``forced`` a dead holder's.

        Whoever takes a lease over first ends what still runs in the workspace: the old holder can write nothing from
        here on, so what it starts now is the last. Raises ``LeaseHeld``.
        """
        before = await self._read(self.workspace)
        await self._take(before, emit, forced=forced)
        return before

    async def regain(self, refused: Fence, emit: Emit) -> bool:
        """Acquire the own, expired lease again, unless ``refused`` was replaced meanwhile. Returns whether it did.

        The old fence stays until there is a new one: a holder never writes without. Raises ``LeaseLost`` when somebody
        else has had the workspace since.
        """
        async with self._regaining:
            row = await self._read(self.workspace)
            if self.fence is None or row.id != self.fence.lease:
                raise lost(row, refused.lease)
            if self.fence != refused:
                return False
            try:
                await self._take(row, emit)
            except LeaseHeld as held:
                raise LeaseLost(held.message) from held
            return True

    async def _take(self, before: Lease, emit: Emit, *, forced: bool = False) -> None:
        fence = Fence(self.workspace, f"{self.workspace}.{before.fence + 1}", before.fence + 1)
        asked = trio.current_time()
        await emit(
            LeaseAcquired(
                workspace=self.workspace,
                lease=fence.lease,
                holder=self.holder,
                fence=fence.number,
                ttl_seconds=self._ttl,
                replaces=before.id,
                forced=forced,
            )
        )
        self.fence, self.until = fence, asked + self._ttl
        self.began.set()

    async def refresh(self, emit: Emit) -> None:
        """Extend the lease, unless it is released meanwhile."""
        async with self._changing:
            if self.fence is None:
                return
            asked = trio.current_time()
            await emit(LeaseRefreshed(self.workspace, self.fence.lease, self._ttl))
            self.until = asked + self._ttl

    async def move(self, workspace: str, emit: Emit, *pending_events: Event) -> None:
        """Exchange the lease for that of a workspace that nobody knows of yet, in one write with ``events``."""
        async with self._changing:
            assert self.fence is not None
            fence, asked = Fence(workspace, f"{workspace}.1", 1), trio.current_time()
            acquired = LeaseAcquired(
                workspace=workspace, lease=fence.lease, holder=self.holder, fence=fence.number, ttl_seconds=self._ttl
            )
            await emit(*pending_events, acquired, LeaseReleased(self.workspace, self.fence.lease))
            self.workspace, self.fence, self.until = workspace, fence, asked + self._ttl

    async def release(self, emit: Emit) -> None:
        """Release the lease; nothing may be written for the workspace afterwards. Raises ``LeaseLost``."""
        if self.fence is not None:
            lease, self.fence = self.fence.lease, None
            await emit(LeaseReleased(self.workspace, lease))

    def require(self) -> None:
        """Raise ``LeaseLost`` if anybody else could have the workspace now."""
        if trio.current_time() >= self.until:
            raise LeaseLost(f"the lease of workspace `{self.workspace}` has ended")


async def renew_until_released(
    lease_holder: LeaseHolder, emit: Emit, *, margin: float, warn: Callable[[str], Awaitable[None]]
) -> str | None:
    """Refresh a lease until it is released. Returns ``margin`` seconds before its end, or when it is lost, with the
    reason if known.

    A failed refresh is repeated. ``warn`` gets the first failure, and all of them as soon as one succeeds or when there
    is no time left for another. Cancel it with the holder.
    """
    await lease_holder.began.wait()
    failures: list[str] = []
    while lease_holder.fence is not None:
        pause = RETRY[min(len(failures), len(RETRY)) - 1] if failures else REFRESH
        await trio.sleep_until(min(trio.current_time() + pause, lease_holder.until - margin))
        if lease_holder.fence is None:
            return None
        if trio.current_time() >= lease_holder.until - margin:
            break
        try:
            await lease_holder.refresh(emit)
            if failures:
                await warn(_all(failures))
        except LeaseLost:
            return None
        except RunnerError as error:
            failures.append(error.message)
            if len(failures) == 1:
                await _try_to(warn, f"refreshing the lease failed, and is tried again: {error.message}")
        else:
            failures.clear()
    if not failures:
        return None
    await _try_to(warn, _all(failures))
    return _all(failures)


def _all(failures: Sequence[str]) -> str:
    return f"refreshing the lease failed {len(failures)} times, last: {failures[-1]}"


async def _try_to(warn: Callable[[str], Awaitable[None]], message: str) -> None:
    """Warn if the store takes it: a store that refuses a refresh may refuse a warning, which is repeated later."""
    with suppress(RunnerError):
        await warn(message)
