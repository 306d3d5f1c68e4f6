"""Following references: which documents each run is made of, and which runs come before which."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, cast

from msgspec import Struct
from msgspec.structs import replace

from runner import __version__
from runner.core.errors import (
    BadValue,
    Cycle,
    MissingField,
    NothingToRun,
    OverBudget,
    RequiresRunner,
    RunnerError,
    UnknownReference,
    nearest,
)
from runner.manifest.kinds.agent_type import Spec as AgentTypeSpec
from runner.manifest.kinds.incident_run import Spec as IncidentRunSpec
from runner.manifest.kinds.policy import Spec as PolicyKindSpec
from runner.manifest.load import Document
from runner.manifest.network import TOOLS, HostList, names_in, words_in
from runner.manifest.used_mcp import used_servers
from runner.plan.graph import Graph

if TYPE_CHECKING:
    from runner.manifest.kinds.project import Spec as ProjectSpec

RUNS = 10_000  # of all documents, each member of a matrix counted
BYTES = 64 << 20  # of the documents that they are made of, counted again for each run
TEMPLATES = 5_000  # what is looked up by all templates of all documents: each place costs about a millisecond
FILLED = 100_000  # the same, counted again for each run


class Selected(Struct, frozen=True, kw_only=True):
    """The documents that one run is made of, a member of a matrix or not.

    ``incident`` is the incident's directory as written, and where; ``model`` that of a matrix, and its place in it.
    ``needs`` are names of runs; ``group`` is the document's name, which all members of a matrix share.
    ``host_policy`` is this host's, which manifests of a fork are held to beside their own.
    """

    name: str
    run: Document
    agent_type: Document
    policies: tuple[Document, ...]
    project: Document | None
    incident: str | None
    incident_keys: tuple[str | int, ...]
    model: tuple[str, int] | None = None
    needs: tuple[str, ...] = ()
    network_sets: tuple[Document, ...] = ()
    mcp_servers: tuple[Document, ...] = ()
    host_policy: Document | None = None

    @property
    def group(self) -> str:
        return self.run.name

    @property
    def spec(self) -> IncidentRunSpec:
        assert isinstance(self.run.spec, IncidentRunSpec)
        return self.run.spec

    @property
    def agent(self) -> AgentTypeSpec:
        assert isinstance(self.agent_type.spec, AgentTypeSpec)
        return self.agent_type.spec

    @property
    def project_spec(self) -> ProjectSpec | None:
        if self.project is None:
            return None
        return _project(self.project)

    def policy(self, document: Document) -> PolicyKindSpec:
        assert isinstance(document.spec, PolicyKindSpec)
        return document.spec

    @property
    def tools(self) -> tuple[str, ...]:
        """Return the tools whose hosts its networks name."""
        named = _names(self.agent_type, *self.policies, servers=self.mcp_servers)
        named = named.union(*(names_in(_hosts(one)) for one in self.network_sets))
        return tuple(tool for tool in TOOLS if tool in named)

    @property
    def queue(self) -> str | None:
        return self.project_spec.queue if self.project_spec is not None else None

    @property
    def shares_project(self) -> bool:
        """Tell whether its workspaces see the whole project."""
        return self.project_spec is not None and not self.project_spec.workspace_isolation

    @property
    def documents(self) -> tuple[Document, ...]:
        project = (self.project,) if self.project else ()
        host = (self.host_policy,) if self.host_policy else ()
        return (self.run, self.agent_type, *self.policies, *host, *project, *self.network_sets, *self.mcp_servers)


def select(
    documents: Sequence[Document], defaults: Mapping[str, Document], hidden: Callable[[str, str], bool] | None = None
) -> tuple[list[Selected], list[RunnerError]]:
    """Every run with its documents, members of a matrix one by one, in document order.

    ``hidden`` says of a kind and a name whether there may be such a document that has errors of its own: a
    reference to it is no finding.
    """
    known = _Known(documents, hidden or (lambda kind, name: False))
    findings: list[RunnerError] = []
    members: dict[str, list[Selected]] = {}
    left = _Left()
    if too_many := list(_too_many_templates(documents)):
        return [], [*too_many]
    for run in known.of("IncidentRun").values():
        try:
            found, complaints = _members(run, known, defaults, left)
        except OverBudget as error:
            return [], [*findings, error]
        members[run.name] = found
        findings += complaints
    if not members:
        findings.append(NothingToRun("there is no `IncidentRun` here", hint="check the rest with `runner validate`"))
    findings += _needs(known)
    names = {group: tuple(member.name for member in found) for group, found in members.items()}
    return [
        replace(member, needs=tuple(name for need in member.spec.needs for name in names.get(need, ())))
        for found in members.values()
        for member in found
    ], findings


def only(chosen: Sequence[Selected], name: str) -> list[Selected]:
    """The runs of one document, and all that they need. Raises ``UnknownReference``."""
    groups = {selected.group: selected.spec.needs for selected in chosen}
    if name not in groups:
        raise UnknownReference(f"there is no run `{name}`", hint=nearest(name, groups))
    wanted = [name]
    for group in wanted:  # grows while it is walked
        wanted += [need for need in groups[group] if need not in wanted]
    return [selected for selected in chosen if selected.group in wanted]


class _Left(Struct):
    """Remaining budget of runs and templates."""

    runs: int = RUNS
    bytes: int = BYTES
    filled: int = FILLED

    def count(self, run: Document) -> None:
        """Count one more run of a document. Raises ``OverBudget``."""
        self.runs -= 1
        if self.runs < 0:
            hint = "leave values out of a matrix, or split the documents among folders"
            raise OverBudget(f"these documents make more than {RUNS} runs", at=run.place("matrix"), hint=hint)

    def take(self, run: Document, documents: Sequence[Document]) -> None:
        """Count what a run is made of. Raises ``OverBudget``."""
        self.bytes -= sum(document.tree.size for document in documents)
        if self.bytes < 0:
            message = f"the runs up to this one are made of more than {BYTES >> 20} MiB, counted again for each run"
            hint = "take long texts out of what many runs share, or split the documents among folders"
            raise OverBudget(message, at=run.place(), hint=hint)
        self.filled -= sum(_places(document) for document in documents)
        if self.filled < 0:
            message = f"the runs up to this one fill more than {FILLED} places in templates, counted again for each run"
            raise OverBudget(message, at=run.place(), hint="split the documents among folders")


def _places(document: Document) -> int:
    """Return the most places that a document's templates have; an alias counts once, as it is read once."""
    return document.tree.source.text.count("{{")


