"""The MCP servers that an agent may use: each a program in a sandbox of its own, or a remote one.

What a hosted one has of secrets, network and limits is its own manifest's; nothing of it is the agent's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct
from msgspec.structs import replace

from runner.core.codec import digest
from runner.core.errors import (
    BadValue,
    IsolationTooWeak,
    McpServerForbidden,
    NetworkForbidden,
    Place,
    ProviderForbidden,
    RunnerError,
    SecretForbidden,
    Untrusted,
)
from runner.core.hosts import NetworkRule, NetworkSpec
from runner.core.injection import Injection
from runner.core.model import Limits
from runner.core.settings import Settings
from runner.manifest.injection import InjectedSecret, SentSecret
from runner.manifest.load import Document, defaults
from runner.manifest.network import AllowedHosts, hosts_of
from runner.manifest.used_mcp import UsedServer, used_servers
from runner.plan.model import SecretGrant
from runner.spec.model import HostedServer, McpFact, McpServer, PolicySpec, RemoteServer, RunFacts, SecretSpec
from runner.spec.secrets import source_of
from runner.spec.select import Selected

if TYPE_CHECKING:
    from runner.manifest.kinds.mcp_server import HostedSecret
    from runner.manifest.kinds.mcp_server import Spec as McpServerSpec

KEYS = "mcp_servers"
REMOTE_SECONDS = 60.0  # that a call of a remote server may take


class WantedServer(Struct, frozen=True, kw_only=True):
    """A hosted server whose place in this host's providers is to be found."""

    name: str
    providers: tuple[str, ...]
    image: str | None
    toolchains: tuple[str, ...]
    limits: Limits


def wanted_servers(selected: Selected, settings: Settings) -> tuple[WantedServer, ...]:
    """List the hosted servers that a run needs facts about."""
    shipped: Any = defaults()["AgentType"].data["spec"]
    chain = settings.providers or tuple(shipped["workspace"]["providers"])
    return tuple(
        WantedServer(
            name=document.name,
            providers=(spec.provider,) if spec.provider is not None else tuple(chain),
            image=spec.image,
            toolchains=tuple(spec.toolchains),
            limits=asked_limits(spec),
        )
        for document in selected.mcp_servers
        for spec in [_spec(document)]
    )


def asked_limits(spec: McpServerSpec) -> Limits:
    """Return the limits that a manifest asks for."""
    limits = spec.resource_limits
    return Limits(limits.cpu, limits.memory, limits.disk, limits.pids)


def passed_by(spec: McpServerSpec) -> tuple[str, ...]:
    """Return the capabilities of its clients that a server may use."""
    return tuple(one for one in ("sampling", "elicitation") if getattr(spec.stdio_bridge, one) == "pass")


def mcp_servers_of(selected: Selected, found: RunFacts, sets: Mapping[str, NetworkSpec]) -> tuple[McpServer, ...]:
    """Return the servers of a run, in manifest order."""
    hosted = {one.name: one for one in selected.mcp_servers}
    servers = []
    for at, used in enumerate(used_servers(selected.agent.mcp_servers)):
        server = McpServer(
            name=used.name,
            tools=tuple(used.tools) if used.tools is not None else None,
            only_tools=used.tools is not None,
            max_calls=used.max_calls,
            timeout=REMOTE_SECONDS,
            origin=selected.agent_type.origin(KEYS, at),
        )
        if used.url is not None:
            servers.append(replace(server, remote=_remote(selected, used, at)))
        elif used.command is not None:
            servers.append(replace(server, inside=tuple(used.command)))
        elif used.name in hosted:
            servers.append(_hosted(server, hosted[used.name], found.mcp.get(used.name), sets))
    return tuple(servers)


