"""Documents, settings and Facts become specs; what cannot be resolved is collected as findings at its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from runner.errors import (
    BadValue,
    DefaultsDropped,
    NothingToRun,
    PathEscape,
    ProviderForbidden,
    RunnerError,
    UnknownReference,
    UrlUnsupported,
    WorkspaceDisabled,
    nearest,
)
from runner.manifest.kinds.agent_type import Spec as AgentTypeSpec
from runner.manifest.kinds.incident_run import Spec as IncidentRunSpec
from runner.manifest.kinds.policy import Spec as PolicyKindSpec
from runner.manifest.load import Document
from runner.model import Checkout, Feature, IsolationClass, Limits
from runner.policy.paths import check_pattern
from runner.policy.protected import check_protected
from runner.settings import Settings
from runner.spec import template
from runner.spec.checkout import RepoSource, TaskContext, resolve_checkout
from runner.spec.model import (
    Command,
    CommandCheck,
    CommitFact,
    Demand,
    Facts,
    PolicySpec,
    ReportCheck,
    RunSpec,
    ScriptSpec,
    VerifySpec,
)

DEFAULT_MESSAGE = "{{ run.name }}: work of run {{ run.id }}"


@dataclass(frozen=True)
class Selected:
    """The documents that one run is made of."""

    run: Document
    agent_type: Document
    policies: tuple[Document, ...]

    @property
    def spec(self) -> IncidentRunSpec:
        assert isinstance(self.run.spec, IncidentRunSpec)
        return self.run.spec

    @property
    def agent(self) -> AgentTypeSpec:
        assert isinstance(self.agent_type.spec, AgentTypeSpec)
        return self.agent_type.spec

    def policy(self, document: Document) -> PolicyKindSpec:
        assert isinstance(document.spec, PolicyKindSpec)
        return document.spec


@dataclass(frozen=True)
class Wanted:
    """The Facts that one run needs; gathering them is the only look outside before anything starts."""

    run: str
    providers: tuple[str, ...]
    checkout: Checkout | None
    script: Path | None
    script_name: str
    incident: Path | None
    toolchains: tuple[str, ...]


def select(documents: Sequence[Document], defaults: Mapping[str, Document]) -> tuple[list[Selected], list[RunnerError]]:
    """Follow the references of every run."""
    by_kind: dict[str, dict[str, Document]] = {}
    for document in documents:
        by_kind.setdefault(document.kind, {})[document.name] = document
    chosen: list[Selected] = []
    findings: list[RunnerError] = []
    for run in by_kind.get("IncidentRun", {}).values():
        spec = run.spec
        assert isinstance(spec, IncidentRunSpec)
        agent = by_kind.get("AgentType", {}).get(spec.agent_type)
        if agent is None:
            findings.append(_unknown("agent type", spec.agent_type, run, "agent_type", by_kind.get("AgentType", {})))
            continue
        assert isinstance(agent.spec, AgentTypeSpec)
        policies: dict[str, Document] = {}
        for owner, name in ((agent, agent.spec.policy), (run, spec.policy)):
            if name is None:
                continue
            found = by_kind.get("Policy", {}).get(name)
            if found is None:
                findings.append(_unknown("policy", name, owner, "policy", by_kind.get("Policy", {})))
            else:
                policies[name] = found
        chosen.append(Selected(run, agent, tuple(policies.values()) or (defaults["Policy"],)))
    if not by_kind.get("IncidentRun"):
        findings.append(NothingToRun("there is no `IncidentRun` here", hint="`runner validate` checks the rest"))
    return chosen, findings


def _unknown(what: str, name: str, document: Document, key: str, known: Mapping[str, Document]) -> UnknownReference:
    return UnknownReference(f"`{name}` is not a known {what}", at=document.place(key), hint=nearest(name, known))


def wanted(selected: Selected, settings: Settings) -> tuple[Wanted, list[RunnerError]]:
    """What must be looked up before this run can be resolved."""
    findings: list[RunnerError] = []
    checkout = _checkout(selected)
    if checkout is not None and checkout.url is not None:
        findings.append(_url_unsupported(selected, checkout.url))
    agent, directory = selected.agent, selected.agent_type.directory
    script = None
    if agent.script is not None and agent.script.path is not None:
        script = _inside(directory, agent.script.path, selected.agent_type, ("script", "path"), findings)
    incident = None
    if selected.spec.incident is not None:
        run = selected.run
        incident = _inside(run.directory, selected.spec.incident.directory, run, ("incident", "directory"), findings)
    return (
        Wanted(
            selected.run.name,
            _providers(selected, settings),
            checkout if checkout is not None and checkout.path is not None else None,
            script,
            agent.script.path if agent.script is not None and agent.script.path is not None else "",
            incident,
            tuple(agent.workspace.toolchains),
        ),
        findings,
    )


def _url_unsupported(selected: Selected, url: str) -> UrlUnsupported:
    written = selected.agent_type.wrote("workspace", "repo_source", "url")
    at = (
        selected.agent_type.place("workspace", "repo_source", "url")
        if written
        else selected.run.place("task", "repository_url")
    )
    return UrlUnsupported(
        f"`{url}` can not be cloned: this version takes local repositories only",
        at=at,
        hint="clone it yourself and write repo_source: {type: local, path: DIRECTORY}",
    )


def _inside(
    directory: Path, relative: str, document: Document, keys: tuple[str, ...], findings: list[RunnerError]
) -> Path | None:
    """The file that a manifest names beside itself, if it lies in the manifest's project, links followed."""
    path = (directory / relative).resolve()
    root = project_root(directory)
    if path.is_relative_to(root):
        return path
    findings.append(
        PathEscape(
            f"`{relative}` leads out of the project", at=document.place(*keys), hint="it must stay in the repository"
        )
    )
    return None