def _too_many_templates(documents: Iterable[Document]) -> Iterator[OverBudget]:
    left = TEMPLATES
    for document in documents:
        left -= _places(document)
        if left < 0:
            message = f"the templates of these documents have more than {TEMPLATES} places to fill"
            yield OverBudget(message, at=document.place(), hint="split the documents among folders")
            return


class _Known:
    """Documents by kind and name."""

    def __init__(self, documents: Iterable[Document], hidden: Callable[[str, str], bool]) -> None:
        self.hidden = hidden
        self._by_kind: dict[str, dict[str, Document]] = {}
        for document in documents:
            self._by_kind.setdefault(document.kind, {})[document.name] = document

    def of(self, kind: str) -> Mapping[str, Document]:
        return self._by_kind.get(kind, {})

    def find(
        self, kind: str, name: str | None, at: Document, keys: tuple[str | int, ...], findings: list[RunnerError]
    ) -> Document | None:
        if name is None or name in self.of(kind):
            return self.of(kind)[name] if name is not None else None
        if self.hidden(kind, name):
            return None
        words = {"AgentType": "agent type", "McpServer": "MCP server"}.get(kind, kind.lower())
        message = f"`{name}` is not a known {words}"
        others = f"no {words} is in what was read: name the folder that has it"
        hint = nearest(name, self.of(kind)) if self.of(kind) else others
        findings.append(UnknownReference(message, at=at.place(*keys), hint=hint))
        return None


