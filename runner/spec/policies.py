"""Policies of a run, composed with the one of its repository."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runner.core.errors import NetworkForbidden, ProviderForbidden, RunnerError
from runner.core.hosts import NetworkSpec
from runner.core.model import IsolationClass
from runner.manifest.kinds.policy import Spec as PolicyKindSpec
from runner.manifest.load import Document
from runner.manifest.network import STEPS, TOOLS, HostList, hosts_of, networks_of
from runner.spec.model import PolicyFile, PolicySpec, RunFacts
from runner.spec.repository import OwnPolicy, dropped, read_own, with_own
from runner.spec.select import Selected


def policies_of(
    documents: Sequence[Document],
    file: PolicyFile | None,
    *,
    untrusted: bool,
    sets: Mapping[str, NetworkSpec] | None = None,
) -> tuple[tuple[PolicySpec, ...], OwnPolicy | None, list[RunnerError]]:
    """Compose policies with the repository's own, if any, and return that one too."""
    policies = tuple(policy_spec(document, sets or {}) for document in documents)
    if file is None:
        return policies, None, []
    own, found = read_own(file)
    if own is None:
        return policies, None, found
    policies, more = with_own(policies, own, untrusted=untrusted)
    return policies, own, found + more


def network_sets(selected: Selected, found: RunFacts, *, ceiling: bool = False) -> dict[str, NetworkSpec]:
    """Return the hosts of each name that networks use.

    For a ``ceiling`` a tool has those of this host's own configuration, so that a repository does not raise it.
    """
    tools = dict(found.networks)
    if ceiling:
        own = {tool: tuple(rule for rule in one.rules if rule.private) for tool, one in tools.items()}
        tools = {tool: NetworkSpec(rules) for tool, rules in own.items()}
    teams = {}
    for document in selected.network_sets:
        assert isinstance(document.spec, HostList)
        teams[document.name] = hosts_of(document, document.spec, sets=tools)
    return {**teams, **tools}


def policy_spec(document: Document, sets: Mapping[str, NetworkSpec]) -> PolicySpec:
    """Return a document's ceilings; its network has the hosts of ``sets``."""
    spec = document.spec
    assert isinstance(spec, PolicyKindSpec)
    network = spec.network
    return PolicySpec(
        name=document.name,
        origin=document.origin(),
        allowed_paths=tuple(spec.allowed_paths),
        forbidden_patterns=tuple(spec.forbidden_patterns),
        max_file_size=spec.max_file_size,
        providers=tuple(spec.providers) if spec.providers is not None else None,
        min_isolation=IsolationClass(spec.min_isolation),
        secrets=tuple(spec.secrets) if spec.secrets is not None else None,
        mcp_servers=tuple(spec.mcp_servers) if spec.mcp_servers is not None else None,
        network=networks_of(document, network, "network", whole=STEPS, sets=sets) if network is not None else None,
    )


def provider_faults(selected: Selected, providers: Sequence[str], policies: Sequence[PolicySpec]) -> list[RunnerError]:
    findings: list[RunnerError] = []
    for spec in policies:
        if spec.providers is None:
            continue
        for provider in providers:
            if provider not in spec.providers:
                findings.append(
                    ProviderForbidden(
                        f"policy `{spec.name}` does not allow provider `{provider}`",
                        at=selected.agent_type.place("workspace", "providers"),
                        hint=f"allowed: {', '.join(spec.providers)}   {spec.origin}",
                    )
                )
    return findings


def network_faults(
    selected: Selected, wanted: Mapping[str, NetworkSpec], policies: Sequence[PolicySpec], *, untrusted: bool, may: bool
) -> list[RunnerError]:
    """List what an agent type may reach beyond each policy.

    A stranger's may (``may``) reach what this host's own policy names, and no tool of this host is asked for it.
    """
    at = selected.agent_type.place("workspace", "network")
    if not may and any(wanted.values()):
        return [NetworkForbidden("manifests of a fork get no network", at=at, hint="write `network: none`")]
    if untrusted and selected.tools:
        message = f"no tool of this host is asked for the hosts of `{selected.tools[0]}` for manifests of a fork"
        return [NetworkForbidden(message, at=at, hint="name the hosts")]
    found: dict[object, RunnerError] = {}  # one for each line, which may be for several steps
    for policy in policies:
        for step, network in wanted.items():
            ceiling = policy.network[step] if policy.network is not None else None
            if ceiling is None:
                continue
            beyond = [one for one in network.excess(ceiling) if one not in TOOLS]  # whose hosts nobody asked for
            if not beyond:
                continue
            at = selected.agent_type.place("workspace", "network", step)
            found[policy.name, at] = NetworkForbidden(
                f"policy `{policy.name}` does not allow network {', '.join(beyond)}",
                at=at,
                hint=f"allowed: {ceiling}   {ceiling.origin}",
            )
    return [*found.values()]


def dropped_defaults(selected: Selected, defaults: Mapping[str, Document]) -> list[RunnerError]:
    """Policies whose list of forbidden patterns replaces the built-in one and leaves some of it out."""
    built_in = selected.policy(defaults["Policy"]).forbidden_patterns
    findings: list[RunnerError] = []
    for document in selected.policies:
        gone = [p for p in built_in if p not in selected.policy(document).forbidden_patterns]
        if gone and document.wrote("forbidden_patterns"):
            findings.append(dropped(gone, at=document.place("forbidden_patterns")))
    return findings