def project_root(directory: Path) -> Path:
    """The repository that a manifest lies in, or else its own folder."""
    directory = directory.resolve()
    return next((p for p in (directory, *directory.parents) if (p / ".git").exists()), directory)


def resolve(selected: Selected, settings: Settings, facts: Facts) -> tuple[RunSpec, list[RunnerError]]:
    """One run, complete. With errors among the findings the spec must not be compiled."""
    findings: list[RunnerError] = []
    run, agent, types = selected.spec, selected.agent, selected.agent_type
    name = selected.run.name
    workspace = agent.workspace
    if not workspace.enabled:
        findings.append(
            WorkspaceDisabled(
                f"`{types.name}` has no workspace, so nothing can run in it",
                at=selected.run.place("agent_type"),
                hint="set workspace.enabled: true in the agent type",
            )
        )
    needs, _ = wanted(selected, settings)
    findings += _missing(selected, facts)
    findings += _complaints(selected)
    checkout, branch = _pinned(needs.checkout, facts.commits.get(name))
    policies = tuple(_policy(selected, document) for document in selected.policies)
    findings += _ceilings(selected, needs.providers, policies)
    task = TaskContext(**run.task.model_dump()) if run.task else TaskContext()
    prompt = run.prompt
    spec = RunSpec(
        name=name,
        origin=selected.run.origin(),
        agent=agent.agent,
        script=_script(agent, needs.script),
        system=agent.prompt.system,
        prompt=prompt,
        user=agent.prompt.user,
        env=dict(agent.env),
        task=task,
        incident=needs.incident,
        checkout=checkout,
        branch=branch,
        providers=needs.providers,
        isolation=max(
            IsolationClass[workspace.isolation.upper()], *(p.min_isolation for p in policies), IsolationClass.NONE
        ),
        limits=_limits(selected, settings),
        demands=_demands(selected, settings),
        best_effort=workspace.resource_limits.enforcement == "best_effort",
        setup=tuple(_argv(c) for c in workspace.setup_commands),
        setup_timeout_seconds=workspace.setup.timeout,
        setup_may_fail=workspace.setup.on_failure == "warn",
        protected=tuple(workspace.protected_paths),
        toolchains=tuple(workspace.toolchains),
        post_hooks=tuple(_argv(c) for c in (*agent.post_hooks, *run.post_hooks)),
        policies=policies,
        verify=_verify(run),
        message=run.snapshot.message if run.snapshot and run.snapshot.message else DEFAULT_MESSAGE,
        snapshot_branch=run.snapshot.branch if run.snapshot else None,
        wants_snapshot=run.snapshot is not None,
        timeouts=agent.timeouts.model_dump(),
        deadline_seconds=run.timeout,
        stop_budget_seconds=agent.stop_budget,
        origins=_origins(selected),
    )
    findings += _templates(selected, spec, facts.incidents.get(name, {}))
    return spec, findings


