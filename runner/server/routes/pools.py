"""Route of warm pools: what is kept ready, and how often it was what somebody needed."""

from __future__ import annotations

from msgspec import Struct

from runner.ops.pool.pool import status
from runner.server.route import Call, api


class Pool(Struct, kw_only=True):
    """A pool: ``size`` slots are wanted, and ``slots`` are there, by state."""

    name: str
    provider: str
    image: str | None
    size: int
    slots: dict[str, int]


class Pools(Struct, kw_only=True):
    """Pools; ``kept`` while a process fills them. ``counts`` are hits, and misses by reason."""

    kept: bool
    pools: list[Pool]
    counts: dict[str, int]


async def _list(call: Call) -> Pools:
    found = await status(call.server.env)
    pools = [
        Pool(
            name=one.name,
            provider=one.key.provider,
            image=one.key.image,
            size=one.size,
            slots={state.value: count for state, count in one.slots.items()},
        )
        for one in found.pools
    ]
    return Pools(kept=found.kept, pools=pools, counts=dict(found.counts))


ROUTES = (api("GET", "/pools", "List warm pools and their slots", _list, answer=Pools),)