def _hosted(server: McpServer, document: Document, fact: McpFact | None, sets: Mapping[str, NetworkSpec]) -> McpServer:
    spec, fact = _spec(document), fact or McpFact()
    given = tuple(
        SecretGrant(f"{server.name}.{one.name}", one.as_ == "file", document.origin("secrets", at))
        for at, one in enumerate(spec.secrets)
    )
    injected = (one.injection for one in server_secrets(document, f"{server.name}."))
    allowed = [tools for tools in (server.tools, spec.tools) if tools is not None]
    definition = {"command": spec.command, "image": spec.image, "env": spec.env}
    return replace(
        server,
        tools=tuple(name for name in allowed[0] if all(name in other for other in allowed[1:])) if allowed else None,
        timeout=spec.stdio_bridge.timeout,
        passed=passed_by(spec),
        hosted=HostedServer(
            manifest=document.origin(),
            key=f"{server.name}@{digest(definition).partition(':')[2][:12]}",
            command=tuple(spec.command),
            provider=fact.provider,
            base_image=spec.image,
            image=fact.image,
            toolchains=fact.lent.toolchains,
            env={**fact.lent.environment, **spec.env},
            network=hosts_of(document, spec.network, "network", sets=sets),
            limits=fact.limits or asked_limits(spec),
            limits_origin=document.origin("resource_limits"),
            ends_whole=fact.ends_whole,
            secrets=given,
            injected=tuple(filter(None, injected)),
            restart=spec.restart,
            health_interval=spec.health.interval,
            health_timeout=spec.health.timeout,
        ),
    )


def _remote(selected: Selected, used: UsedServer, at: int) -> RemoteServer:
    url = used.url or ""
    host, port = used.place
    origin = selected.agent_type.origin(KEYS, at, "url")
    sent = _sent(selected, used, at)
    rule = NetworkRule(host, port, private=bool(used.private), origin=origin)
    return RemoteServer(
        url=url,
        key=f"{used.name}@{digest(url).partition(':')[2][:12]}",
        network=NetworkSpec((rule,), origin=origin),
        injection=replace(sent, secret=f"{used.name}.{sent.secret}") if sent is not None else None,
    )


def _sent(selected: Selected, used: UsedServer, at: int) -> Injection | None:
    """Return what is added to requests to a remote server."""
    line = selected.agent_type.origin(KEYS, at, "inject")
    return used.inject.injection_for(*used.place, line) if used.inject is not None else None


def mcp_secrets(selected: Selected) -> Iterator[SecretSpec]:
    """Yield where the secrets of servers come from."""
    for document in selected.mcp_servers:
        yield from server_secrets(document, f"{document.name}.")
    for at, used in enumerate(used_servers(selected.agent.mcp_servers)):
        if used.inject is not None:
            yield _secret(
                used.inject, selected.agent_type, (KEYS, at, "inject"), f"{used.name}.", _sent(selected, used, at)
            )


def server_secrets(document: Document, prefix: str = "") -> Iterator[SecretSpec]:
    """Yield where the secrets of a hosted server come from, which no step's commands get."""
    spec = _spec(document)
    for at, one in enumerate(spec.secrets):
        yield _secret(one, document, ("secrets", at), prefix)
    for at, injected in enumerate(_inject(spec)):
        keys = ("network", "inject", at)
        yield _secret(injected, document, keys, prefix, injected.injection(document.origin(*keys)))


def _secret(
    one: HostedSecret | SentSecret,
    document: Document,
    keys: tuple[str | int, ...],
    prefix: str,
    injection: Injection | None = None,
) -> SecretSpec:
    name = f"{prefix}{one.name}"
    return SecretSpec(
        name=name,
        source=source_of(one.from_, document),
        steps=(),
        as_file=not isinstance(one, SentSecret) and one.as_ == "file",
        at=document.place(*keys, "from"),
        injection=replace(injection, secret=name) if injection is not None else None,
    )


def mcp_faults(
    selected: Selected, servers: Sequence[McpServer], found: RunFacts, policies: Sequence[PolicySpec]
) -> Iterator[RunnerError]:
    """List what is wrong with the servers of a run, and what policies forbid of them."""
    documents = {one.name: one for one in selected.mcp_servers}
    used = used_servers(selected.agent.mcp_servers)
    positions = {one.name: at for at, one in enumerate(used)}
    for server in servers:
        at = selected.agent_type.place(KEYS, positions[server.name])
        document = documents.get(server.name) if server.hosted is not None else None
        if document is not None:
            yield from _tool_faults(selected, used[positions[server.name]], document)
        for policy in policies:
            if policy.mcp_servers is not None and server.name not in policy.mcp_servers:
                hint = f"allowed: {', '.join(policy.mcp_servers) or 'none'}   {policy.origin}"
                message = f"policy `{policy.name}` does not allow MCP server `{server.name}`"
                yield McpServerForbidden(message, at=at, hint=hint)
            yield from _ceilings(server, document, at, found, policy)


