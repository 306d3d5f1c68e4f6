"""A run with nothing left to look up, and the Facts that were gathered for it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from runner.core.errors import Place, RunnerError, Unenforceable
from runner.core.hosts import NetworkSpec
from runner.core.injection import Injection
from runner.core.model import Budget, Checkout, Feature, IsolationClass, Limits, Mount, Pull
from runner.manifest.load import DEFAULTS
from runner.plan.model import PlannedMessage, PlannedWebhook, SecretGrant
from runner.spec.checkout import TaskContext

if TYPE_CHECKING:
    from runner.ports.provider import Probe

MAX_LOCK_FILE = 32 << 20  # bytes of a file that dependencies are made from
AGENTS_FILE = "AGENTS.md"  # at the root of a project: what it tells every agent

Command = tuple[str, ...]  # an argv; a string in a manifest became ("sh", "-c", string)


class ContextFile(Struct, frozen=True, kw_only=True):
    """A file that a run takes from beside its manifest: its content's hash is planned, its bytes are checked later.

    Of one that is not ``whole`` the hash is that of size and time of change, and nothing is checked. ``text`` is the
    content where a saved plan brings it to a host that does not have the file.
    """

    path: Path
    sha256: str
    size: int
    whole: bool = True
    text: str | None = None


class CommitFact(Struct, frozen=True):
    """A source as found: the commit that the checkout means, and the branch name that the agent will see."""

    commit: str
    branch: str
    dirty: bool


class PartsFact(Struct, frozen=True):
    """The parts that a commit only refers to: its submodules as ``.gitmodules`` lists them, and whether it uses LFS."""

    submodules: tuple[str, ...] = ()
    lfs: bool = False


class PolicyFile(Struct, frozen=True):
    """A repository's own policy, as the commit that a run starts from has it."""

    commit: str
    content: bytes


class CliVersion(Struct, frozen=True):
    """The version of an agent's CLI as it is installed, and the one that this runner is tested with."""

    found: str
    tested: str

    @property
    def is_tested(self) -> bool:
        return self.tested in ("", self.found)


class Lent(Struct, frozen=True):
    """Directories of this host that a run's commands see.

    ``toolchains`` lie at their own paths, ``dependencies`` in the tree; ``environment`` holds the
    variables by which toolchains find their files.
    """

    toolchains: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    dependencies: tuple[Mount, ...] = ()


class DependencySpec(Struct, frozen=True):
    """A command that installs dependencies: it sees ``files`` of the repository only, and fills ``keep``.

    Paths of ``keep`` are relative to the tree or, after ``~/``, to the home.
    """

    argv: Command
    files: tuple[str, ...]
    keep: tuple[str, ...]


class ClusterFact(Struct, frozen=True, kw_only=True):
    """The cluster that a kubeconfig leads to. ``exposed`` says who else can read the file; it is not planned.

    ``plug_in`` is the program that gives the credential, as the kubeconfig writes it, and ``plug_in_sha256`` of it with
    its arguments and variables.
    """

    context: str
    server: str
    namespace: str
    exposed: str = ""
    plug_in: str = ""
    plug_in_sha256: str = ""

    def pinned(self) -> dict[str, str]:
        exec = {"plug_in": self.plug_in, "plug_in_sha256": self.plug_in_sha256} if self.plug_in else {}
        return {"context": self.context, "server": self.server, "namespace": self.namespace, **exec}


class Wanted(StrEnum):
    """A thing that a run asks of the host, which may be missing there."""

    PROVIDERS = "providers"
    CHECKOUT = "checkout"
    IMAGE = "image"
    CLUSTER = "cluster"
    TOOLCHAINS = "toolchains"
    DEPENDENCIES = "dependencies"
    SCRIPT = "script"
    INCIDENT = "incident"
    SKILL = "skill"
    NETWORK = "network"
    SUBMODULES = "repo_source.submodules"
    LFS = "repo_source.lfs"
    AGENTS_FILE = "agents file"
    MCP = "mcp server"


class Missing(Struct, frozen=True):
    """A thing that a run does not get, and why; ``skill`` is the name of a skill, or of a server."""

    what: Wanted
    error: RunnerError
    skill: str = ""