def _members(
    run: Document, known: _Known, defaults: Mapping[str, Document], left: _Left
) -> tuple[list[Selected], list[RunnerError]]:
    findings: list[RunnerError] = []
    spec = run.spec
    assert isinstance(spec, IncidentRunSpec)
    project = known.find("Project", spec.project, run, ("project",), findings)
    if project is None and spec.project is not None:
        return [], findings
    if project is not None:
        findings += _project_faults(project)
    findings += _matrix_faults(run, spec)
    members: list[Selected] = []
    for label, (agent_name, agent_keys), model, (incident, incident_keys) in _axes(spec, project):
        left.count(run)
        owner = project if project is not None and agent_keys == ("agent_type",) and spec.agent_type is None else run
        if agent_name is None:
            findings.append(MissingField("`agent_type` is missing", at=run.place(), hint="name the agent type"))
            continue
        agent = known.find("AgentType", agent_name, owner, agent_keys, findings)
        if agent is None:
            continue
        if model is not None and getattr(agent.spec, "agent") == "script":  # noqa: B009  # of its kind
            message = f"the agent of `{agent.name}` uses no model"
            findings.append(
                BadValue(message, at=run.place("matrix", "model", model[1]), hint="name agent types that do")
            )
            continue
        policies = _policies(run, agent, project, known, findings) or (defaults["Policy"],)
        servers = _mcp_servers(agent, known, findings)
        findings += _misspelt_sets(agent, known)
        name = f"{run.name}.{label}" if label else run.name
        member = Selected(
            name=name,
            run=run,
            agent_type=agent,
            policies=policies,
            project=project,
            incident=incident,
            incident_keys=incident_keys,
            model=model,
            network_sets=tuple(
                one for name, one in known.of("NetworkSet").items() if name in _names(agent, *policies, servers=servers)
            ),
            mcp_servers=servers,
        )
        left.take(run, member.documents)
        members.append(member)
    return members, findings


Keys = tuple[str | int, ...]
Axis = tuple[str, tuple[str | None, Keys], tuple[str, int] | None, tuple[str | None, Keys]]


def _axes(spec: IncidentRunSpec, project: Document | None) -> Iterator[Axis]:
    """Label, agent type, model and incident of each member, with where they are written."""
    single = spec.agent_type
    if single is None and project is not None:
        single = _project(project).agent_type
    agents: list[tuple[str, tuple[str | None, Keys]]] = [("", (single, ("agent_type",)))]
    models: list[tuple[str, tuple[str, int] | None]] = [("", None)]
    directory = spec.incident.directory if spec.incident else None
    incidents: list[tuple[str, tuple[str | None, Keys]]] = [("", (directory, ("incident", "directory")))]
    matrix = spec.matrix
    if matrix is not None and matrix.agent_type is not None:
        agents = [(name, (name, ("matrix", "agent_type", i))) for i, name in enumerate(matrix.agent_type)]
    if matrix is not None and matrix.model is not None:
        models = [(label, (name, i)) for i, (label, name) in enumerate(_labelled(matrix.model))]
    if matrix is not None and matrix.incident is not None:
        incidents = [(str(i + 1), (path, ("matrix", "incident", i))) for i, path in enumerate(matrix.incident)]
    for (agent_label, agent), (model_label, model), (label, incident) in product(agents, models, incidents):
        yield ".".join(part for part in (agent_label, model_label, label) if part), agent, model, incident


