"""Leases of workspaces: the one row of each, and how an event changes it.

A lease ends by release or by its time, on the store's clock. Its fence rises with every acquisition and never falls, so
that a holder that was away too long is known by an old number.
"""

from __future__ import annotations

from msgspec.structs import replace

from runner.core.errors import LeaseHeld, LeaseLost
from runner.core.model import Fence, Lease
from runner.events.events import LeaseAcquired, LeaseRefreshed, LeaseReleased

TTL = 3_600.0  # seconds
REFRESH = 300.0  # seconds between refreshes
RETRY = (5.0, 10.0, 20.0, 40.0, 60.0)  # seconds to the next try after a failed one; the last repeats

LeaseEvent = LeaseAcquired | LeaseRefreshed | LeaseReleased


def free(workspace: str) -> Lease:
    """Return the row of a workspace that was never leased."""
    return Lease(workspace=workspace, fence=0)


def advance(row: Lease, event: LeaseEvent, at: int, runner: str | None = None) -> Lease:
    """Return the row after an event of ``runner`` at the moment ``at``.

    Raises ``LeaseHeld`` for an acquisition that comes second or while the lease is live, unless it is forced (its
    holder is known to be dead); ``LeaseLost`` for a refresh or release by anybody but the holder.
    """
    match event:
        case LeaseAcquired():
            if row.live(at) and not event.forced:
                raise lease_held(row)
            if row.fence + 1 != event.fence:
                raise LeaseHeld(f"the lease of workspace `{row.workspace}` has a new holder", hint="try again")
            expires = at + round(event.ttl_seconds * 1e6)
            return Lease(
                workspace=row.workspace,
                fence=event.fence,
                id=event.lease,
                holder=event.holder,
                acquired=at,
                refreshed=at,
                expires=expires,
                runner=runner,
            )
        case LeaseRefreshed():
            check(row, Fence(row.workspace, event.lease, row.fence), at)
            return replace(row, refreshed=at, expires=at + round(event.ttl_seconds * 1e6))
        case _:
            if row.id != event.lease:
                raise lost(row, event.lease)
            return Lease(workspace=row.workspace, fence=row.fence)


def check(row: Lease, fence: Fence, at: int) -> None:
    """Refuse a write after the holder's lease has ended. Raises ``LeaseLost``."""
    if (row.id, row.fence) != (fence.lease, fence.number) or not row.live(at):
        raise lost(row, fence.lease)


def lease_held(row: Lease, place: str = "") -> LeaseHeld:
    """Return the refusal of a lease that has a holder, which may be on another host, at ``place``."""
    end = f"end what runs in it with `runner lease break {row.workspace} --yes`"
    hint = f"wait, or see `runner lease show {row.workspace}`; {end}"
    where = f": {place}" if place else ""
    return LeaseHeld(f"workspace `{row.workspace}` is in use by {row.holder}{where}", hint=hint)


def lost(row: Lease, lease: str) -> LeaseLost:
    who = f"{row.holder} has it now" if row.holder and row.id != lease else "it has ended"
    return LeaseLost(f"the lease of workspace `{row.workspace}` was lost: {who}")
