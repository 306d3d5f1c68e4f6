"""Decide the slots of a warm pool, and the reason for a miss. Pure.

A slot is a running workspace that belongs to nobody. Times are microseconds since the epoch by the store's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from runner.core.codec import canonical, digest
from runner.core.model import Limits, PoolMissReason, SlotKey, SlotState
from runner.ports.store import SlotRow

MAX_AGE = 6 * 3_600.0  # seconds after which a slot is replaced: what it was made of may have changed since
BACK_OFF = (1.0, 5.0, 15.0, 60.0)  # seconds until a pool is filled again after a failure; the last repeats
PREFIX = "slot-"  # of the ids of workspaces that are slots

NEXT: Mapping[SlotState, frozenset[SlotState]] = {
    SlotState.WARMING: frozenset({SlotState.READY, SlotState.DRAINING}),
    SlotState.READY: frozenset({SlotState.CLAIMED, SlotState.DRAINING}),
    SlotState.CLAIMED: frozenset({SlotState.DRAINING}),
    SlotState.DRAINING: frozenset(),
}

# In the order in which a difference is told: a slot of another image is further away than one of other limits.
_DIFFERENCES = (
    ("provider", PoolMissReason.PROVIDER),
    ("place", PoolMissReason.PROVIDER),
    ("image", PoolMissReason.IMAGE),
    ("limits", PoolMissReason.LIMITS),
    ("network", PoolMissReason.NETWORK),
    ("shared", PoolMissReason.SHAPE),
    ("toolchains", PoolMissReason.SHAPE),
    ("protected", PoolMissReason.SHAPE),
    ("policy", PoolMissReason.POLICY),
)


def name_of(key: SlotKey) -> str:
    """Return the name of the pool whose slots have this key."""
    return digest(canonical(key).decode()).removeprefix("sha256:")[:12]


def read_key(found: Mapping[str, Any]) -> SlotKey:
    """Read a key from its plain form. Raises ``KeyError`` and ``TypeError`` for that of another version."""
    paths = {"toolchains": tuple(found["toolchains"]), "protected": tuple(found["protected"])}
    return SlotKey(**{**found, "limits": Limits(**found["limits"]), **paths})


def why_missed(wanted: SlotKey, pools: Iterable[SlotKey]) -> PoolMissReason:
    """Return why none of these pools fits a workspace: the first difference to the nearest of them."""
    first = [_difference(wanted, key) for key in pools]
    if not first:
        return PoolMissReason.EMPTY
    nearest = max(first)
    return _DIFFERENCES[nearest][1] if nearest < len(_DIFFERENCES) else PoolMissReason.EMPTY


def _difference(wanted: SlotKey, key: SlotKey) -> int:
    """The number of the first difference; one that is too high when there is none."""
    names = (name for name, _ in _DIFFERENCES)
    found = (at for at, name in enumerate(names) if getattr(wanted, name) != getattr(key, name))
    return next(found, len(_DIFFERENCES))


class Failures(Struct, frozen=True):
    """The number of failures in a row to create a slot of a pool, and the time of the last."""

    count: int = 0
    at: int = 0

    def pause_until(self) -> int:
        """Return the moment from which the pool may be filled again."""
        return self.at + round(BACK_OFF[min(self.count, len(BACK_OFF)) - 1] * 1e6) if self.count else 0


class Change(Struct, frozen=True):
    """Slots to end now, by id, and numbers to create, by pool. The next change is due at ``again``."""

    end: tuple[str, ...] = ()
    make: Mapping[str, int] = {}
    again: int | None = None


def decide(slots: Sequence[SlotRow], sizes: Mapping[str, int], failures: Mapping[str, Failures], now: int) -> Change:
    """Decide how to reach the wanted ``sizes``. Claimed slots are not ended, and do not count.

    The oldest surplus slots end first, and all slots of unwanted pools. A slot over ``MAX_AGE`` is replaced.
    """
    kept: Counter[str] = Counter()
    ends: list[str] = []
    due: list[int] = []
    for slot in sorted(slots, key=lambda slot: -slot.created):  # of too many the newest stay
        if slot.state not in (SlotState.WARMING, SlotState.READY):
            continue
        over = slot.created + round(MAX_AGE * 1e6)
        if over <= now or kept[slot.pool] >= sizes.get(slot.pool, 0):
            ends.append(slot.id)
        else:
            kept[slot.pool] += 1
            due.append(over)
    make: dict[str, int] = {}
    for pool, size in sizes.items():
        if (lacking := size - kept[pool]) > 0:
            until = failures.get(pool, Failures()).pause_until()
            if until > now:
                due.append(until)
            else:
                make[pool] = lacking
    return Change(tuple(ends), make, min(due, default=None))
