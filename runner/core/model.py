"""Frozen values that several rooms share. They know nothing beyond themselves."""

from __future__ import annotations

from enum import Enum, StrEnum
from functools import total_ordering
from pathlib import Path
from typing import Literal

from msgspec import Struct

DEFAULT_PROJECT = "default"  # of what belongs to no project


Pull = Literal["missing", "always", "never"]  # when a registry is asked for an image


@total_ordering
class IsolationClass(Enum):
    """The strength of the boundary between an agent and the host; ordered, so that a floor is a comparison, and true
    if there is a boundary.
    """

    NONE = "none"
    NAMESPACES = "namespaces"
    KERNEL = "kernel"
    VM = "vm"

    def __bool__(self) -> bool:
        return self is not IsolationClass.NONE

    def __lt__(self, other: IsolationClass) -> bool:
        classes = list(IsolationClass)
        return classes.index(self) < classes.index(other)


class Feature(StrEnum):
    """A property that a provider may enforce; manifests ask for it and the compiler compares."""

    CPU = "cpu"
    MEMORY = "memory"
    DISK = "disk"
    PIDS = "pids"
    NETWORK_NONE = "network none"
    PROTECTED_PATHS = "protected paths"
    TOOLCHAINS = "toolchains"
    DEPENDENCIES = "dependencies"
    DEPENDENCY_COMMANDS = "dependency commands"
    BASE_IMAGE = "base image"
    RELAY = "relay"
    WARM_POOL = "warm pool"
    SECRET_FILES = "secret files"
    SHARED_PROJECT = "shared project"


class Limits(Struct, frozen=True):
    """Resource ceilings of a workspace; ``None`` means no limit of ours."""

    cpus: float | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    pids: int | None = None


class Mount(Struct, frozen=True):
    """A host path made visible inside. ``source`` is opened link-free before the sandbox starts."""

    source: Path
    target: str
    writable: bool = False


class Checkout(Struct, frozen=True, kw_only=True):
    """The repository to clone. Exactly one of ``url`` and ``path`` is set; ``commit`` pins it once Facts are known.

    A ``path`` from a stranger's manifest may not lead out of ``within``.
    """

    url: str | None = None
    path: Path | None = None
    branch: str | None = None
    commit: str | None = None
    depth: int | None = None
    include_dirty: bool = False
    submodules: bool = False
    lfs: bool = False
    within: Path | None = None


class Isolation(Struct, frozen=True, kw_only=True):
    """Isolation as read back from inside a sandbox, never as requested.

    ``interfaces`` is ``None`` where the provider gives no network namespace of its own; ``shared_namespaces`` are those
    shared with the host; ``capabilities`` is ``none`` or names the sets and their contents. ``filtered`` means that
    system calls that lead past the sandbox are blocked, such as sockets that reach the machine around a virtual one.
    """

    isolation: IsolationClass
    provider: str
    uid: int
    capabilities: str
    no_new_privileges: bool
    shared_namespaces: tuple[str, ...]
    interfaces: tuple[str, ...] | None
    read_only: tuple[str, ...]
    limits: Limits
    notes: tuple[str, ...] = ()
    filtered: bool = False


class SlotKey(Struct, frozen=True, kw_only=True):
    """The properties that a warm workspace shares with the workspaces that it can become.

    ``image`` is an id; ``toolchains`` are visible from the start. A ``shared`` workspace sees its project whole, and is
    never kept warm. ``policy`` stands for all policies of the run, and the least isolation that it accepts.
    ``protected`` are the protected paths, where a sandbox has to know them when it starts. ``place`` is as for
    ``Probe``.
    """

    provider: str
    image: str | None
    limits: Limits
    network: str = "none"
    toolchains: tuple[str, ...] = ()
    shared: bool = False
    policy: str = ""
    protected: tuple[str, ...] = ()
    place: str = ""


