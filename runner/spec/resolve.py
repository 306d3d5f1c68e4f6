"""Documents, settings and Facts become specs; what cannot be resolved is collected as findings at its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from runner.core.errors import (
    BadValue,
    KeyInside,
    Place,
    ProtectedIgnored,
    RunnerError,
    Unenforceable,
    WorkspaceDisabled,
)
from runner.core.hosts import NetworkSpec
from runner.core.model import DEFAULT_PROJECT, Budget, Checkout, Feature, IsolationClass
from runner.core.plural import plural
from runner.core.settings import Settings
from runner.manifest.kinds.agent_type import Spec as AgentTypeSpec
from runner.manifest.kinds.incident_run import Spec as IncidentRunSpec
from runner.manifest.load import DEFAULTS
from runner.manifest.network import networks_of
from runner.spec.checkout import TaskContext
from runner.spec.cluster import cluster_faults, cluster_of
from runner.spec.demands import demands_of, limits_of, protected_paths_of, warm_of
from runner.spec.document_faults import document_faults, missing_faults, template_faults
from runner.spec.facts_request import FactsRequest, argv_of, facts_request
from runner.spec.incident import incident_advice
from runner.spec.mcp import mcp_faults, mcp_secrets, mcp_servers_of
from runner.spec.messages import message_faults, messages_of, webhook_of
from runner.spec.model import (
    CommandCheck,
    CommitFact,
    Demand,
    Facts,
    Lent,
    McpServer,
    ModelSpec,
    PolicySpec,
    ReportCheck,
    RunFacts,
    RunSpec,
    ScriptSpec,
    SetupSpec,
    SnapshotSpec,
    VerifySpec,
    Wanted,
)
from runner.spec.policies import network_faults, network_sets, policies_of, policy_spec, provider_faults
from runner.spec.preload import namespace_of, preload_faults
from runner.spec.repository import OwnPolicy, with_network
from runner.spec.secrets import secret_faults, secrets_of
from runner.spec.select import Selected

Outputs = Mapping[str, tuple[tuple[str, ...], bool]]


DEFAULT_MESSAGE = "{{ run.name }}: work of run {{ run.id }}"


def outputs_of(chosen: Sequence[Selected]) -> Outputs:
    return {s.group: (tuple(s.spec.outputs), s.spec.matrix is not None) for s in chosen}


def resolve(
    selected: Selected,
    settings: Settings,
    facts: Facts,
    outputs: Outputs,
    *,
    untrusted: bool = False,
    record_network: bool = False,
) -> tuple[RunSpec, list[RunnerError]]:
    """One run, complete. With errors among the findings the spec must not be compiled.

    ``outputs`` maps each run's document to its outputs' names, with whether it is a matrix. ``untrusted``
    documents come from a fork: they get no host mounts and no weaker provider, and policies only tighten. With
    ``record_network`` each step reaches every public host, as far as policies let it.
    """
    found = facts.of(selected.name)
    parts, findings = _parts_of(selected, settings, facts, untrusted=untrusted, record_network=record_network)
    spec = _spec_of(selected, settings, found, parts, untrusted=untrusted)
    known = {need: outputs[need] for need in selected.spec.needs if need in outputs}
    if found.lacks(Wanted.INCIDENT) is None:
        findings += template_faults(selected, spec, found.incident, known)
    return spec, findings


class _Parts(Struct, frozen=True, kw_only=True):
    """Facts and faults that a run has beside its documents."""

    needs: FactsRequest
    checkout: Checkout | None
    branch: str
    policies: tuple[PolicySpec, ...]
    own: OwnPolicy | None
    networks: Mapping[str, NetworkSpec]
    demands: tuple[Demand, ...]
    servers: tuple[McpServer, ...]


def _parts_of(
    selected: Selected, settings: Settings, facts: Facts, *, untrusted: bool, record_network: bool
) -> tuple[_Parts, list[RunnerError]]:
    needs, _ = facts_request(selected, settings, untrusted=untrusted)
    found = facts.of(selected.name)
    checkout, branch = _pinned(needs.checkout, found.commit)
    policies, own, faults = policies_of(
        selected.policies, found.policy, untrusted=untrusted, sets=network_sets(selected, found, ceiling=True)
    )
    held_to = None if selected.host_policy is None else policy_spec(selected.host_policy, {})
    policies += () if held_to is None else (held_to,)
    findings = [*_faults(selected, found), *faults, *_policy_faults(selected, needs, facts, policies)]
    may = not untrusted or (held_to is not None and held_to.network is not None)
    networks, added_at, refused = _networks(
        selected, found, own, policies, untrusted=untrusted, may=may, record_network=record_network
    )
    servers = mcp_servers_of(selected, found, network_sets(selected, found))
    findings += (*refused, *message_faults(selected, untrusted=untrusted))
    findings += mcp_faults(selected, servers, found, policies)
    parts = _Parts(
        needs=needs,
        checkout=checkout,
        branch=branch,
        policies=policies,
        own=own,
        networks=networks,
        demands=demands_of(selected, settings, networks, added_at=added_at),
        servers=servers,
    )
    return parts, findings


def _spec_of(selected: Selected, settings: Settings, found: RunFacts, parts: _Parts, *, untrusted: bool) -> RunSpec:
    run, agent, needs, policies = selected.spec, selected.agent, parts.needs, parts.policies
    lent, (messages, secrets) = found.lent or Lent(needs.toolchains), messages_of(selected)
    return RunSpec(
        name=selected.name,
        origin=selected.run.origin(),
        agent=agent.agent,
        script=_script(agent, needs.script),
        model=_model(selected),
        system=agent.prompt.system,
        prompt=run.prompt,
        user=agent.prompt.user,
        env=dict(agent.env),
        task=TaskContext(**dict(run.task)) if run.task else TaskContext(),
        incident=needs.incident,
        checkout=parts.checkout,
        branch=parts.branch,
        providers=needs.providers,
        providers_at=selected.agent_type.place("workspace", "providers"),
        base_image=needs.base_image,
        pull=needs.pull,
        isolation=_isolation(agent, policies, untrusted=untrusted),
        limits=limits_of(selected, settings),
        warm=warm_of(selected, settings, policies, lent.toolchains, parts.networks),
        demands=parts.demands,
        networks=parts.networks,
        best_effort=agent.workspace.resource_limits.enforcement == "best_effort",
        setup=_setup(agent),
        project=selected.project.name if selected.project else DEFAULT_PROJECT,
        shared=selected.shares_project,
        unprotected=_unprotected(selected),
        protected=protected_paths_of(selected),
        lent=lent,
        dependencies=needs.dependency_commands,
        untrusted=untrusted,
        post_hooks=tuple(argv_of(c) for c in (*agent.post_hooks, *run.post_hooks)),
        policies=policies,
        verify=_verify(run),
        message=run.snapshot.message if run.snapshot and run.snapshot.message else DEFAULT_MESSAGE,
        snapshot=SnapshotSpec(run.snapshot.branch, not run.snapshot.allow_empty) if run.snapshot else None,
        timeouts=dict(agent.timeouts),
        deadline_seconds=run.timeout,
        stop_budget_seconds=agent.stop_budget,
        origins=_origins(selected, parts.own) | {demand.feature.value: demand.origin for demand in parts.demands},
        needs=selected.needs,
        group=selected.group,
        max_parallel=run.matrix.max_parallel if run.matrix else None,
        outputs={output: found.file for output, found in run.outputs.items()},
        secrets=(*secrets_of(selected), *secrets, *mcp_secrets(selected)),
        mcp_servers=parts.servers,
        webhook=webhook_of(selected),
        messages=messages,
        skills=tuple(agent.skills),
        queue=selected.queue,
        debug=run.debug,
        member=selected.name if run.matrix and (run.matrix.agent_type or run.matrix.model) else "",
        cluster=cluster_of(selected, needs.cluster, found.cluster),
        preload=tuple(run.context.preload),
        namespace=namespace_of(selected, found.incident),
    )


def _isolation(agent: AgentTypeSpec, policies: Sequence[PolicySpec], *, untrusted: bool) -> IsolationClass:
    least = IsolationClass.NAMESPACES if untrusted else IsolationClass.NONE
    return max(IsolationClass(agent.workspace.isolation), *(p.min_isolation for p in policies), least)


def _setup(agent: AgentTypeSpec) -> SetupSpec:
    workspace = agent.workspace
    commands = tuple(argv_of(c) for c in workspace.setup_commands)
    return SetupSpec(commands, workspace.setup.timeout, workspace.setup.on_failure == "warn")


def _networks(
    selected: Selected,
    found: RunFacts,
    own: OwnPolicy | None,
    policies: Sequence[PolicySpec],
    *,
    untrusted: bool,
    may: bool,
    record_network: bool,
) -> tuple[Mapping[str, NetworkSpec], Place | None, list[RunnerError]]:
    """The network of each step, where the repository's policy added to them, and what policies do not let be."""
    types, sets = selected.agent_type, network_sets(selected, found)
    networks = networks_of(types, selected.agent.workspace.network, "workspace", "network", sets=sets)
    if record_network:
        networks = {  # with what private hosts and mirrors each step names
            step: replace(one, open=True, origin="--record-network") for step, one in networks.items()
        }
    findings = network_faults(selected, networks, policies, untrusted=untrusted, may=may)
    why_not = "manifests of a fork get no network" if untrusted else ""
    if record_network or types.wrote("workspace", "network"):
        why_not = f"`{types.name}` says what its workspaces reach"
    networks, added_at, ignored = with_network(networks, own, policies, why_not=why_not)
    return networks, added_at, [*findings, *ignored]


