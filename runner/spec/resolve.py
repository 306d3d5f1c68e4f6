"""Documents, settings and Facts become specs; what cannot be resolved is collected as findings at its place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from pydantic import BaseModel

from runner.core.errors import (
    BadRef,
    BadUrl,
    BadValue,
    KeyInside,
    PathEscape,
    Place,
    ProtectedIgnored,
    ProviderForbidden,
    RunnerError,
    Unenforceable,
    Untrusted,
    WorkspaceDisabled,
    shown,
)
from runner.core.ids import BRANCH_HINT, is_branch
from runner.core.model import DEFAULT_PROJECT, Budget, Checkout, Feature, IsolationClass, Limits
from runner.core.settings import Settings
from runner.manifest.kinds.agent_type import Spec as AgentTypeSpec
from runner.manifest.kinds.incident_run import Spec as IncidentRunSpec
from runner.manifest.kinds.policy import Spec as PolicyKindSpec
from runner.manifest.kinds.project import Spec as ProjectSpec
from runner.manifest.load import DEFAULTS, Document
from runner.policy.paths import check_pattern
from runner.policy.protected import check_protected, unite
from runner.policy.toolchains import check_toolchain, is_installed, is_language
from runner.spec import template
from runner.spec.checkout import (
    SECRET_IN_URL,
    RepoSource,
    TaskContext,
    holds_secret,
    judge_url,
    resolve_checkout,
    uses_keys,
)
from runner.spec.cluster import (
    WantedCluster,
    cluster_demands,
    cluster_faults,
    cluster_of,
    keys_of,
    untrusted_cluster,
    wanted_cluster,
)
from runner.spec.incident import incident_advice
from runner.spec.model import (
    Command,
    CommandCheck,
    CommitFact,
    Demand,
    Facts,
    Lent,
    ModelSpec,
    PolicyFile,
    PolicySpec,
    ReportCheck,
    RunSpec,
    ScriptSpec,
    VerifySpec,
    Warm,
)
from runner.spec.preload import namespace_of, preload_faults
from runner.spec.repository import OwnPolicy, dropped, read_own, with_own
from runner.spec.secrets import secret_demands, secret_faults, secrets_of, untrusted_secrets
from runner.spec.select import Selected, project_root, repository_root

Outputs = Mapping[str, tuple[tuple[str, ...], bool]]

DEFAULT_MESSAGE = "{{ run.name }}: work of run {{ run.id }}"


@dataclass(frozen=True)
class Wanted:
    """The Facts that one run needs; gathering them is the only look outside before anything starts."""

    run: str
    agent: str | None  # that works with a model, with a CLI
    providers: tuple[str, ...]
    checkout: Checkout | None
    script: Path | None
    script_name: str
    incident: Path | None
    project: Path | None  # the root of the run's project, where an AGENTS.md may be
    toolchains: tuple[str, ...]
    dependencies: tuple[str, ...]
    base_image: str | None
    skills: tuple[str, ...]
    uses_keys: bool  # the repository is reached with the ssh keys or the netrc of this host's user
    cluster: WantedCluster | None


def wanted(selected: Selected, settings: Settings, *, untrusted: bool = False) -> tuple[Wanted, list[RunnerError]]:
    """List the facts that resolving this run needs."""
    findings: list[RunnerError] = []
    checkout = _checkout(selected)
    if untrusted and checkout is not None and checkout.path is not None:
        checkout = replace(checkout, within=repository_root(selected.agent_type.directory))
    if checkout is not None and checkout.url is not None and (fault := judge_url(checkout.url)):
        at = _source_place(selected)
        if "@" in checkout.url or "?" in checkout.url:
            at = at._replace(text="")  # the line may hold a password
        findings.append(BadUrl(fault.message, at=at, hint=fault.hint))
    elif (task := selected.spec.task) is not None and holds_secret(task.repository_url or ""):
        at = selected.run.place("task", "repository_url")
        findings.append(BadUrl(SECRET_IN_URL, at=at._replace(text=""), hint="write the URL of the task without them"))
    agent = selected.agent
    script = None
    if agent.script is not None and agent.script.path is not None:
        script = _inside(selected, selected.agent_type, agent.script.path, ("script", "path"), findings)
    incident = None
    if selected.incident is not None:
        incident = _incident(selected, selected.incident, findings)
    return (
        Wanted(
            selected.name,
            agent.agent if agent.model is not None else None,
            _providers(selected, settings),
            checkout,
            script,
            agent.script.path if agent.script is not None and agent.script.path is not None else "",
            incident,
            project_root(selected, selected.project) if selected.project else None,
            tuple(agent.workspace.toolchains),
            tuple(agent.workspace.dependencies),
            agent.workspace.base_image,
            tuple(agent.skills),
            checkout is not None and checkout.url is not None and uses_keys(checkout.url, settings.git_credentials),
            wanted_cluster(selected, settings),
        ),
        findings,
    )


def _source_place(selected: Selected) -> Place:
    """The manifest line that says what is cloned."""
    source = selected.agent.workspace.repo_source
    if source.type == "task_context" and selected.spec.task is not None:
        return selected.run.place("task", "repository_url")
    keys = ("workspace", "repo_source", "url") if source.type == "fixed" else ("workspace", "repo_source")
    return selected.agent_type.place(*keys)


def _incident(selected: Selected, written: str, findings: list[RunnerError]) -> Path | None:
    """The incident's directory: in the manifest's project, or by its absolute path anywhere on this host."""
    if os.path.isabs(written):
        return Path(os.path.realpath(written))
    return _inside(selected, selected.run, written, selected.incident_keys, findings)


def _inside(
    selected: Selected,
    document: Document,
    relative: str,
    keys: tuple[str | int, ...],
    findings: list[RunnerError],
) -> Path | None:
    """The file that a manifest names beside itself, if it lies in the manifest's project, links followed."""
    path = Path(os.path.realpath(document.directory / relative))  # ``resolve`` raises for links in a circle
    if path.is_relative_to(project_root(selected, document)):
        return path
    hint = "it must stay in the project's root" if selected.project else "it must stay in the repository"
    findings.append(PathEscape(f"`{relative}` leads out of the project", at=document.place(*keys), hint=hint))
    return None