class SlotState(StrEnum):
    """State of a warm slot. ``CLAIMED``: chosen for a workspace, but not yet that workspace."""

    WARMING = "warming"
    READY = "ready"
    CLAIMED = "claimed"
    DRAINING = "draining"


class PoolMissReason(StrEnum):
    """The reason for a cold workspace although a pool exists: the property that differs, or the failure."""

    NO_KEEPER = "no keeper"
    EMPTY = "empty"
    DEAD = "dead"
    PROVIDER = "provider"
    IMAGE = "image"
    LIMITS = "limits"
    NETWORK = "network"
    SHAPE = "shape"
    POLICY = "policy"


class WorkspaceStatus(StrEnum):
    """State of a workspace, as its users see it."""

    CREATING = "creating"
    PROVISIONING = "provisioning"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    DESTROYING = "destroying"
    DESTROYED = "destroyed"
    ERROR = "error"


class Status(StrEnum):
    """State of a run or step. ``LOST`` is never stored: it is shown for a run whose runner died."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    LOST = "lost"

    @property
    def ended(self) -> bool:
        return self not in (Status.PENDING, Status.RUNNING)


class Reason(StrEnum):
    """The cause of a step's failure."""

    EXIT = "exit"
    TIMEOUT = "timeout"
    OOM = "oom"
    DISK = "disk"
    POLICY = "policy"
    NO_EVIDENCE = "no-evidence"
    SETUP = "setup"
    VERIFY = "verify"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    LEASE = "lease"
    LIMIT = "limit"
    PLATFORM = "platform"
    AUTH = "auth"
    MODEL = "model"
    BUDGET = "budget"
    QUOTA = "quota"
    GATEWAY = "gateway"
    TURNS = "turns"
    DENIED = "denied"
    CUT_OFF = "cut-off"
    MCP = "mcp"


class StopStage(StrEnum):
    """A measure that ends a command's processes; ``SANDBOX`` ends the whole sandbox."""

    TERM = "term"
    KILL = "kill"
    SANDBOX = "sandbox"


class StopReason(StrEnum):
    """The cause of a stop. ``LEFT_RUNNING``: the command had ended, its descendants had not."""

    COMMAND_DEADLINE = "command deadline"
    STEP_DEADLINE = "step deadline"
    RUN_DEADLINE = "run deadline"
    SIGNAL = "signal"
    SECOND_SIGNAL = "second signal"
    STOP_BUDGET = "stop budget"
    LEASE_LOST = "lease lost"
    DISK_FULL = "disk limit"
    LEFT_RUNNING = "left running"
    FAILURE = "failure"


class Outcome(Struct, frozen=True, kw_only=True):
    """The end of a step. ``message`` is one line; ``details`` holds all results, bad ones first."""

    status: Status
    reason: Reason | None = None
    message: str = ""
    warnings: tuple[str, ...] = ()
    details: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.status in (Status.SUCCEEDED, Status.SKIPPED)


def succeeded(message: str = "", *, warnings: tuple[str, ...] = (), details: tuple[str, ...] = ()) -> Outcome:
    return Outcome(status=Status.SUCCEEDED, message=message, warnings=warnings, details=details)


def failed(reason: Reason, message: str, *, details: tuple[str, ...] = ()) -> Outcome:
    return Outcome(status=Status.FAILED, reason=reason, message=message, details=details)


class Budget(Struct, frozen=True):
    """Ceilings of one agent's model usage; ``None`` means unlimited. ``turns`` counts answered requests.

    The last answer may exceed the tokens and dollars, but never dollars that are ``strict``.
    """

    tokens: int | None = None
    cost_usd: float | None = None
    turns: int | None = None
    strict: bool = False