def template_values(spec: RunSpec, incident: Mapping[str, object], run_id: str) -> dict[str, object]:
    """What a template may name. ``run.prompt`` is there for the agent type's prompt once the run's own is filled."""
    values: dict[str, object] = {
        "run": {"id": run_id, "name": spec.name},
        "task": {key: value for key, value in vars(spec.task).items() if value is not None},
    }
    if spec.incident is not None:
        values["incident"] = incident
    return values


def render_prompt(spec: RunSpec, incident: Mapping[str, object], run_id: str) -> str:
    """The whole prompt: system, then user text around the run's own. Raises ``BadTemplate``."""
    values = template_values(spec, incident, run_id)
    own = template.render(spec.prompt, values)
    values["run"] = {"id": run_id, "name": spec.name, "prompt": own}
    parts = [template.render(text, values) for text in (spec.system, spec.user)]
    return "\n\n".join(part for part in parts if part)


def _templates(selected: Selected, spec: RunSpec, incident: Mapping[str, object]) -> list[RunnerError]:
    """Try every templatable field with stand-in values, so that a wrong name is an error before anything starts."""
    values = template_values(spec, incident, "0" * 12)
    with_prompt = {**values, "run": {"id": "0" * 12, "name": spec.name, "prompt": ""}}
    run, types = selected.run, selected.agent_type
    fields: list[tuple[Document, tuple[str, ...], str, Mapping[str, object]]] = [
        (run, ("prompt",), spec.prompt, values),
        (types, ("prompt", "system"), spec.system, with_prompt),
        (types, ("prompt", "user"), spec.user, with_prompt),
        (run, ("snapshot", "message"), spec.message, values),
        (run, ("snapshot", "branch"), spec.snapshot_branch or "", values),
        *((types, ("env", key), value, values) for key, value in spec.env.items()),
    ]
    findings: list[RunnerError] = []
    for document, keys, text, known in fields:
        place = document.place(*keys)
        if complaint := template.check(text, at=place):
            findings.append(complaint)
            continue
        try:
            template.render(text, known, at=place)
        except RunnerError as error:
            findings.append(error)
    return findings


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
    path = (selected.agent_type.directory / source.path).resolve() if source.path is not None else None
    return resolve_checkout(
        RepoSource(source.type, source.url, path, source.branch, source.depth, source.include_dirty),
        TaskContext(**task.model_dump()) if task else TaskContext(),
    )


def _pinned(checkout: Checkout | None, fact: CommitFact | None) -> tuple[Checkout | None, str]:
    if checkout is None or fact is None:
        return checkout, "work"
    return replace(checkout, commit=fact.commit), fact.branch