def outputs_of(chosen: Sequence[Selected]) -> Outputs:
    return {s.group: (tuple(s.spec.outputs), s.spec.matrix is not None) for s in chosen}


def untrusted_faults(selected: Selected, want: Wanted) -> list[RunnerError]:
    """List what a manifest from a fork must not ask for, before anything that it names is looked at."""
    types = selected.agent_type
    findings: list[RunnerError] = []

    def refuse(what: str, key: str) -> None:
        at = types.place("workspace", key)
        findings.append(Untrusted(f"an untrusted manifest may not {what}", at=at, hint="apply it without --untrusted"))

    if not all(map(is_language, want.toolchains)):
        refuse("mount directories of the host", "toolchains")
    if not all(map(is_installed, want.dependencies)):
        refuse("see directories but those of package managers", "dependencies")
    if selected.agent.credentials == "env":
        at = types.place("credentials")
        message = "an untrusted manifest may not have the key of a model"
        findings.append(Untrusted(message, at=at, hint="write credentials: gateway, or leave it out"))
    findings += untrusted_secrets(selected)
    findings += untrusted_cluster(selected)
    if want.incident is not None and not want.incident.is_relative_to(project_root(selected, selected.run)):
        at = selected.run.place(*selected.incident_keys)
        message = f"an untrusted manifest may not have `{want.incident}` for its incident"
        findings.append(Untrusted(message, at=at, hint="apply it without --untrusted"))
    if want.uses_keys:
        refuse("reach a repository with your keys", "repo_source")
    source = want.checkout.path if want.checkout is not None else None
    if source is not None and not source.is_relative_to(project_root(selected, types)):
        refuse(f"take its code from `{source}`", "repo_source")
    if selected.project is None:
        return findings
    root = project_root(selected, selected.project)
    if not root.is_relative_to(repository_root(selected.project.directory)):
        message = f"an untrusted manifest may not have `{root}` for its project"
        findings.append(Untrusted(message, at=selected.project.place("root"), hint="apply it without --untrusted"))
    if _shares(selected):
        message = "an untrusted manifest may not see a project with the workspaces of others"
        at = selected.project.place("workspace_isolation")
        findings.append(Untrusted(message, at=at, hint="write workspace_isolation: true"))
    return findings


