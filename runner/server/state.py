"""State of a server, for each face that it has: opened with its store, and closed when nothing of it runs any more."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from runner.core.errors import RunnerError, WorkspaceState
from runner.core.nurseries import open_services
from runner.core.settings import Settings
from runner.ops.agent_type_store import AgentTypeFolder, StoredAgentTypes
from runner.ops.mcp.hosting import Hosting
from runner.ops.mcp.manifests import read_servers
from runner.ops.pool.agent_type_pools import AgentTypePools
from runner.ops.runs.dependencies import Advise
from runner.ops.sessions import Sessions
from runner.ops.webhooks import Hook
from runner.ops.workspaces.maintenance import complete_changes, reap_and_tell
from runner.ops.workspaces.tools import KeptWorkspaces
from runner.ops.workspaces.workspace_lease import WorkspaceEnv, open_workspace_env
from runner.server.metrics import Metrics
from runner.server.oidc import Issuer
from runner.server.page.oidc_login import OidcLogin
from runner.server.provider_health import ProviderHealth
from runner.server.route import Server
from runner.server.running import Running
from runner.server.webhooks import Webhooks

if TYPE_CHECKING:
    from runner.ops.runs.job_table import JobTable
    from runner.server.jobs import JobRuns

REAP_SECONDS = 60.0  # between looks for expired workspaces


@asynccontextmanager
async def open_server(
    settings: Settings,
    advise: Advise,
    *,
    manifests: Path | None,
    hooks: Mapping[str, Hook],
    hosts: frozenset[str],
    stopping: trio.Event,
    issuer: Issuer | None = None,
    login: OidcLogin | None = None,
    hosting: bool = False,
    mcp_servers: Path | None = None,
    agent_types: Path | None = None,
    jobs: bool = False,
) -> AsyncIterator[Server]:
    """Open what routes work with; with ``jobs`` runs are Jobs of the cluster that the settings name.

    At the end runs of this process are ended in order, and workspaces are closed.
    """
    hosted = await read_servers(mcp_servers, settings) if hosting else {}
    async with open_workspace_env(settings, advise) as env, _jobs(settings, jobs) as table, open_services() as services:
        metrics, kept = Metrics(), KeptWorkspaces(env, services)
        sessions = Sessions(env, kept, services)
        types = StoredAgentTypes(env.store) if agent_types is None else AgentTypeFolder(agent_types)
        await types.all()  # or the server does not start
        await _recover(env)
        pools, health = AgentTypePools(env, types, services), ProviderHealth(settings)
        services.start_soon(_maintain, env, sessions)
        services.start_soon(pools.refresh)
        services.start_soon(health.run)
        runs = _runs_of(table, env, metrics)
        if runs is not None:
            services.start_soon(runs.keep)
        server = Server(
            env=env,
            kept=kept,
            sessions=sessions,
            pools=pools,
            running=Running(env, services, ended=metrics.ended, jobs=runs),
            health=health,
            agent_types=types,
            manifests=manifests,
            metrics=metrics,
            hosts=hosts,
            issuer=issuer,
            login=login,
            stopping=stopping,
            webhooks=Webhooks(hooks),
        )
        server.webhooks.start(server, services)
        if hosting:
            server.hosting = Hosting(env, mcp_servers, hosted)
            services.start_soon(server.hosting.run)
        yield server


@asynccontextmanager
async def _jobs(settings: Settings, wanted: bool) -> AsyncIterator[JobTable | None]:
    if not wanted:
        yield None
        return
    from runner.ops.runs.job_table import open_jobs

    async with open_jobs(settings) as table:
        yield table


def _runs_of(table: JobTable | None, env: WorkspaceEnv, metrics: Metrics) -> JobRuns | None:
    if table is None:
        return None
    from runner.server.jobs import JobRuns

    return JobRuns(env, table, metrics.ended)


async def _recover(env: WorkspaceEnv) -> None:
    """Complete what dead processes have left half done, so that sessions find their places free."""
    for change in await complete_changes(env, dry_run=False):
        if change.left is not None:
            env.advise(WorkspaceState(f"workspace `{change.workspace}` {change.done}: {change.left}"))


async def _maintain(env: WorkspaceEnv, sessions: Sessions) -> None:
    """Remove expired workspaces and provision abandoned sessions for as long as the server runs."""
    while True:
        try:
            await sessions.recover()
            await reap_and_tell(env)
        except RunnerError as error:  # the next look may succeed
            env.advise(error)
        await trio.sleep(REAP_SECONDS)