def _missing(selected: Selected, facts: Facts) -> list[RunnerError]:
    """Facts that could not be had, said at the manifest line that wants them. Keys as ``app`` gathers them."""
    name = selected.run.name
    agent, run = selected.agent_type, selected.run
    places = {
        f"{name}/checkout": (agent, ("workspace", "repo_source")),
        f"{name}/script": (agent, ("script",)),
        f"{name}/incident": (run, ("incident", "directory")),
        f"{name}/toolchain": (agent, ("workspace", "toolchains")),
    }
    return [
        BadValue(facts.missing[key], at=document.place(*keys)) for key, (document, keys) in places.items()
        if key in facts.missing
    ]  # fmt: skip


def _complaints(selected: Selected) -> list[RunnerError]:
    """Values whose form only another room can judge."""
    findings: list[RunnerError] = []
    for position, text in enumerate(selected.agent.workspace.protected_paths):
        if complaint := check_protected(text):
            findings.append(_at(selected.agent_type, complaint, text, "workspace", "protected_paths", position))
    for document in selected.policies:
        spec = selected.policy(document)
        for key, patterns in (("allowed_paths", spec.allowed_paths), ("forbidden_patterns", spec.forbidden_patterns)):
            for position, text in enumerate(patterns):
                if complaint := check_pattern(text):
                    findings.append(_at(document, complaint, text, key, position))
    verify = selected.spec.verify
    if verify is not None:
        for key in ("required", "forbidden"):
            for position, text in enumerate(getattr(verify.files, key) if verify.files else ()):
                if complaint := check_pattern(text):
                    findings.append(_at(selected.run, complaint, text, "verify", "files", key, position))
    return findings


def _at(document: Document, complaint: str, text: str, *keys: str | int) -> BadValue:
    return BadValue(f"`{text[:60]}` {complaint}", at=document.place(*keys))


def _policy(selected: Selected, document: Document) -> PolicySpec:
    spec = selected.policy(document)
    return PolicySpec(
        document.name,
        document.origin(),
        tuple(spec.allowed_paths),
        tuple(spec.forbidden_patterns),
        spec.max_file_size,
        tuple(spec.providers) if spec.providers is not None else None,
        IsolationClass[spec.min_isolation.upper()],
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
            more = (
                f" and {len(gone) - 1} more default{'s' * (len(gone) > 2)} are" if len(gone) > 1 else ", a default, is"
            )
            findings.append(
                DefaultsDropped(f"`{gone[0]}`{more} not in this list", at=document.place("forbidden_patterns"))
            )
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


def _demands(selected: Selected, settings: Settings) -> tuple[Demand, ...]:
    """Everything that some provider here might not be able to enforce."""
    types, workspace = selected.agent_type, selected.agent.workspace
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
            types.origin("workspace", "resource_limits", key),
            types.wrote("workspace", "resource_limits", key),
        )
        for key, feature in _LIMIT_KEYS.items()
    ]
    network = Demand(
        Feature.NETWORK_NONE, "network none", types.origin("workspace", "network"), types.wrote("workspace", "network")
    )
    demands.append(network)
    for key, feature, values in (
        ("protected_paths", Feature.PROTECTED_PATHS, workspace.protected_paths),
        ("toolchains", Feature.TOOLCHAINS, workspace.toolchains),
    ):
        if values:
            demands.append(Demand(feature, f"{key} {', '.join(values)}", types.origin("workspace", key), True))
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


def _origins(selected: Selected) -> dict[str, str]:
    run, types = selected.run, selected.agent_type
    origins = {
        "provision": types.origin("workspace", "providers"),
        "clone": types.origin("workspace", "repo_source"),
        "setup": types.origin("workspace", "setup_commands"),
        "agent": types.origin("agent"),
        "post_hook": types.origin("post_hooks") if selected.agent.post_hooks else run.origin("post_hooks"),
        "snapshot": run.origin("snapshot"),
        "verify": run.origin("verify"),
        "settle": types.origin("stop_budget"),
        "deadline": run.origin("timeout"),
    }
    origins["scan"] = selected.policies[-1].origin("forbidden_patterns")
    return origins