def resolve(
    selected: Selected, settings: Settings, facts: Facts, outputs: Outputs, *, untrusted: bool = False
) -> tuple[RunSpec, list[RunnerError]]:
    """One run, complete. With errors among the findings the spec must not be compiled.

    ``outputs`` maps each run's document to its outputs' names, with whether it is a matrix. ``untrusted``
    documents come from a fork: they get no host mounts and no weaker provider, and policies only tighten.
    """
    findings: list[RunnerError] = []
    run, agent, types = selected.spec, selected.agent, selected.agent_type
    name = selected.name
    workspace = agent.workspace
    if not workspace.enabled:
        findings.append(
            WorkspaceDisabled(
                f"`{types.name}` has no workspace, so nothing can run in it",
                at=selected.run.place("agent_type"),
                hint="set workspace.enabled: true in the agent type",
            )
        )
    needs, _ = wanted(selected, settings, untrusted=untrusted)
    findings += _missing(selected, facts)
    findings += _sharing(selected)
    findings += _without_a_source(selected)
    findings += [finding for document in selected.documents for finding in complaints(document)]
    checkout, branch = _pinned(needs.checkout, facts.commits.get(name))
    policies, own, faults = policies_of(selected.policies, facts.policies.get(name), untrusted=untrusted)
    findings += faults
    findings += _ceilings(selected, needs.providers, policies)
    findings += secret_faults(selected, policies)
    findings += _key_inside(selected, needs.providers, facts)
    findings += cluster_faults(selected, facts)
    findings += incident_advice(name, facts, selected.run.place(*selected.incident_keys))
    findings += preload_faults(selected, facts.files.get(f"{name}/incident"), cluster=needs.cluster is not None)
    demands = _demands(selected, settings)
    lent = facts.lent.get(name, Lent(needs.toolchains))
    task = TaskContext(**dict(run.task)) if run.task else TaskContext()
    spec = RunSpec(
        name=name,
        origin=selected.run.origin(),
        agent=agent.agent,
        script=_script(agent, needs.script),
        model=_model(selected),
        system=agent.prompt.system,
        prompt=run.prompt,
        user=agent.prompt.user,
        env=dict(agent.env),
        task=task,
        incident=needs.incident,
        checkout=checkout,
        branch=branch,
        providers=needs.providers,
        providers_at=types.place("workspace", "providers"),
        base_image=workspace.base_image,
        isolation=max(
            IsolationClass[workspace.isolation.upper()],
            *(p.min_isolation for p in policies),
            IsolationClass.NAMESPACES if untrusted else IsolationClass.NONE,
        ),
        limits=_limits(selected, settings),
        warm=_warm(selected, settings, policies, lent.toolchains),
        demands=demands,
        best_effort=workspace.resource_limits.enforcement == "best_effort",
        setup=tuple(_argv(c) for c in workspace.setup_commands),
        setup_timeout_seconds=workspace.setup.timeout,
        setup_may_fail=workspace.setup.on_failure == "warn",
        project=selected.project.name if selected.project else DEFAULT_PROJECT,
        shared=_shares(selected),
        unprotected=_unprotected(selected),
        protected=_protected(selected),
        lent=lent,
        post_hooks=tuple(_argv(c) for c in (*agent.post_hooks, *run.post_hooks)),
        policies=policies,
        verify=_verify(run),
        message=run.snapshot.message if run.snapshot and run.snapshot.message else DEFAULT_MESSAGE,
        snapshot_branch=run.snapshot.branch if run.snapshot else None,
        wants_snapshot=run.snapshot is not None,
        wants_change=run.snapshot is not None and not run.snapshot.allow_empty,
        timeouts=dict(agent.timeouts),
        deadline_seconds=run.timeout,
        stop_budget_seconds=agent.stop_budget,
        origins=_origins(selected, own) | {demand.feature.value: demand.origin for demand in demands},
        needs=selected.needs,
        group=selected.group,
        max_parallel=run.matrix.max_parallel if run.matrix else None,
        outputs={output: found.file for output, found in run.outputs.items()},
        secrets=secrets_of(selected),
        skills=tuple(agent.skills),
        debug=run.debug,
        member=name if run.matrix and (run.matrix.agent_type or run.matrix.model) else "",
        cluster=cluster_of(selected, needs.cluster, facts),
        preload=tuple(run.context.preload),
        namespace=namespace_of(selected, facts.incidents.get(name, {})),
    )
    known = {need: outputs[need] for need in run.needs if need in outputs}
    if f"{name}/incident" not in facts.missing:
        findings += _templates(selected, spec, facts.incidents.get(name, {}), known)
    return spec, findings