class McpFact(Struct, frozen=True, kw_only=True):
    """The place of a hosted server: the provider, how it isolates, what pins the image, what is lent to it, and the
    limits that hold there, defaults included; what exceeds that of memory may end it whole.
    """

    provider: str = ""
    isolation: IsolationClass | None = None
    image: str | None = None
    lent: Lent = Lent()
    limits: Limits | None = None
    ends_whole: bool = False

    def pinned(self) -> dict[str, object]:
        return {"provider": self.provider, "image": self.image}


class RunFacts(Struct, frozen=True, kw_only=True):
    """Facts of one run; names of files are those shown to people.

    ``policy`` is the one of its repository, ``image`` what pins its image, ``agents_file`` the ``AGENTS.md`` of its
    project. ``lock_files`` are the files that dependencies are made from, by path, with the hash of each.
    ``incident`` is the incident's document for templates, and ``incident_files`` are ``None`` without one;
    ``left_out`` says which of its files no agent sees. ``skills`` are files by their paths below the skill's name.
    ``networks`` are the hosts that tools are configured to use, by the tool's name; ``mcp`` the places of servers.
    Resolving reports what is ``missing`` at its place, and with any of it there is no plan.
    """

    commit: CommitFact | None = None
    parts: PartsFact = PartsFact()
    policy: PolicyFile | None = None
    image: str | None = None
    cluster: ClusterFact | None = None
    cli: CliVersion | None = None
    lent: Lent | None = None
    lock_files: Mapping[str, str] = {}
    script: ContextFile | None = None
    agents_file: ContextFile | None = None
    skills: Mapping[str, ContextFile] = {}
    incident: Mapping[str, object] = {}
    incident_files: Mapping[str, ContextFile] | None = None
    left_out: str = ""
    networks: Mapping[str, NetworkSpec] = {}
    mcp: Mapping[str, McpFact] = {}
    missing: tuple[Missing, ...] = ()

    @property
    def files(self) -> dict[str, Mapping[str, ContextFile]]:
        """Return the files beside the manifest by kind and name; kinds without any are left out."""
        kinds = {
            "script": {self.script.path.name: self.script} if self.script is not None else {},
            "incident": self.incident_files or {},
            "skills": self.skills,
            "agents": {AGENTS_FILE: self.agents_file} if self.agents_file is not None else {},
        }
        return {kind: files for kind, files in kinds.items() if files}

    def lacks(self, what: Wanted) -> RunnerError | None:
        """Return why a thing is missing; ``None`` if it is not."""
        return next((missing.error for missing in self.missing if missing.what is what), None)

    def pinned(self) -> dict[str, object]:
        """Return the facts that the digest covers: all but host paths and what may be renewed on a host."""
        found = {
            "commit": self.commit,
            "policy": sha256(self.policy.content).hexdigest() if self.policy is not None else None,
            "image": self.image,
            "lock_files": self.lock_files,
            "cluster": self.cluster.pinned() if self.cluster is not None else None,
            "files": {
                kind: {name: {"sha256": file.sha256, "size": file.size} for name, file in files.items()}
                for kind, files in self.files.items()
            },
            "networks": {tool: one.pinned() for tool, one in self.networks.items()},
            "mcp_servers": {name: one.pinned() for name, one in self.mcp.items()},
        }
        return {name: value for name, value in found.items() if value}


class Facts(Struct, frozen=True):
    """State of this host when the plan was made.

    ``open`` Facts were gathered with ``--offline``: no probes, commits, images or policies.
    """

    probes: Mapping[str, Probe]
    runs: Mapping[str, RunFacts] = {}
    open: bool = False

    def of(self, run: str) -> RunFacts:
        return self.runs.get(run) or RunFacts()

    def pinned(self) -> dict[str, object]:
        """Return the facts that the digest covers."""
        runs = {name: run.pinned() for name, run in self.runs.items()}
        return {"probes": self.probes, "runs": runs, "open": self.open}


class PolicySpec(Struct, frozen=True, kw_only=True):
    """One policy's ceilings; all of a run's policies hold together."""

    name: str
    origin: str
    allowed_paths: tuple[str, ...]
    forbidden_patterns: tuple[str, ...]
    max_file_size: int
    providers: tuple[str, ...] | None
    min_isolation: IsolationClass
    secrets: tuple[str, ...] | None = None
    mcp_servers: tuple[str, ...] | None = None
    network: Mapping[str, NetworkSpec] | None = None  # by step

    @property
    def ceilings(self) -> tuple[object, ...]:
        """Return the path rules."""
        return self.allowed_paths, self.forbidden_patterns, self.max_file_size