def _unprotected(selected: Selected) -> tuple[str, ...]:
    project = selected.project_spec
    return tuple(project.protected_paths) if project and selected.shares_project else ()


def _faults(selected: Selected, found: RunFacts) -> Iterator[RunnerError]:
    """List the faults that no policy decides."""
    if not selected.agent.workspace.enabled:
        yield WorkspaceDisabled(
            f"`{selected.agent_type.name}` has no workspace, so nothing can run in it",
            at=selected.run.place("agent_type"),
            hint="set workspace.enabled: true in the agent type",
        )
    if selected.spec.debug and selected.agent.agent == "script":
        yield BadValue(
            f"the agent of `{selected.agent_type.name}` is a script, which has no session to keep",
            at=selected.run.place("debug"),
            hint="leave `debug` out: what a script prints is in the logs of its step",
        )
    yield from missing_faults(selected, found.missing)
    yield from _sharing(selected)
    yield from _without_a_source(selected)
    for document in selected.documents:
        yield from document_faults(document)


def _policy_faults(
    selected: Selected, needs: FactsRequest, facts: Facts, policies: tuple[PolicySpec, ...]
) -> Iterator[RunnerError]:
    """List what policies, clusters and incidents forbid."""
    yield from provider_faults(selected, needs.providers, policies)
    yield from secret_faults(selected, policies)
    yield from _key_inside(selected, needs.providers, facts)
    found = facts.of(selected.name)
    yield from cluster_faults(selected, found.cluster)
    yield from incident_advice(found, selected.run.place(*selected.incident_keys))
    yield from preload_faults(selected, found.incident_files, cluster=needs.cluster is not None)