def _templates(
    selected: Selected, spec: RunSpec, incident: Mapping[str, object], outputs: Outputs
) -> list[RunnerError]:
    """Try every templatable field with stand-in values, so that a wrong name is an error before anything starts."""
    stand_in = {"id": "0" * 12, "name": spec.name}
    values: dict[str, object] = {
        "run": stand_in,
        "task": {key: value for key, value in vars(spec.task).items() if value is not None},
        "outputs": {run: {name: ["0"] if many else "0" for name in names} for run, (names, many) in outputs.items()},
    }
    if spec.incident is not None:
        values["incident"] = incident
    with_prompt = {**values, "run": {**stand_in, "prompt": ""}}
    findings: list[RunnerError] = []
    for document in (selected.run, selected.agent_type):
        for keys, text in _templated(document.spec):
            known = with_prompt if document is selected.agent_type and keys[0] == "prompt" else values
            if template.check(text):
                continue  # among the document's complaints
            at = document.place(*keys)
            try:
                filled = template.render(text, known, at=at)
            except RunnerError as error:
                findings.append(error)
            else:
                if text and keys == ("snapshot", "branch") and not is_branch(filled):
                    findings.append(BadRef(f"`{shown(filled)}` is not a branch name", at=at, hint=BRANCH_HINT))
    return findings


def _shares(selected: Selected) -> bool:
    project = selected.project_spec
    return project is not None and not project.workspace_isolation


def _unprotected(selected: Selected) -> tuple[str, ...]:
    project = selected.project_spec
    return tuple(project.protected_paths) if project and _shares(selected) else ()


def _sharing(selected: Selected) -> Iterator[RunnerError]:
    """List the protected paths that a shared project cannot protect: everything in it stays writable."""
    project, types = selected.project, selected.agent_type
    if project is None or not _shares(selected):
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
    """Dependencies that are of no repository on this machine."""
    workspace = selected.agent.workspace
    if workspace.dependencies and not (workspace.checkout_on_start and workspace.repo_source.type == "local"):
        message = "dependencies are directories of a repository on this machine, and none is the source"
        at = selected.agent_type.place("workspace", "dependencies")
        yield Unenforceable(message, at=at, hint="write repo_source: {type: local, path: ..}")


def _protected(selected: Selected) -> dict[str, str]:
    """The project's and the agent type's together, since both hold; each with the manifest line that asks for it."""
    if _shares(selected):
        return {}
    project, types = selected.project_spec, selected.agent_type
    lines: dict[str, str] = {}
    if selected.project and project:
        lines |= dict.fromkeys(project.protected_paths, selected.project.origin("protected_paths"))
    lines |= dict.fromkeys(selected.agent.workspace.protected_paths, types.origin("workspace", "protected_paths"))
    return {path: lines[path] for path in unite(lines)}


