"""Warm pools: which ones there should be, and the process that keeps them.

Manifests and settings say what a keeper starts with; from then on the store does, so that other processes can change
it. A keeper holds a file lock, so a ``RUNNER_HOME`` has one at most, and slots name it, so a store has one at most.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import trio

from runner.artifacts.run_lock import is_locked, try_lock
from runner.core.errors import NoPool, PoolKept, RunnerError, UnknownPool, UsageError, nearest
from runner.core.model import Feature, SlotKey, SlotState
from runner.core.nurseries import open_services
from runner.core.sanitize import excerpt
from runner.engine.pool import Keeper, clear
from runner.lifecycle.pool import name_of
from runner.ops.host.liveness import read_liveness
from runner.ops.planning.facts import usable_providers
from runner.ops.planning.make_plan import PlanResult
from runner.ops.pool.handoff import PLACE, listening, serve
from runner.ops.workspaces.maintenance import CompletedChange
from runner.ops.workspaces.workspace_lease import WorkspaceEnv
from runner.ports.provider import Provider
from runner.ports.store import PoolRow, SlotRow
from runner.steps.provision.plan import ProvisionBody
from runner.steps.provision.run import slot_key


@dataclass(frozen=True)
class PoolState:
    """A pool in a listing: its target size, and its number of slots in each state."""

    name: str
    key: SlotKey
    size: int
    slots: Mapping[SlotState, int]


@dataclass(frozen=True)
class PoolStatus:
    """Status of all pools; ``kept`` while a keeper runs. ``counts`` has hits, and misses by reason."""

    kept: bool
    pools: tuple[PoolState, ...]
    counts: Mapping[str, int]


# --- what there should be --------------------------------------------------------------------------


def pools_of(planned: PlanResult, size: int | None) -> list[PoolRow]:
    """Return the pools that the runs of a plan ask for, of their own size or of ``size``.

    Runs whose workspaces can come from the same slots share a pool of the largest size. Raises ``NoPool`` when there is
    none.
    """
    found: dict[str, PoolRow] = {}
    for run in planned.plan.runs:
        (body,) = [step.body for step in run.steps if step.kind == "provision"]
        assert isinstance(body, ProvisionBody)
        wanted = body.warm.size if size is None else size
        key = _key(body, planned)
        if wanted and key is not None:
            row = PoolRow(name_of(key), key, wanted)
            found[row.name] = max(found.get(row.name, row), row, key=lambda pool: pool.size)
    if not found:
        hint = (
            "write `workspace.warm_pool: {size: N}` in an agent type that runs on docker or kubernetes, or give --size"
        )
        raise NoPool(f"`{planned.path}` asks for no warm pool", hint=hint)
    return [found[name] for name in sorted(found)]


def _key(body: ProvisionBody, planned: PlanResult) -> SlotKey | None:
    """Return the slot key of the first provider that would be chosen and can have a pool."""
    for name in () if body.shared else body.providers:
        probe = planned.facts.probes[name]
        if probe.available and probe.isolation >= body.isolation and probe.enforces(Feature.WARM_POOL):
            return slot_key(body, name, probe)
    return None


# --- keeping ---------------------------------------------------------------------------------------


@asynccontextmanager
async def open_pool(
    env: WorkspaceEnv, pools: Sequence[PoolRow], tell: Callable[[RunnerError], None]
) -> AsyncIterator[None]:
    """Keep these pools for the length of the block; at its end nothing of them is left.

    Leftovers of a dead keeper are removed first. ``tell`` gets failures, which are retried. Raises ``PoolKept`` while
    another process keeps the pools of this store.
    """
    store, deps, home = env.store, env.deps, env.settings.home
    if place := await _kept_elsewhere(env):
        raise PoolKept(f"the warm pools of this store are kept by {place}", hint="runner pool status")
    lock = await trio.to_thread.run_sync(try_lock, home / PLACE)
    if lock is None:
        raise PoolKept(f"another process keeps the warm pools of `{home}`", hint="runner pool status")
    try:
        await clear(store, providers_of(env))
        await store.register()
        await store.put_pools(pools)
        keeper = Keeper(
            store,
            deps.provider,
            name=store.runner.id if store.runner is not None else "",
            new_id=partial(secrets.token_hex, 6),
            tell=tell,
        )
        with listening(home) as listener:
            async with open_services() as services:
                services.start_soon(serve, listener, keeper, store.nonce)
                services.start_soon(keeper.run)
                yield
    finally:
        os.close(lock)


async def _kept_elsewhere(env: WorkspaceEnv) -> str | None:
    """Say where another home's keeper of this store is, unless it is known to be dead."""
    keepers = {slot.keeper for slot in await env.store.slots()}
    if not keepers:
        return None
    liveness = await read_liveness(env.store, env.settings.home)
    return next((place for keeper in keepers if (place := liveness.elsewhere(keeper))), None)


def providers_of(env: WorkspaceEnv) -> list[Provider]:
    return [env.deps.provider(name) for name in usable_providers()]


async def clear_left(env: WorkspaceEnv, *, dry_run: bool) -> list[CompletedChange]:
    """Remove what a dead keeper left, or with ``dry_run`` only list it."""
    if is_locked(env.settings.home / PLACE) or await _kept_elsewhere(env):
        return []
    found = await clear(env.store, providers_of(env), dry_run=dry_run)
    return [CompletedChange(id, "was kept warm by a process that has died", left=left) for id, left in found.items()]


# --- looking and changing --------------------------------------------------------------------------


async def status(env: WorkspaceEnv) -> PoolStatus:
    store = env.store
    pools, slots, counts = await store.pools(), await store.slots(), await store.pool_counts()
    states = [PoolState(pool.name, pool.key, pool.size, _states(pool, slots)) for pool in pools]
    kept = is_locked(env.settings.home / PLACE) or await _kept_elsewhere(env) is not None
    return PoolStatus(kept, tuple(states), counts)


def _states(pool: PoolRow, slots: Sequence[SlotRow]) -> dict[SlotState, int]:
    return {state: sum(slot.pool == pool.name and slot.state is state for slot in slots) for state in SlotState}


async def resize(env: WorkspaceEnv, size: int, name: str | None) -> PoolStatus:
    """Change the size of a pool, or of all; the keeper follows within seconds.

    Raises ``UnknownPool``, ``UsageError``.
    """
    if not 0 <= size <= 1_000:
        raise UsageError(f"a pool cannot have {size} slots", hint="give a number from 0 to 1000")
    pools = [pool.name for pool in await env.store.pools()]
    found = pools if name is None else [pool for pool in pools if name and pool.startswith(name)]
    if not pools:
        raise UnknownPool("there is no warm pool", hint="start the pools of a folder of manifests: runner pool warm")
    if name is not None and len(found) != 1:
        raise UnknownPool(f"`{excerpt(name)}` is not one of the pools", hint=nearest(name, pools))
    await env.store.resize_pools(dict.fromkeys(found, size))
    return await status(env)