class FromEnv(Struct, frozen=True, tag="env"):
    variable: str


class FromFile(Struct, frozen=True, tag="file"):
    """``path`` may begin with ``~/``; a relative one of the manifest is absolute by now."""

    path: str


class FromCommand(Struct, frozen=True, tag="command"):
    argv: Command


class FromKeyring(Struct, frozen=True, tag="keyring"):
    service: str
    user: str


class SecretSpec(Struct, frozen=True, kw_only=True):
    """A value that commands of some steps get, in a variable or, ``as_file``, in a file; and where it is until then.

    With an ``injection`` they never get it: requests of theirs do.
    """

    name: str
    source: FromEnv | FromFile | FromCommand | FromKeyring
    steps: tuple[str, ...]
    as_file: bool
    at: Place
    injection: Injection | None = None


class Demand(Struct, frozen=True):
    """A feature that the run wants of its provider. ``written``: a manifest asks for it, so it must be enforced."""

    feature: Feature
    text: str
    at: Place
    written: bool

    @property
    def origin(self) -> str:
        return f"{self.at.file}:{self.at.line}" if self.written else DEFAULTS


class Warm(Struct, frozen=True, kw_only=True):
    """Key of the warm pool slots that fit a run, beside image, limits and provider.

    ``size`` is the number of slots to keep; ``policy`` is a digest of the policies and the manifest's demands.
    ``protected`` is for providers that must know it when a sandbox starts.
    """

    size: int
    network: str
    toolchains: tuple[str, ...]
    policy: str
    protected: tuple[str, ...] = ()


class ScriptSpec(Struct, frozen=True):
    """Script of the ``script`` agent: shell text, or a list of files to write."""

    path: Path | None
    name: str
    files: tuple[tuple[str, str, bool], ...] = ()  # path, content, executable


class ModelSpec(Struct, frozen=True):
    """The model that an agent works with, and what it may use of it. ``key_inside``: the CLI gets the key itself."""

    name: str
    budget: Budget
    key_inside: bool
    tools: tuple[str, ...] | None


class ClusterSpec(Struct, frozen=True, kw_only=True):
    """The cluster that commands may read. ``kubeconfig`` is a path of this host, or several with ``:`` between them."""

    kubeconfig: str
    context: str
    server: str
    namespace: str
    access: str
    plug_in: str = ""
    plug_in_sha256: str = ""


class HostedServer(Struct, frozen=True, kw_only=True):
    """A server in a sandbox of its own. ``manifest`` is the line of its document, ``key`` the name of what was approved
    of it: another command, image or environment is another server. ``limits_origin`` is the line of its limits.
    """

    manifest: str
    key: str
    command: Command
    provider: str
    base_image: str | None
    image: str | None
    toolchains: tuple[str, ...]
    env: Mapping[str, str]
    network: NetworkSpec
    limits: Limits
    limits_origin: str
    ends_whole: bool
    secrets: tuple[SecretGrant, ...]
    injected: tuple[Injection, ...]
    restart: str
    health_interval: float
    health_timeout: float


class RemoteServer(Struct, frozen=True, kw_only=True):
    """A server elsewhere. ``network`` is the one host that it is reached at, ``key`` as for a hosted one."""

    url: str
    key: str
    network: NetworkSpec
    injection: Injection | None