def _argv(command: str | Sequence[str]) -> Command:
    return ("sh", "-c", command) if isinstance(command, str) else tuple(command)


def _providers(selected: Selected, settings: Settings) -> tuple[str, ...]:
    if not selected.agent_type.wrote("workspace", "providers") and settings.providers is not None:
        return settings.providers
    return tuple(selected.agent.workspace.providers)


def _checkout(selected: Selected) -> Checkout | None:
    if not selected.agent.workspace.checkout_on_start:
        return None
    source = selected.agent.workspace.repo_source
    task = selected.spec.task
    directory = selected.agent_type.directory
    path = Path(os.path.realpath(directory / source.path)) if source.path is not None else None
    return resolve_checkout(
        RepoSource(source.type, source.url, path, source.branch, source.depth, source.include_dirty),
        TaskContext(**dict(task)) if task else TaskContext(),
    )


def _pinned(checkout: Checkout | None, fact: CommitFact | None) -> tuple[Checkout | None, str]:
    if checkout is None or fact is None:
        return checkout, "work"
    return replace(checkout, commit=fact.commit), fact.branch


def _missing(selected: Selected, facts: Facts) -> list[RunnerError]:
    """Facts that could not be had, said at the manifest line that wants them. Keys as ``app`` gathers them."""
    name = selected.name
    agent, run = selected.agent_type, selected.run
    places: dict[str, tuple[Document, tuple[str | int, ...]]] = {
        f"{name}/providers": (agent, ("workspace", "providers")),
        f"{name}/script": (agent, ("script",)),
        f"{name}/incident": (run, selected.incident_keys),
        f"{name}/cluster": (run, keys_of(selected, facts.missing.get(f"{name}/cluster"))),
        f"{name}/toolchain": (agent, ("workspace", "toolchains")),
        f"{name}/dependencies": (agent, ("workspace", "dependencies")),
        f"{name}/image": (agent, ("workspace", "base_image")),
        **{f"{name}/skills/{skill}": (agent, ("skills", i)) for i, skill in enumerate(selected.agent.skills)},
    }
    found = {key: document.place(*keys) for key, (document, keys) in places.items() if key in facts.missing}
    if f"{name}/agents" in facts.missing and selected.project is not None:
        found[f"{name}/agents"] = selected.project.place("root")
    if f"{name}/checkout" in facts.missing:
        found[f"{name}/checkout"] = _source_place(selected)
    return [type(error := facts.missing[key])(error.message, at=at, hint=error.hint) for key, at in found.items()]


def complaints(document: Document) -> list[RunnerError]:
    """Values of a document whose form only another room can judge, and templates that are malformed."""
    found: list[RunnerError] = [
        BadValue(f"`{text[:60]}` {complaint}", at=document.place(*keys, position))
        for keys, texts, check in _judged(document.spec)
        for position, text in enumerate(texts)
        if (complaint := check(text))
    ]
    malformed = (template.check(text, at=document.place(*keys)) for keys, text in _templated(document.spec))
    return found + [error for error in malformed if error]


Judged = tuple[tuple[str, ...], Sequence[str], Callable[[str], str | None]]


def _judged(spec: BaseModel) -> Iterator[Judged]:
    """Lists of values with where they are written and who judges one of them."""
    match spec:
        case AgentTypeSpec():
            yield ("workspace", "protected_paths"), spec.workspace.protected_paths, check_protected
            yield ("workspace", "toolchains"), spec.workspace.toolchains, check_toolchain
            yield ("workspace", "dependencies"), spec.workspace.dependencies, check_protected
        case ProjectSpec():
            yield ("protected_paths",), spec.protected_paths, check_protected
        case PolicyKindSpec():
            yield ("allowed_paths",), spec.allowed_paths, check_pattern
            yield ("forbidden_patterns",), spec.forbidden_patterns, check_pattern
        case IncidentRunSpec() if spec.verify is not None and spec.verify.files is not None:
            yield ("verify", "files", "required"), spec.verify.files.required, check_pattern
            yield ("verify", "files", "forbidden"), spec.verify.files.forbidden, check_pattern