def _tool_faults(selected: Selected, used: UsedServer, document: Document) -> Iterator[RunnerError]:
    allowed = _spec(document).tools
    at = used_servers(selected.agent.mcp_servers).index(used)
    for position, tool in enumerate(used.tools or ()):
        if allowed is not None and tool not in allowed:
            place = selected.agent_type.place(KEYS, at, "tools", position)
            hint = f"allowed: {', '.join(allowed) or 'none'}   {document.origin('tools')}"
            yield BadValue(f"`{used.name}` lets nobody call `{tool}`", at=place, hint=hint)


def _ceilings(
    server: McpServer, document: Document | None, at: Place, found: RunFacts, policy: PolicySpec
) -> Iterator[RunnerError]:
    """List what a policy forbids of the place, the secrets and the hosts of a server: it works for the agent."""
    network = server.network
    ceiling = policy.network["agent"] if policy.network is not None else None
    if ceiling is not None and (beyond := network.excess(ceiling)):
        place = document.place("network") if document is not None else at
        message = f"policy `{policy.name}` does not allow network {', '.join(beyond)}"
        yield NetworkForbidden(message, at=place, hint=f"allowed: {ceiling}   {ceiling.origin}")
    for name in server.secret_names:
        own = name.partition(".")[2]
        if policy.secrets is not None and own not in policy.secrets:
            hint = f"allowed: {', '.join(policy.secrets) or 'none'}   {policy.origin}"
            message = f"policy `{policy.name}` does not allow secret `{own}`"
            yield SecretForbidden(message, at=document.place() if document is not None else at, hint=hint)
    if server.hosted is None or document is None or not server.hosted.provider:
        return
    provider = server.hosted.provider
    if policy.providers is not None and provider not in policy.providers:
        message = f"policy `{policy.name}` does not allow provider `{provider}`"
        hint = f"allowed: {', '.join(policy.providers)}   {policy.origin}"
        yield ProviderForbidden(message, at=document.place("provider"), hint=hint)
    fact = found.mcp.get(server.name)
    if fact is not None and fact.isolation is not None and fact.isolation < policy.min_isolation:
        message = f"`{provider}` gives isolation `{fact.isolation.value}`, and policy `{policy.name}` asks for more"
        yield IsolationTooWeak(message, at=document.place("provider"), hint=policy.origin)


def untrusted_mcp(selected: Selected, *, named: Sequence[str]) -> Iterator[RunnerError]:
    """List the servers of a fork's manifests that the trusted side has not ``named``, and what none may have."""
    hint = "apply it without --untrusted, or name it in the `mcp_servers` of this host's own policy"
    for at, used in enumerate(used_servers(selected.agent.mcp_servers)):
        place = selected.agent_type.place(KEYS, at)
        if used.name not in named:
            yield Untrusted(f"an untrusted manifest may not use MCP server `{used.name}`", at=place, hint=hint)
        if used.inject is not None:
            place = selected.agent_type.place(KEYS, at, "inject")
            message = f"an untrusted manifest may not have secret `{used.inject.name}`"
            yield Untrusted(message, at=place, hint="apply it without --untrusted")
    for document in selected.mcp_servers:
        spec = _spec(document)
        for name in (*(one.name for one in spec.secrets), *(one.name for one in _inject(spec))):
            message = f"an untrusted manifest may not have secret `{name}`"
            yield Untrusted(message, at=document.place(), hint="apply it without --untrusted")
        if any(path.startswith("/") for path in spec.toolchains):
            message = "an untrusted manifest may not mount directories of the host"
            yield Untrusted(message, at=document.place("toolchains"), hint="apply it without --untrusted")


def _inject(spec: McpServerSpec) -> Sequence[InjectedSecret]:
    return spec.network.inject or () if isinstance(spec.network, AllowedHosts) else ()


def _spec(document: Document) -> McpServerSpec:
    return cast("McpServerSpec", document.spec)  # whose module is imported where there is such a document