class Usage(Struct, frozen=True, kw_only=True):
    """Model usage. ``input_tokens`` counts all that was sent, ``output_tokens`` all that came back.

    Of the input, ``cached_tokens`` were read from the provider's cache and ``cache_write_tokens`` written to it; of the
    output, ``reasoning_tokens`` were hidden. ``cost_usd`` is ``None`` as soon as one price is unknown.
    """

    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cost_usd: float | None = 0.0

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Usage) -> Usage:
        known = self.cost_usd is not None and other.cost_usd is not None
        return Usage(
            requests=self.requests + other.requests,
            input_tokens=self.input_tokens + other.input_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            cache_write_tokens=self.cache_write_tokens + other.cache_write_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
            cost_usd=(self.cost_usd or 0.0) + (other.cost_usd or 0.0) if known else None,
        )


class ModelRefusal(StrEnum):
    """The reason for which the gateway answered a request itself."""

    PATH = "path"  # the API has no such call, or it is not forwarded
    REQUEST = "request"  # malformed, too large, or would make the provider use the network
    MODEL = "model"
    BUDGET = "budget"
    GATEWAY = "gateway"  # the provider could not be reached, or stalled


class ClusterRefusal(StrEnum):
    """The reason for which a request of commands to a cluster was answered by the runner."""

    SECRETS = "secrets"
    WRITE = "write"
    REQUEST = "request"  # odd, or not known to read
    IMPERSONATION = "impersonation"  # in the name of somebody else
    BUSY = "busy"  # too many are under way
    CLUSTER = "cluster"  # not reached, or it did not go on


class McpVerdict(StrEnum):
    """The end of a call of an agent to an MCP server. From ``NOT_ALLOWED`` on the server never heard of it."""

    ANSWERED = "answered"
    FAILED = "failed"  # an error of the server, or a result that says that it is one
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"  # by the agent, or with it
    ENDED = "ended"  # the server did, before it answered
    SECRET = "secret"  # the answer had a secret of the server in it, and was withheld
    NOT_ALLOWED = "not-allowed"
    BUDGET = "budget"
    UNAVAILABLE = "unavailable"  # the server was not there, or had too many calls under way

    @property
    def refused(self) -> bool:
        return self in (McpVerdict.NOT_ALLOWED, McpVerdict.BUDGET)


class NetworkRefusal(StrEnum):
    """The reason for which commands got no connection to a host, or lost it."""

    NOT_ALLOWED = "not-allowed"
    PRIVATE = "private"  # all addresses of the host are
    UNRESOLVED = "unresolved"
    UNREACHABLE = "unreachable"
    MALFORMED = "malformed"  # a request or a host that may be read in two ways
    OTHER_NAME = "other-name"  # TLS asked for another host than the connection
    BUSY = "busy"  # too many are under way
    REQUEST = "request"  # a method or a path that the host's credential is not for
    CERTIFICATE = "certificate"  # TLS with the host, or with a command that gets a credential there, failed
    ECHO = "echo"  # the host gave a credential back
    IDLE = "idle"  # no byte came for too long
    TIME = "time"
    BYTES = "bytes"  # a session has carried as many as it may


class CommandStatus(StrEnum):
    """The end of a command that an agent asked for; ``UNFINISHED`` is one whose end its CLI did not report."""

    EXECUTED = "executed"
    DENIED = "denied"
    UNFINISHED = "unfinished"


class Command(Struct, frozen=True):
    """A shell command that an agent asked for, as reported by its CLI; ``exit`` is ``None`` if not reported."""

    text: str
    exit: int | None = None
    status: CommandStatus = CommandStatus.EXECUTED


class CheckKind(StrEnum):
    """The subject of a check of verify."""

    REPORT = "report"
    SECTION = "section"
    REFERENCE = "reference"
    REQUIRED = "required"
    FORBIDDEN = "forbidden"
    SETUP = "setup"
    COMMAND = "command"