def _templated(spec: BaseModel) -> Iterator[tuple[tuple[str, ...], str]]:
    """The templates of a document with where they are written."""
    match spec:
        case AgentTypeSpec():
            yield ("prompt", "system"), spec.prompt.system
            yield ("prompt", "user"), spec.prompt.user
            yield from ((("env", name), value) for name, value in spec.env.items())
        case IncidentRunSpec():
            yield ("prompt",), spec.prompt
            yield ("snapshot", "message"), (spec.snapshot and spec.snapshot.message) or ""
            yield ("snapshot", "branch"), (spec.snapshot and spec.snapshot.branch) or ""


def policies_of(
    documents: Sequence[Document], file: PolicyFile | None, *, untrusted: bool
) -> tuple[tuple[PolicySpec, ...], OwnPolicy | None, list[RunnerError]]:
    """Compose policies with the repository's own, if any, and return that one too."""
    policies = tuple(_policy(document) for document in documents)
    if file is None:
        return policies, None, []
    own, found = read_own(file)
    if own is None:
        return policies, None, found
    policies, more = with_own(policies, own, untrusted=untrusted)
    return policies, own, found + more


def _policy(document: Document) -> PolicySpec:
    spec = document.spec
    assert isinstance(spec, PolicyKindSpec)
    return PolicySpec(
        document.name,
        document.origin(),
        tuple(spec.allowed_paths),
        tuple(spec.forbidden_patterns),
        spec.max_file_size,
        tuple(spec.providers) if spec.providers is not None else None,
        IsolationClass[spec.min_isolation.upper()],
        tuple(spec.secrets) if spec.secrets is not None else None,
    )


def _ceilings(selected: Selected, providers: Sequence[str], policies: Sequence[PolicySpec]) -> list[RunnerError]:
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


def dropped_defaults(selected: Selected, defaults: Mapping[str, Document]) -> list[RunnerError]:
    """Policies whose list of forbidden patterns replaces the built-in one and leaves some of it out."""
    built_in = selected.policy(defaults["Policy"]).forbidden_patterns
    findings: list[RunnerError] = []
    for document in selected.policies:
        gone = [p for p in built_in if p not in selected.policy(document).forbidden_patterns]
        if gone and document.wrote("forbidden_patterns"):
            findings.append(dropped(gone, at=document.place("forbidden_patterns")))
    return findings


def _limits(selected: Selected, settings: Settings) -> Limits:
    written = selected.agent.workspace.resource_limits
    return Limits(
        written.cpu if written.cpu is not None else settings.default_cpus,
        written.memory if written.memory is not None else settings.default_memory,
        written.disk if written.disk is not None else settings.default_disk,
        written.pids,
    )


_LIMIT_KEYS = {"cpu": Feature.CPU, "memory": Feature.MEMORY, "disk": Feature.DISK, "pids": Feature.PIDS}


def _warm(selected: Selected, settings: Settings, policies: Sequence[PolicySpec], toolchains: tuple[str, ...]) -> Warm:
    workspace = selected.agent.workspace
    judged = [(*policy.ceilings, policy.providers, policy.min_isolation) for policy in policies]
    return Warm(
        _warm_size(selected, settings),
        workspace.network,
        toolchains,
        sha256(json.dumps([workspace.isolation, judged]).encode()).hexdigest()[:12],
    )


def _warm_size(selected: Selected, settings: Settings) -> int:
    """The agent type's own, or the server's, which is for those that take the server's providers."""
    if (pool := selected.agent.workspace.warm_pool) is not None:
        return pool.size
    return 0 if selected.agent_type.wrote("workspace", "providers") else settings.warm_pool_size