def _sharing(selected: Selected) -> Iterator[RunnerError]:
    """List the protected paths that a shared project cannot protect: everything in it stays writable."""
    project, types = selected.project, selected.agent_type
    if project is None or not selected.shares_project:
        return
    hint = "write workspace_isolation: true in the project, or protect nothing"
    if paths := _unprotected(selected):
        message = f"project `{project.name}` is not isolated, so {', '.join(paths)} can be written"
        yield ProtectedIgnored(message, at=project.place("protected_paths"), hint=hint)
    if selected.agent.workspace.protected_paths:
        message = f"workspaces of project `{project.name}` see it whole, and nothing in it is protected"
        yield Unenforceable(message, at=types.place("workspace", "protected_paths"), hint=hint)
    if selected.agent.workspace.dependencies:
        message = f"workspaces of project `{project.name}` see it whole, and nothing is shown in their place"
        hint = "write workspace_isolation: true in the project, or leave the field out"
        yield Unenforceable(message, at=types.place("workspace", "dependencies"), hint=hint)
    pool = selected.agent.workspace.warm_pool
    if pool is not None and pool.size:
        message = (
            f"workspaces of project `{project.name}` see it whole, and none of them can be started before it is known"
        )
        hint = "write workspace_isolation: true in the project, or leave the field out"
        yield Unenforceable(message, at=types.place("workspace", "warm_pool"), hint=hint)


def _without_a_source(selected: Selected) -> Iterator[RunnerError]:
    """List dependencies that are of no repository, and directories of one that is not on this machine."""
    workspace = selected.agent.workspace
    here = workspace.checkout_on_start and workspace.repo_source.type == "local"
    has_none = not workspace.checkout_on_start or workspace.repo_source.type == "none"
    for position, one in enumerate(workspace.dependencies):
        at = selected.agent_type.place("workspace", "dependencies", position)
        if isinstance(one, str) and not here:
            message = "dependencies are directories of a repository on this machine, and none is the source"
            yield Unenforceable(message, at=at, hint="write repo_source: {type: local, path: ..}")
        elif not isinstance(one, str) and has_none:
            message = "dependencies are made from files of a repository, and none is the source"
            yield Unenforceable(message, at=at, hint="write a repo_source, or use setup_commands")


