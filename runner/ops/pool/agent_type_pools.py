"""Warm pools of a server: those that its agent types ask for, kept while it runs."""

from __future__ import annotations

import trio
from msgspec.structs import replace

from runner.core.errors import NoPool, PoolKept, Rejected, RunnerError
from runner.lifecycle.pool import name_of
from runner.ops.agent_type_store import AgentTypes
from runner.ops.agent_types import WorkspaceConfig, limits_in
from runner.ops.pool.pool import open_pool
from runner.ops.workspaces.create_checks import choose_provider, limits_of
from runner.ops.workspaces.workspace_lease import WorkspaceEnv
from runner.ops.workspaces.workspaces import slot_key
from runner.ports.store import PoolRow


async def pool_of(env: WorkspaceEnv, config: WorkspaceConfig) -> PoolRow | None:
    """Return the pool that an agent type asks for, ``None`` for none.

    Raises ``NoPool`` when its provider keeps nothing warm, and as ``choose_provider`` does.
    """
    size = env.settings.warm_pool_size if config.provider is None else 0
    if config.warm_pool is not None:
        size = config.warm_pool.size
    if not config.enabled or not size:
        return None
    chosen = await choose_provider(env, config.provider, config.base_image, adopting=False)
    limits, _ = limits_of(env.settings, chosen.probe, limits_in(config.resource_limits))
    key = slot_key(chosen, limits)
    if key is not None:
        return PoolRow(name_of(key), key, size)
    if config.warm_pool is not None:
        message = f"`{chosen.provider.name}` cannot keep {size} workspaces warm"
        raise NoPool(message, hint="leave `warm_pool` out, or name another provider")
    return None


class AgentTypePools:
    """Keeps the pools of the agent types from the first that asks for one, unless another process keeps pools."""

    def __init__(self, env: WorkspaceEnv, agent_types: AgentTypes, nursery: trio.Nursery) -> None:
        self._env, self._agent_types, self._nursery = env, agent_types, nursery
        self._kept = False
        self._turn = trio.Lock()

    async def refresh(self) -> None:
        """Keep what agent types ask for by now. What cannot be kept is told, and made when it is needed."""
        async with self._turn:
            found: dict[str, PoolRow] = {}
            try:
                agent_types = await self._agent_types.all()
            except Rejected as rejected:  # somebody edits their folder
                for fault in rejected.findings:
                    self._env.advise(fault)
                return
            for agent_type in agent_types:
                try:
                    pool = await pool_of(self._env, agent_type.workspace)
                except RunnerError as error:
                    self._env.advise(NoPool(f"agent type `{agent_type.name}`: {error.message}", hint=error.hint))
                    continue
                if pool is not None:
                    found[pool.name] = max(found.get(pool.name, pool), pool, key=lambda row: row.size)
            pools = [found[name] for name in sorted(found)]
            if self._kept:
                others = [pool for pool in await self._env.store.pools() if pool.name not in found]
                await self._env.store.put_pools([*pools, *(replace(pool, size=0) for pool in others)])
            elif pools:
                try:
                    await self._nursery.start(self._keep, pools)
                except PoolKept as error:  # there they are kept, or not, and here is nothing to do
                    self._env.advise(error)

    async def _keep(self, pools: list[PoolRow], *, task_status: trio.TaskStatus[None]) -> None:
        async with open_pool(self._env, pools, self._env.advise):
            self._kept = True
            task_status.started()
            await trio.sleep_forever()
