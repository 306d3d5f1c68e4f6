"""Demands of a run on its provider: limits, network, protected paths, warm pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from runner.core.codec import digest
from runner.core.errors import Place
from runner.core.hosts import NetworkSpec
from runner.core.model import Feature, Limits
from runner.core.settings import Settings
from runner.policy.protected import unite
from runner.spec.cluster import cluster_demands
from runner.spec.model import Demand, PolicySpec, Warm
from runner.spec.secrets import secret_demands
from runner.spec.select import Selected


def protected_paths_of(selected: Selected) -> dict[str, str]:
    """The project's and the agent type's together, since both hold; each with the manifest line that asks for it."""
    if selected.shares_project:
        return {}
    project, types = selected.project_spec, selected.agent_type
    lines: dict[str, str] = {}
    if selected.project and project:
        lines |= dict.fromkeys(project.protected_paths, selected.project.origin("protected_paths"))
    lines |= dict.fromkeys(selected.agent.workspace.protected_paths, types.origin("workspace", "protected_paths"))
    return {path: lines[path] for path in unite(lines)}


def limits_of(selected: Selected, settings: Settings) -> Limits:
    written = selected.agent.workspace.resource_limits
    return Limits(
        written.cpu if written.cpu is not None else settings.default_cpus,
        written.memory if written.memory is not None else settings.default_memory,
        written.disk if written.disk is not None else settings.default_disk,
        written.pids,
    )


_LIMIT_KEYS = {"cpu": Feature.CPU, "memory": Feature.MEMORY, "disk": Feature.DISK, "pids": Feature.PIDS}


def warm_of(
    selected: Selected,
    settings: Settings,
    policies: Sequence[PolicySpec],
    toolchains: tuple[str, ...],
    networks: Mapping[str, NetworkSpec],
) -> Warm:
    workspace = selected.agent.workspace
    judged = [(*policy.ceilings, policy.providers, policy.min_isolation) for policy in policies]
    return Warm(
        size=_warm_size(selected, settings),
        network="; ".join(dict.fromkeys(str(network) for network in networks.values() if network)) or "none",
        toolchains=toolchains,
        policy=digest([workspace.isolation, judged])[7:19],
    )


def _warm_size(selected: Selected, settings: Settings) -> int:
    """The agent type's own, or the server's, which is for those that take the server's providers."""
    if (pool := selected.agent.workspace.warm_pool) is not None:
        return pool.size
    return 0 if selected.agent_type.wrote("workspace", "providers") else settings.warm_pool_size


def demands_of(
    selected: Selected, settings: Settings, networks: Mapping[str, NetworkSpec], *, added_at: Place | None = None
) -> tuple[Demand, ...]:
    """Everything that some provider here might not be able to enforce.

    ``added_at`` is where the networks are written if not in the agent type.
    """
    types, agent, workspace = selected.agent_type, selected.agent, selected.agent.workspace
    limits = limits_of(selected, settings)
    words = {
        "cpu": f"{limits.cpus:g} CPU",
        "memory": f"memory {size_words(limits.memory_bytes)}",
        "disk": f"disk {size_words(limits.disk_bytes)}",
        "pids": f"{limits.pids} pids",
    }
    demands = [
        Demand(
            feature,
            words[key],
            types.place("workspace", "resource_limits", key),
            types.wrote("workspace", "resource_limits", key),
        )
        for key, feature in _LIMIT_KEYS.items()
    ]
    at, written = types.place("workspace", "network"), types.wrote("workspace", "network")
    reached = {
        str(network): added_at or types.place("workspace", "network", step)
        for step, network in networks.items()
        if network
    }
    for hosts, place in (reached or {"none": at}).items():
        demands.append(Demand(Feature.NETWORK_NONE, f"network {hosts}", place, bool(reached) or written))
    demands += (Demand(Feature.RELAY, f"the way to network {hosts}", place, True) for hosts, place in reached.items())
    demands += secret_demands(selected)
    demands += cluster_demands(selected)
    if agent.model is not None and agent.credentials == "gateway":
        demands.append(Demand(Feature.RELAY, "the way to the model gateway", types.place("agent"), True))
    if size := _warm_size(selected, settings):
        at, written = types.place("workspace", "warm_pool"), workspace.warm_pool is not None
        demands.append(Demand(Feature.WARM_POOL, f"a warm pool of {size}", at, written))
    if selected.shares_project and selected.project is not None:
        at = selected.project.place("workspace_isolation")
        demands.append(Demand(Feature.SHARED_PROJECT, "one directory for all workspaces of the project", at, True))
    return (*demands, *_written_demands(selected))


def _written_demands(selected: Selected) -> Iterator[Demand]:
    """Demand what manifests list for the workspace, which not every provider can give it."""
    types, workspace = selected.agent_type, selected.agent.workspace
    of_project = selected.project if not workspace.protected_paths else None
    made = [", ".join(one.keep) for one in workspace.dependencies if not isinstance(one, str)]
    kept = [one if isinstance(one, str) else ", ".join(one.keep) for one in workspace.dependencies]
    image = [workspace.base_image.ref] if workspace.base_image else []
    for field, feature, values, words in (
        ("protected_paths", Feature.PROTECTED_PATHS, protected_paths_of(selected), "protected_paths"),
        ("toolchains", Feature.TOOLCHAINS, workspace.toolchains, "toolchains"),
        ("dependencies", Feature.DEPENDENCIES, kept, "dependencies"),
        ("dependencies", Feature.DEPENDENCY_COMMANDS, made, "commands that make dependencies"),
        ("base_image", Feature.BASE_IMAGE, image, "base image"),
    ):
        at = types.place("workspace", field)
        if of_project is not None and feature is Feature.PROTECTED_PATHS:
            at = of_project.place(field)
        if values:
            yield Demand(feature, f"{words} {', '.join(values)}", at, True)


def size_words(count: int | None) -> str:
    """``4G``, ``512M``: the largest unit that divides without a rest."""
    number, unit = count or 0, ""
    for larger in "KMGT":
        if number % 1024 or not number:
            break
        number, unit = number // 1024, larger
    return f"{number}{unit}"