def _demands(selected: Selected, settings: Settings) -> tuple[Demand, ...]:
    """Everything that some provider here might not be able to enforce."""
    types, agent, workspace = selected.agent_type, selected.agent, selected.agent.workspace
    limits = _limits(selected, settings)
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
    network = Demand(
        Feature.NETWORK_NONE,
        "network none",
        types.place("workspace", "network"),
        types.wrote("workspace", "network"),
    )
    demands.append(network)
    demands += secret_demands(selected)
    demands += cluster_demands(selected)
    if agent.model is not None and agent.credentials == "gateway":
        demands.append(Demand(Feature.RELAY, "the way to the model gateway", types.place("agent"), True))
    if size := _warm_size(selected, settings):
        at, written = types.place("workspace", "warm_pool"), workspace.warm_pool is not None
        demands.append(Demand(Feature.WARM_POOL, f"a warm pool of {size}", at, written))
    project = selected.project if not workspace.protected_paths else None
    for key, feature, values, at in (
        (
            "protected_paths",
            Feature.PROTECTED_PATHS,
            _protected(selected),
            project.place("protected_paths") if project else types.place("workspace", "protected_paths"),
        ),
        ("toolchains", Feature.TOOLCHAINS, workspace.toolchains, types.place("workspace", "toolchains")),
        ("dependencies", Feature.DEPENDENCIES, workspace.dependencies, types.place("workspace", "dependencies")),
        (
            "base image",
            Feature.BASE_IMAGE,
            [workspace.base_image] if workspace.base_image else [],
            types.place("workspace", "base_image"),
        ),
    ):
        if values:
            demands.append(Demand(feature, f"{key} {', '.join(values)}", at, True))
    return tuple(demands)


def size_words(count: int | None) -> str:
    """``4G``, ``512M``: the largest unit that divides without a rest."""
    number, unit = count or 0, ""
    for larger in "KMGT":
        if number % 1024 or not number:
            break
        number, unit = number // 1024, larger
    return f"{number}{unit}"


def _script(agent: AgentTypeSpec, path: Path | None) -> ScriptSpec:
    script = agent.script
    if script is None:
        return ScriptSpec(None, "")
    if script.path is not None:
        return ScriptSpec(path, script.path)
    files = tuple((f.path, f.content, f.executable) for f in script.files or ())
    return ScriptSpec(None, f"{len(files)} file{'s' * (len(files) != 1)}", files)


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
    yield KeyInside(f"all that `{types.name}` runs has the key of its model within reach", at=at, hint=hint)
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
        setup=tuple(_argv(c) for c in verify.setup or ()),
        required=tuple(verify.files.required if verify.files else ()),
        forbidden=tuple(verify.files.forbidden if verify.files else ()),
        report=ReportCheck(report.path, report.min_bytes, tuple(report.sections)) if report else None,
        commands=tuple(CommandCheck(_argv(c.run), c.timeout, c.exit or 0) for c in verify.commands or ()),
    )


def _origins(selected: Selected, own: OwnPolicy | None) -> dict[str, str]:
    run, types = selected.run, selected.agent_type
    origins = {
        "provision": types.origin("workspace", "providers"),
        "clone": types.origin("workspace", "repo_source"),
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
        "settle": types.origin("stop_budget"),
        "deadline": run.origin("timeout"),
        "incident": run.origin(*selected.incident_keys),
        "cluster": run.origin("incident", "kubeconfig"),
        "project": selected.project.origin("workspace_isolation") if selected.project else DEFAULTS,
        **{f"timeouts.{step}": types.origin("timeouts", step) for step in type(selected.agent.timeouts).model_fields},
    }
    origins["scan"] = selected.policies[-1].origin("forbidden_patterns")
    if own is not None and own.written.forbiddenPatterns is not None:
        origins["scan"] = own.line("forbiddenPatterns")
    return origins
