"""Hosted servers as manifests describe them, read whole before any of them is started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from runner.core.codec import digest
from runner.core.errors import DuplicateName, NothingToRun, Rejected, RunnerError, UnreadableManifest
from runner.core.hosts import NetworkSpec
from runner.core.model import Limits
from runner.core.sanitize import excerpt
from runner.core.settings import Settings
from runner.manifest.kinds.mcp_server import Spec
from runner.manifest.load import Document, load
from runner.manifest.network import TOOLS, HostList, hosts_of
from runner.mcp.bridge import BridgeOptions
from runner.ops.mcp.registrations import FOLDER, load_registered
from runner.ops.planning.network_sets import Look, find_network_sets
from runner.spec.document_faults import document_faults
from runner.spec.mcp import asked_limits, passed_by, server_secrets
from runner.spec.model import SecretSpec

STEP = "mcp"  # what events of the network name in place of a step


class HostedSpec(Struct, frozen=True, kw_only=True):
    """A server to host. ``digest`` is that of all that its manifest says, which is in ``folder``.

    Without a ``command`` its image has one.
    """

    name: str
    folder: str
    digest: str
    command: tuple[str, ...]
    image: str | None
    provider: str | None
    toolchains: tuple[str, ...]
    env: dict[str, str]
    secrets: tuple[SecretSpec, ...]
    network: NetworkSpec
    limits: Limits
    restart: str
    bridge: BridgeOptions
    health_interval: float
    health_timeout: float


async def read_servers(path: Path | None, settings: Settings, *, registered: bool = True) -> dict[str, HostedSpec]:
    """Return the servers of a manifest or folder by name, and those that are ``registered`` if wanted.

    Raises ``Rejected`` with everything that is wrong.
    """
    documents, servers, found = _load(path) if path is not None else ([], [], [])
    more, wrong = load_registered(settings.home) if registered else ([], [])
    names = {one.name for one in servers}
    for document in (one for one in more if one.name in names):
        text = f"a server `{document.name}` is registered already"
        found.append(DuplicateName(text, hint=f"runner mcp deregister {document.name}"))
    for document in (*documents, *more):
        wrong += document_faults(document)
    found += wrong
    if any(error.severity == "error" for error in found):
        raise Rejected(found)
    sets = await _network_sets([*servers, *more], documents, settings)
    both = ((folder_of(path), servers), (str(settings.home / FOLDER), more))
    return {one.name: _server(one, sets, folder) for folder, many in both for one in many}


def require_servers(path: Path) -> None:
    """Raise ``Rejected`` with everything that is wrong with the servers of a manifest or folder."""
    documents, _, found = _load(path)
    for document in documents:
        found += document_faults(document)
    if any(error.severity == "error" for error in found):
        raise Rejected(found)


def _load(path: Path) -> tuple[list[Document], list[Document], list[RunnerError]]:
    """Return the documents of a path, the servers among them, and what is wrong."""
    documents, found = load(path)
    servers = [document for document in documents if document.kind == "McpServer"]
    hint = "name a file or a folder with a document of kind `McpServer`"
    if not servers and not found:
        found.append(NothingToRun(f"`{excerpt(str(path))}` has no server to host", hint=hint))
    for error in found:
        if isinstance(error, UnreadableManifest) and error.hint is None:
            error.hint = hint
    return documents, servers, found


def folder_of(path: Path | None) -> str:
    """Return what says of a server that its manifest is in ``path``."""
    return "" if path is None else os.path.abspath(path)


async def _network_sets(
    servers: Sequence[Document], documents: Sequence[Document], settings: Settings
) -> dict[str, NetworkSpec]:
    """Return the hosts of each name that the networks of servers use."""
    teams = {one.name: one.spec for one in documents if one.kind == "NetworkSet"}
    names = _hosts([getattr(one.spec, "network", None) for one in servers])
    used = names | _hosts([teams[name] for name in names & {*teams}])

    async def read(name: str) -> bytes | None:
        return None  # there is no repository

    look = Look(variables=settings.variables, read=read, source=None)
    tools = await find_network_sets(sorted(used & {*TOOLS}), look)
    found = {
        one.name: hosts_of(one, one.spec, sets=tools)
        for one in documents
        if isinstance(one.spec, HostList) and one.name in used
    }
    return {**found, **tools}


def _hosts(networks: Sequence[object]) -> set[str]:
    lists = [network.allow for network in networks if isinstance(network, HostList)]
    return {one for allow in lists for one in allow if isinstance(one, str)}


def _server(document: Document, sets: dict[str, NetworkSpec], folder: str) -> HostedSpec:
    spec = document.spec
    assert isinstance(spec, Spec)
    return HostedSpec(
        name=document.name,
        folder=folder,
        digest=digest(document.data),
        command=tuple(spec.command),
        image=spec.image,
        provider=spec.provider,
        toolchains=tuple(spec.toolchains),
        env=spec.env,
        secrets=tuple(server_secrets(document)),
        network=hosts_of(document, spec.network, "network", sets=sets),
        limits=asked_limits(spec),
        restart=spec.restart,
        bridge=BridgeOptions(
            timeout=spec.stdio_bridge.timeout,
            passed=frozenset(passed_by(spec)),
            tools=None if spec.tools is None else tuple(spec.tools),
        ),
        health_interval=spec.health.interval,
        health_timeout=spec.health.timeout,
    )