def _pinned(checkout: Checkout | None, fact: CommitFact | None) -> tuple[Checkout | None, str]:
    if checkout is None or fact is None:
        return checkout, "work"
    return replace(checkout, commit=fact.commit), fact.branch


def _script(agent: AgentTypeSpec, path: Path | None) -> ScriptSpec:
    script = agent.script
    if script is None:
        return ScriptSpec(None, "")
    if script.path is not None:
        return ScriptSpec(path, script.path)
    files = tuple((f.path, f.content, f.executable) for f in script.files or ())
    return ScriptSpec(None, plural(len(files), "file"), files)


def _model(selected: Selected) -> ModelSpec | None:
    agent = selected.agent
    name = agent.model if selected.model is None else selected.model[0]
    if name is None:
        return None
    budget = Budget(**dict(agent.budget)) if agent.budget is not None else Budget()
    tools = tuple(agent.cli_tools) if agent.cli_tools is not None else None
    return ModelSpec(name, budget, agent.credentials == "env", tools)


def _key_inside(selected: Selected, providers: Sequence[str], facts: Facts) -> Iterator[RunnerError]:
    """List the faults of an agent that holds the key itself: its use is not counted, and it needs a network."""
    agent, types = selected.agent, selected.agent_type
    if agent.model is None or agent.credentials != "env":
        return
    at, hint = types.place("credentials"), "write credentials: gateway, or leave it out"
    yield KeyInside(f"all that `{types.name}` runs can read the key of its model", at=at, hint=hint)
    if agent.budget is not None and any(value is not None for _, value in agent.budget):
        yield Unenforceable("only the gateway keeps a budget", at=types.place("budget"), hint=hint)
    for name in providers:
        probe = facts.probes.get(name)
        if probe is not None and probe.enforces(Feature.NETWORK_NONE):
            yield Unenforceable(f"`{name}` has no network, so `{agent.agent}` cannot reach its model", at=at, hint=hint)


def _verify(run: IncidentRunSpec) -> VerifySpec | None:
    verify = run.verify
    if verify is None:
        return None
    report = verify.report
    return VerifySpec(
        setup=tuple(argv_of(c) for c in verify.setup or ()),
        required=tuple(verify.files.required if verify.files else ()),
        forbidden=tuple(verify.files.forbidden if verify.files else ()),
        report=ReportCheck(report.path, report.min_bytes, tuple(report.sections)) if report else None,
        commands=tuple(CommandCheck(argv_of(c.run), c.timeout, c.exit or 0) for c in verify.commands or ()),
    )


def _origins(selected: Selected, own: OwnPolicy | None) -> dict[str, str]:
    run, types = selected.run, selected.agent_type
    origins = {
        "provision": types.origin("workspace", "providers"),
        "clone": types.origin("workspace", "repo_source"),
        "dependencies": types.origin("workspace", "dependencies"),
        "setup": types.origin("workspace", "setup_commands"),
        "agent": types.origin("agent"),
        "model": run.origin("matrix", "model", selected.model[1]) if selected.model else types.origin("model"),
        "budget": types.origin("budget"),
        "skills": types.origin("skills"),
        "preload": run.origin("context", "preload"),
        "post_hook": types.origin("post_hooks") if selected.agent.post_hooks else run.origin("post_hooks"),
        "session": run.origin("debug"),
        "snapshot": run.origin("snapshot"),
        "verify": run.origin("verify"),
        "finalize": types.origin("stop_budget"),
        "deadline": run.origin("timeout"),
        "incident": run.origin(*selected.incident_keys),
        "cluster": run.origin("incident", "kubeconfig"),
        "project": selected.project.origin("workspace_isolation") if selected.project else DEFAULTS,
        **{f"timeouts.{step}": types.origin("timeouts", step) for step in type(selected.agent.timeouts).model_fields},
    }
    if selected.project is not None and selected.project.wrote("queue"):
        origins["queue"] = selected.project.origin("queue")
    origins["scan"] = selected.policies[-1].origin("forbidden_patterns")
    if own is not None and own.written.forbiddenPatterns is not None:
        origins["scan"] = own.line("forbiddenPatterns")
    return origins
