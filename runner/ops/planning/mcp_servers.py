"""The places of the MCP servers of a run: the provider of each, its image, and what it sees of this host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from runner.core.errors import ProviderUnavailable, RunnerError, StalePlan
from runner.core.model import Feature, IsolationClass
from runner.core.settings import Settings
from runner.ops.planning.host_paths import lend_toolchains
from runner.ops.workspaces.create_checks import limits_of
from runner.spec.mcp import WantedServer
from runner.spec.model import McpFact, Missing, Wanted
from runner.steps.provision.run import enforceable

if TYPE_CHECKING:
    from runner.ports.provider import Probe


async def place_servers(
    wanted: Sequence[WantedServer], settings: Settings, probes: Mapping[str, Probe], pinned: Mapping[str, McpFact]
) -> tuple[dict[str, McpFact], list[Missing]]:
    """Return the place of each hosted server of a run, as ``pinned`` if it is, and why others have none."""
    found: dict[str, McpFact] = {}
    missing: list[Missing] = []
    for server in wanted:
        try:
            found[server.name] = await _place(server, settings, probes, pinned.get(server.name))
        except StalePlan:
            raise
        except RunnerError as error:
            missing.append(Missing(Wanted.MCP, error, server.name))
    return found, missing


async def _place(
    server: WantedServer, settings: Settings, probes: Mapping[str, Probe], pinned: McpFact | None
) -> McpFact:
    """Return the first provider that fits and isolates. Raises ``ProviderUnavailable``, and what images raise."""
    refused = []
    for name in server.providers if pinned is None else [pinned.provider]:
        probe = probes.get(name)
        why = "not available" if probe is None else _unfit(probe, server)
        if probe is not None and why is None:
            limits, _ = limits_of(settings, probe, server.limits)
            return McpFact(
                provider=name,
                isolation=probe.isolation,
                image=await _image(server, name, settings, pinned),
                lent=await lend_toolchains(server.toolchains, settings.variables, None),
                limits=limits,
                ends_whole=probe.ends_whole,
            )
        refused.append(f"`{name}`: {why}")
    if pinned is not None:
        raise StalePlan(f"MCP server `{server.name}` cannot run where it was planned: {refused[0]}", hint="plan again")
    message = f"no provider can run MCP server `{server.name}`: {'; '.join(refused)}"
    raise ProviderUnavailable(message, hint="name one as its `provider`; see `runner doctor`")


def _unfit(probe: Probe, server: WantedServer) -> str | None:
    image = server.image
    if not probe.available:
        return probe.reason or "not available"
    if probe.isolation is IsolationClass.NONE:
        return "it does not isolate what runs in its workspaces"
    if enforceable(server.limits, probe) != server.limits:
        return "it cannot enforce the limits that are asked for"
    if not probe.enforces(Feature.RELAY):
        return f"it relays no connections: {probe.missing[Feature.RELAY]}"
    if image is None:
        return "it makes workspaces from an image, and none is named" if probe.needs_image else None
    return None if probe.enforces(Feature.BASE_IMAGE) else f"it has no images: {probe.missing[Feature.BASE_IMAGE]}"


async def _image(server: WantedServer, name: str, settings: Settings, pinned: McpFact | None) -> str | None:
    from runner.ops.planning.facts import open_provider
    from runner.ports.provider import Images

    provider = open_provider(name, settings)
    if server.image is None or not isinstance(provider, Images):
        return None
    return await provider.image((pinned.image if pinned is not None else None) or server.image)
