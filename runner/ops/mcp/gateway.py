"""A gateway to the servers of a manifest or a folder, for one client without runs: it lives as long as the client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import trio
from msgspec.structs import replace

from runner.core.codec import digest
from runner.core.nurseries import open_services
from runner.mcp.gateway import Gateway
from runner.ops.mcp import records
from runner.ops.mcp.hosting import HOST, LOOK_SECONDS, HostedServer
from runner.ops.mcp.manifests import HostedSpec, read_servers
from runner.ops.workspaces import workspaces as ws
from runner.ops.workspaces.create_checks import ChosenProvider
from runner.ops.workspaces.workspace_lease import HeldWorkspace, WorkspaceEnv
from runner.ops.workspaces.workspaces import WorkspaceOptions


async def serve_gateway(
    env: WorkspaceEnv,
    path: Path,
    read: Callable[[], Awaitable[bytes]],
    write: Callable[[bytes], Awaitable[None]],
    *,
    stopping: trio.CancelScope,
) -> None:
    """Host the servers for a client, until it closes its end or ``stopping`` is cancelled; nothing of them stays.

    Raises ``Rejected`` with everything that is wrong with the manifests.
    """
    specs = await read_servers(path, env.settings, registered=False)
    servers = {name: _OwnServer(env, _for_folder(spec)) for name, spec in specs.items()}
    names = {server.spec.name for server in servers.values()}  # which tell folders apart
    await records.take_over(env.store, records.home_of(env.settings), lambda one: one.name in names)
    scopes = [trio.CancelScope() for _ in servers]
    async with open_services() as services:
        services.start_soon(_look, env, servers)
        async with trio.open_nursery() as nursery:
            for server, scope in zip(servers.values(), scopes, strict=True):
                nursery.start_soon(server.run, scope)
            with stopping:
                await Gateway({name: server.bridge for name, server in servers.items()}).talk(read, write)
            for scope in scopes:
                scope.cancel()  # each has its grace then


def _for_folder(spec: HostedSpec) -> HostedSpec:
    """Return a server under the name that its approval has: servers of other folders may be called like it."""
    return replace(spec, name=f"{spec.name}@{digest(spec.folder).partition(':')[2][:12]}")


async def _look(env: WorkspaceEnv, servers: Mapping[str, HostedServer]) -> None:
    """Do what people ask for meanwhile, as a host does."""
    home = records.home_of(env.settings)
    while True:
        await trio.sleep(LOOK_SECONDS)
        known = {one.name: one for one in await records.list_hosted(env.store, home)}
        for server in servers.values():
            if (record := known.get(server.spec.name)) is not None:
                await server.look(record)


class _OwnServer(HostedServer):
    """A server of this process alone: its workspace is new, held from its beginning, and removed at the end."""

    async def _workspace(self, chosen: ChosenProvider) -> AbstractAsyncContextManager[HeldWorkspace]:
        await trio.lowlevel.checkpoint()
        return self._own(chosen)

    @asynccontextmanager
    async def _own(self, chosen: ChosenProvider) -> AsyncIterator[HeldWorkspace]:
        options = WorkspaceOptions(image=self.spec.image, limits=self.spec.limits, mcp_server=self.spec.name)
        async with ws.creating(self.env, options, chosen=chosen, command=HOST) as held:
            try:
                yield held
            finally:
                with trio.CancelScope(shield=True):
                    await ws.finish_destroy(held, discard=True, reason="its client has gone")