class Check(Struct, frozen=True, kw_only=True):
    """One verified fact: ``what`` is the same in every run, ``found`` is the finding of this one.

    ``size_bytes`` is set for a report that exists.
    """

    kind: CheckKind
    what: str
    ok: bool
    found: str = ""
    size_bytes: int | None = None

    def __str__(self) -> str:
        between = " " if self.kind in (CheckKind.SETUP, CheckKind.COMMAND) else ": "
        return f"{self.what}{between}{self.found}" if self.found else self.what


class Verdict(Struct, frozen=True):
    """A policy's answer about one path; ``rule`` names the rule that decided."""

    allowed: bool
    rule: str


class Violation(Struct, frozen=True):
    """One path that breaks policy. ``path`` is relative, printable; ``rule`` as in a verdict."""

    path: str
    rule: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.rule}" + (f" ({self.detail})" if self.detail else "")


class Exit(Struct, frozen=True):
    """The end of a process. Without code and signal it is unknown, which never counts as success."""

    code: int | None = None
    signal: int | None = None
    oom: bool = False

    @property
    def ok(self) -> bool:
        return self.code == 0

    def __str__(self) -> str:
        if self.oom:
            return "was killed: out of memory"
        if self.signal is not None:
            return f"died by signal {self.signal}"
        return "ended, status unknown" if self.code is None else f"exited {self.code}"


class Handle(Struct, frozen=True, kw_only=True):
    """A workspace that outlives the process that made it; serialisable, and all that ``open`` needs.

    ``tree`` is the checkout on this host. ``private`` holds what must not be in it (home, temporary
    files, inputs, output) and belongs to the same owner. ``uid`` is the host user that commands run as.
    ``project_tree`` is the directory of ``project`` where commands see that whole, and ``None`` where they see
    ``tree`` alone. An ``adopted`` tree was there before the workspace, and stays when it goes.
    """

    provider: str
    id: str
    tree: Path
    private: Path
    uid: int
    limits: Limits = Limits()
    project: str = DEFAULT_PROJECT
    project_tree: Path | None = None
    adopted: bool = False

    @property
    def slot(self) -> str | None:
        """The id that the workspace had in a warm pool, and its directories are named after; ``None`` for any other."""
        return self.private.name if self.private.name != self.id else None


class RunHolder(Struct, frozen=True, tag="run"):
    """A run that holds a lease, or its recovery."""

    run: str
    recovering: bool = False

    def __str__(self) -> str:
        return f"the recovery of run {self.run}" if self.recovering else f"run {self.run}"


class CommandHolder(Struct, frozen=True, tag="command"):
    """A command that holds a lease, by its name and the number of its process on its host."""

    name: str
    pid: int

    def __str__(self) -> str:
        return f"{self.name} {self.pid}"


Holder = RunHolder | CommandHolder


class Lease(Struct, frozen=True, kw_only=True):
    """Exclusive use of a workspace: its one row. A free one has no ``id`` and no ``holder``, and keeps its ``fence``.

    ``runner`` is the process that acquired it. Times are microseconds since the epoch by the store's clock.
    """

    workspace: str
    fence: int
    id: str = ""
    holder: Holder | None = None
    acquired: int = 0
    refreshed: int = 0
    expires: int = 0
    runner: str | None = None

    def live(self, now: int) -> bool:
        return bool(self.id) and now < self.expires


class Fence(Struct, frozen=True):
    """Proof of a lease that goes with every write of its holder: the lease and its fencing number."""

    workspace: str
    lease: str
    number: int


class ClockReference(Struct, frozen=True):
    """The wall clock of this host relative to its boot: ``offset`` is the difference in microseconds."""

    boot: str
    offset: int


class SavedWork(Struct, frozen=True, kw_only=True):
    """Proof that work was saved before teardown. ``patch`` is relative to the run's directory.

    ``withheld`` means that policy was broken: the patch leaves out the offending files and nothing was published.
    ``outputs`` are the delivered files of ``/output``.
    """

    commit: str | None
    patch: str | None
    patch_sha256: str | None
    patch_bytes: int
    changed: int
    withheld: bool = False
    left_out: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