class McpServer(Struct, frozen=True, kw_only=True):
    """A server that an agent may use: ``hosted``, ``remote``, or a command ``inside`` the agent's own workspace. Of its
    ``tools`` the agent gets those that are there, of ``None`` all. ``passed`` are the capabilities of the agent that it
    may use, ``timeout`` is that of a call.
    """

    name: str
    origin: str
    tools: tuple[str, ...] | None
    only_tools: bool
    max_calls: int | None
    timeout: float
    passed: tuple[str, ...] = ()
    hosted: HostedServer | None = None
    remote: RemoteServer | None = None
    inside: Command = ()

    @property
    def key(self) -> str:
        found = self.hosted or self.remote
        return found.key if found is not None else self.name

    @property
    def network(self) -> NetworkSpec:
        found = self.hosted or self.remote
        return found.network if found is not None else NetworkSpec()

    @property
    def injected(self) -> tuple[Injection, ...]:
        if self.hosted is not None:
            return self.hosted.injected
        return (self.remote.injection,) if self.remote is not None and self.remote.injection is not None else ()

    @property
    def secret_names(self) -> list[str]:
        given = self.hosted.secrets if self.hosted is not None else ()
        return [one.name for one in given] + [one.secret for one in self.injected]

    def pinned(self) -> object:
        """Return all that decides what the agent gets, without where it is written."""
        hosted, remote = self.hosted, self.remote
        place: list[object] = [remote.url, str(remote.injection)] if remote is not None else [*self.inside]
        if hosted is not None:
            place = [hosted.key, hosted.image, hosted.limits, sorted(self.secret_names)]
        return [self.name, self.tools, self.only_tools, self.max_calls, self.passed, self.network.pinned(), *place]


class CommandCheck(Struct, frozen=True):
    argv: Command
    timeout_seconds: float | None
    exit: int


class ReportCheck(Struct, frozen=True):
    path: str
    min_bytes: int
    sections: tuple[str, ...]


class VerifySpec(Struct, frozen=True, kw_only=True):
    setup: tuple[Command, ...]
    required: tuple[str, ...]
    forbidden: tuple[str, ...]
    report: ReportCheck | None
    commands: tuple[CommandCheck, ...]

    @property
    def needs_tree(self) -> bool:
        return bool(self.setup or self.required or self.forbidden or self.commands)


class SetupSpec(Struct, frozen=True):
    commands: tuple[Command, ...]
    timeout_seconds: float  # of each command
    may_fail: bool


class SnapshotSpec(Struct, frozen=True):
    branch: str | None
    needs_change: bool


class RunSpec(Struct, frozen=True, kw_only=True):
    """One incident run, complete. ``origins`` maps a step kind, feature or field to the manifest line that decided it;
    ``group`` is the document's name, shared by the members of a matrix; ``outputs`` maps names to files,
    ``protected`` paths to the lines that ask for them. Workspaces of a ``shared`` project see it whole, so that
    what the project protects is ``unprotected``. ``member`` is the name of one whose incident other members of its
    matrix have as well, else empty.
    """

    name: str
    origin: str
    agent: str
    script: ScriptSpec
    model: ModelSpec | None
    system: str
    prompt: str
    user: str
    env: Mapping[str, str]
    task: TaskContext
    incident: Path | None
    checkout: Checkout | None
    branch: str
    providers: tuple[str, ...]
    providers_at: Place
    base_image: str | None
    pull: Pull
    isolation: IsolationClass
    limits: Limits
    warm: Warm
    demands: tuple[Demand, ...]
    networks: Mapping[str, NetworkSpec]  # by step
    best_effort: bool
    setup: SetupSpec
    project: str
    shared: bool
    unprotected: tuple[str, ...]
    protected: Mapping[str, str]
    lent: Lent
    dependencies: tuple[DependencySpec, ...]
    untrusted: bool
    post_hooks: tuple[Command, ...]
    policies: tuple[PolicySpec, ...]
    verify: VerifySpec | None
    message: str
    snapshot: SnapshotSpec | None
    timeouts: Mapping[str, float]
    deadline_seconds: float
    stop_budget_seconds: float
    origins: Mapping[str, str]
    needs: tuple[str, ...]
    group: str
    max_parallel: int | None
    outputs: Mapping[str, str]
    secrets: tuple[SecretSpec, ...] = ()
    webhook: PlannedWebhook | None = None
    messages: tuple[PlannedMessage, ...] = ()
    debug: bool = False
    member: str = ""
    preload: tuple[str, ...] = ()
    namespace: str | None = None  # of the incident: as the manifest says, else as the incident itself does
    cluster: ClusterSpec | None = None
    skills: tuple[str, ...] = ()
    mcp_servers: tuple[McpServer, ...] = ()
    queue: str | None = None


def no_image(spec: RunSpec, provider: str) -> RunnerError:
    """The finding that a provider makes workspaces of an image, and that none is named."""
    hint = "name one as `workspace.base_image`"
    return Unenforceable(
        f"`{provider}` makes workspaces from an image, and none is named", at=spec.providers_at, hint=hint
    )