def _labelled(models: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each model with the part of a run's name that stands for it; those that look alike are told by their number."""
    labels = [re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-") for model in models]
    for number, (label, model) in enumerate(zip(labels, models, strict=True), start=1):
        yield label if label and labels.count(label) == 1 else f"{label}-{number}".strip("-"), model


def _matrix_faults(run: Document, spec: IncidentRunSpec) -> Iterator[RunnerError]:
    if spec.matrix is None:
        return
    if spec.matrix.agent_type is None and spec.matrix.model is None and spec.matrix.incident is None:
        yield BadValue("a matrix without an axis is a single run", at=run.place("matrix"), hint="name an axis")
    for axis, keys in (("agent_type", ("agent_type",)), ("incident", ("incident", "directory"))):
        if getattr(spec.matrix, axis) is not None and run.wrote(*keys):
            message = f"`{'.'.join(keys)}` is written here and in the matrix"
            yield BadValue(message, at=run.place(*keys), hint="remove one of the two")


def _policies(
    run: Document, agent: Document, project: Document | None, known: _Known, findings: list[RunnerError]
) -> tuple[Document, ...]:
    found: dict[str, Document] = {}
    for owner in (project, agent, run):
        if owner is None:
            continue
        name = getattr(owner.spec, "policy")  # noqa: B009  # a field that three kinds have
        document = known.find("Policy", name, owner, ("policy",), findings)
        if document is not None:
            found[document.name] = document
    return tuple(found.values())


def _hosts(network_set: Document) -> HostList:
    assert isinstance(network_set.spec, HostList)
    return network_set.spec


def _names(agent: Document, *policies: Document, servers: Sequence[Document] = ()) -> set[str]:
    """Return the words of networks that may be names of sets."""
    assert isinstance(agent.spec, AgentTypeSpec)
    others = (getattr(one.spec, "network") for one in (*policies, *servers))  # noqa: B009  # of these kinds
    return names_in(agent.spec.workspace.network).union(*(names_in(one) for one in others if one is not None))


def _misspelt_sets(agent: Document, known: _Known) -> Iterator[RunnerError]:
    """List the words of an agent's network that are nearly the name of a set, and no host that could be public."""
    assert isinstance(agent.spec, AgentTypeSpec)
    names = sorted({*TOOLS, *known.of("NetworkSet")})
    for word, keys in words_in(agent.spec.workspace.network, "workspace", "network"):
        if word in names or re.search("[.:]", word):
            continue
        hint = nearest(word, names)
        if hint.startswith("did you mean"):
            hint += f" a host of this name is `{{host: {word}, private: true}}`"
            yield UnknownReference(f"`{word}` is not a known set of hosts", at=agent.place(*keys), hint=hint)


def _mcp_servers(agent: Document, known: _Known, findings: list[RunnerError]) -> tuple[Document, ...]:
    """Return the documents of the servers that an agent uses by name."""
    assert isinstance(agent.spec, AgentTypeSpec)
    found: list[Document] = []
    for at, used in enumerate(used_servers(agent.spec.mcp_servers)):
        keys = ("mcp_servers", at) if isinstance(agent.spec.mcp_servers[at], str) else ("mcp_servers", at, "name")
        document = known.find("McpServer", used.name, agent, keys, findings) if used.is_hosted else None
        found += [document] if document is not None else []
    return tuple(found)


def _project(document: Document) -> ProjectSpec:
    return cast("ProjectSpec", document.spec)  # whose module is imported where there is such a document


def _project_faults(project: Document) -> Iterator[RunnerError]:
    spec = _project(project)
    if spec.requires_runner is not None and (complaint := version_complaint(spec.requires_runner, __version__)):
        yield RequiresRunner(complaint, at=project.place("requires_runner"))


_BOUND = re.compile(r"\s*(>=|<=|==|<|>)\s*(\d+(?:\.\d+)*)\s*")


def version_complaint(wanted: str, version: str) -> str | None:
    """Return why a version is outside of bounds such as ``>=0.1,<2``, or ``None``."""
    mine = _numbers(version)
    for part in wanted.split(","):
        found = _BOUND.fullmatch(part)
        if found is None:
            return f"`{part.strip()[:60]}` is not a bound such as `>=0.1`"
        width = max(len(mine), len(_numbers(found[2])))
        left, right = (numbers + (0,) * (width - len(numbers)) for numbers in (mine, _numbers(found[2])))
        holds = {">=": left >= right, "<=": left <= right, "==": left == right, "<": left < right, ">": left > right}
        if not holds[found[1]]:
            return f"this is runner {version}, and `{part.strip()}` is asked for"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))


def _needs(documents: _Known) -> Iterator[RunnerError]:
    """References to runs that are not there, and circles."""
    runs = documents.of("IncidentRun")
    known: dict[str, list[str]] = {}
    for name, run in runs.items():
        spec = run.spec
        assert isinstance(spec, IncidentRunSpec)
        known[name] = [need for need in spec.needs if need in runs]
        for position, need in enumerate(spec.needs):
            if need not in runs and not documents.hidden("IncidentRun", need):
                at = run.place("needs", position)
                others = [other for other in runs if other != name]
                alone = "no other run is in what was read: name the folder that has it"
                hint = nearest(need, others) if others else alone
                yield UnknownReference(f"`{need}` is not a known run", at=at, hint=hint)
    try:
        Graph(known).order()
    except Cycle as cycle:
        first = cycle.message.strip("`").split(" ", 1)[0]
        yield Cycle(cycle.message, at=runs[first].place("needs"), hint=cycle.hint)


def project_root(selected: Selected, document: Document) -> Path:
    """Return the directory that a document's references must stay in.

    It is the project's root, else the repository, else the document's folder."""
    spec = selected.project_spec
    if spec is not None and selected.project is not None:
        return Path(os.path.realpath(selected.project.directory / spec.root))
    return repository_root(document.directory)


def repository_root(directory: Path) -> Path:
    directory = Path(os.path.realpath(directory))
    return next((p for p in (directory, *directory.parents) if os.path.lexists(p / ".git")), directory)
