"""The events of a run: the only way in which its state changes.

Events are frozen and small; step output lives in files. The stored form is JSON with the type's own name, its tag, in
front (``encode``, ``decode``). A tag or field is never reused for another meaning, and an unknown one is refused, since
a fold over half a history would lie.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, TypeVar, Union, cast

from msgspec import Struct
from msgspec.structs import replace

from runner.core import codec
from runner.core.model import (
    DEFAULT_PROJECT,
    Check,
    ClusterRefusal,
    Holder,
    Isolation,
    IsolationClass,
    Limits,
    McpVerdict,
    ModelRefusal,
    NetworkRefusal,
    Outcome,
    PoolMissReason,
    SavedWork,
    StopReason,
    StopStage,
    Usage,
    Violation,
    WorkspaceStatus,
)

T = TypeVar("T")


class Event(Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    pass


class RunSubmitted(Event, frozen=True, tag="RunSubmitted", kw_only=True):
    """The first event of a run that is carried out elsewhere: it is pending until somebody there begins it.

    The fields are those of ``RunStarted``, which comes then.
    """

    name: str
    plan: str
    runner: str
    key: str | None = None
    manifests: str | None = None
    project: str = DEFAULT_PROJECT


class RunPlaced(Event, frozen=True, tag="RunPlaced"):
    """Written before the ``job`` of a pending run is made in a ``namespace`` of the cluster at ``server``."""

    job: str
    namespace: str
    server: str


class RunWaits(Event, frozen=True, tag="RunWaits"):
    """A pending run waits for something else from now on; an empty ``reason`` is that it may begin."""

    reason: str


class RunWithdrawn(Event, frozen=True, tag="RunWithdrawn"):
    """A pending run will not begin. Written together with its end, or not at all once it has begun."""


class RunStarted(Event, frozen=True, tag="RunStarted", kw_only=True):
    """``plan`` is the plan's digest; ``steps`` maps each step's id to its kind, in plan order; ``routine`` are those
    that are not worth a line when they went well, ``open_network`` those that may reach every public host.

    A store has one run of each ``key`` and name. ``resumes`` is the run that this one continues. ``rehearsal`` is the
    script file that stood in for every model. ``manifests`` is the file or folder that the plan was made from.
    ``project`` is the one that it belongs to.
    """

    name: str
    plan: str
    runner: str
    steps: dict[str, str]
    deadline_seconds: float
    attempt: int = 1
    key: str | None = None
    resumes: str | None = None
    rehearsal: str | None = None
    manifests: str | None = None
    project: str = DEFAULT_PROJECT
    routine: tuple[str, ...] = ()
    open_network: tuple[str, ...] = ()


class PhaseStarted(Event, frozen=True, tag="PhaseStarted"):
    """``phase`` is ``work``, or ``finalize``, which begins after work has ended for whatever reason."""

    phase: str


class StepStarted(Event, frozen=True, tag="StepStarted"):
    step: str


class StepReused(Event, frozen=True, tag="StepReused"):
    """A step is not performed: its result in ``from_run``, under the same content ``key``, is reused."""

    step: str
    from_run: str
    key: str


class StepEnded(Event, frozen=True, tag="StepEnded"):
    step: str
    outcome: Outcome


class CommandFailed(Event, frozen=True, tag="CommandFailed"):
    """A command failed its step. Its output lies between these byte offsets of the step's two logs."""

    step: str
    stdout: tuple[int, ...]
    stderr: tuple[int, ...]


class ResourceIntended(Event, frozen=True, tag="ResourceIntended"):
    """Written before anything outside the store is created; ``name`` finds it after a crash."""

    step: str
    kind: str
    name: str
    place: str = ""


class ResourceCreated(Event, frozen=True, tag="ResourceCreated"):
    step: str
    kind: str
    name: str


class ResourceRemovalStarted(Event, frozen=True, tag="ResourceRemovalStarted"):
    """Written before a resource is removed: nothing new uses it from here on."""

    step: str
    kind: str
    name: str


class ResourceRemoved(Event, frozen=True, tag="ResourceRemoved"):
    """A resource was removed, and its absence was verified."""

    step: str
    kind: str
    name: str


class LeaseAcquired(Event, frozen=True, tag="LeaseAcquired", kw_only=True):
    """Exclusive use of a workspace for ``ttl_seconds``. ``replaces`` is the lease that it replaces: an expired one or,
    with ``forced``, that of a holder known to be dead."""

    workspace: str
    lease: str
    holder: Holder
    fence: int
    ttl_seconds: float
    replaces: str = ""
    forced: bool = False


class LeaseRefreshed(Event, frozen=True, tag="LeaseRefreshed"):
    workspace: str
    lease: str
    ttl_seconds: float


class LeaseReleased(Event, frozen=True, tag="LeaseReleased"):
    workspace: str
    lease: str


class BaseCommitRecorded(Event, frozen=True, tag="BaseCommitRecorded"):
    """The checkout is complete; work is compared with ``commit``."""

    commit: str


class FileInjected(Event, frozen=True, tag="FileInjected"):
    """The runner is about to put a file of its own into the tree; it never counts as the agent's work."""

    path: str
    sha256: str


class ProtectedPathsHashed(Event, frozen=True, tag="ProtectedPathsHashed"):
    """Digests of the protected paths before the first command can reach them; empty for a path that does not exist."""

    digests: dict[str, str]


class ProviderChosen(Event, frozen=True, tag="ProviderChosen"):
    provider: str
    isolation: IsolationClass


class ProviderRejected(Event, frozen=True, tag="ProviderRejected"):
    """A provider of the chain cannot be used, for ``reason``."""

    provider: str
    reason: str


class FallbackStarted(Event, frozen=True, tag="FallbackStarted", kw_only=True):
    """``step`` failed with ``provider`` for ``reason``, before any step that is done only once.

    The ``repeated`` steps run again in the workspace of the next ``attempt``, with a provider further down the chain.
    """

    step: str
    provider: str
    reason: str
    attempt: int
    repeated: tuple[str, ...]


class RetryScheduled(Event, frozen=True, tag="RetryScheduled", kw_only=True):
    """An ``operation`` of a step failed in a way that may pass; it is repeated after ``pause_seconds``."""

    step: str
    operation: str
    code: str
    reason: str
    pause_seconds: float


class SlotClaimed(Event, frozen=True, tag="SlotClaimed"):
    """The workspace was taken from a warm pool, where it was ``slot``."""

    workspace: str
    slot: str


class PoolMissed(Event, frozen=True, tag="PoolMissed"):
    """The workspace is created cold, although a warm pool exists."""

    workspace: str
    reason: PoolMissReason


class ImagePullProgressed(Event, frozen=True, tag="ImagePullProgressed"):
    """An image is being downloaded for a step: the bytes received of those known to be needed.

    Every few seconds, and once more when it is there.
    """

    step: str
    image: str
    received_bytes: int
    expected_bytes: int


class IsolationObserved(Event, frozen=True, tag="IsolationObserved"):
    """Read back from inside the sandbox before the agent starts."""

    step: str
    isolation: Isolation


class LogOpened(Event, frozen=True, tag="LogOpened"):
    """The file that gets the output of a step's agent as it arrives, both streams interleaved."""

    step: str
    path: str


class ContextPreloaded(Event, frozen=True, tag="ContextPreloaded", kw_only=True):
    """The incident context of the prompt: estimated ``tokens`` of each of its ``parts``, and of all together.

    ``cut`` characters of the baseline were left out. ``headline`` is the baseline's first finding, in one line.
    """

    step: str
    parts: dict[str, int]
    tokens: int
    cut: int = 0
    headline: str = ""


class ModelRequestFinished(Event, frozen=True, tag="ModelRequestFinished", kw_only=True):
    """One request of a step's agent through the model gateway has ended; contents are not recorded.

    ``refusal`` says why the gateway answered it itself. Usage is ``estimated`` when the answer was cut off before it
    reported any.
    """

    step: str
    call: str
    model: str
    status: int
    sent_bytes: int
    received_bytes: int
    first_byte_seconds: float | None
    seconds: float
    usage: Usage
    estimated: bool = False
    refusal: ModelRefusal | None = None


class AgentStarted(Event, frozen=True, tag="AgentStarted"):
    """The agent's CLI is about to start with ``argv``, which does not contain its prompt.

    ``version`` is the CLI's, empty when unknown.
    """

    step: str
    argv: tuple[str, ...]
    version: str = ""


class CommandsReportedByAgent(Event, frozen=True, tag="CommandsReportedByAgent"):
    """Counts of the shell commands that a step's agent asked for, by their status, as reported by its CLI."""

    step: str
    executed: int
    denied: int
    unfinished: int


class UsageReportedByAgent(Event, frozen=True, tag="UsageReportedByAgent"):
    """Usage reported by an agent that had the key of its model; the gateway has not counted it."""

    step: str
    usage: Usage


class ClusterAccessOpened(Event, frozen=True, tag="ClusterAccessOpened"):
    """Commands of a step can read a cluster through the runner's proxy, without its credential."""

    step: str
    context: str
    server: str
    namespace: str


class ClusterRequestFinished(Event, frozen=True, tag="ClusterRequestFinished", kw_only=True):
    """One request of a step's commands to the cluster has ended; contents are not recorded.

    Beyond the first thousand of a step, ``count`` equal requests share one event without ``resource``. ``refusal`` says
    why the runner's proxy answered instead of the cluster.
    """

    step: str
    verb: str
    resource: str
    namespace: str
    status: int
    seconds: float
    refusal: ClusterRefusal | None = None
    count: int = 1


class ConnectionEnded(Event, frozen=True, tag="ConnectionEnded", kw_only=True):
    """One connection of a step's commands to a host has ended, or was refused; contents are not recorded.

    Beyond the first thousand of a step, ``count`` equal ones share one event without ``host``. ``address`` was dialled,
    or is ``proxy HOST:PORT`` for the proxy that led there. ``rule``, which is at ``origin`` in a manifest, allowed it;
    ``sent_bytes`` went to the host, with ``requests`` that got the ``credential`` of that name.
    """

    step: str
    host: str
    port: int
    address: str
    rule: str
    sent_bytes: int
    received_bytes: int
    seconds: float
    origin: str = ""
    requests: int = 0
    credential: str = ""
    refusal: NetworkRefusal | None = None
    count: int = 1


class WarningIssued(Event, frozen=True, tag="WarningIssued"):
    code: str
    message: str
    step: str = ""


class CancelRequested(Event, frozen=True, tag="CancelRequested"):
    """``reason`` is ``signal``, ``deadline``, ``lease`` or ``platform``."""

    reason: str


class StopStageReached(Event, frozen=True, tag="StopStageReached"):
    """A step's command is being stopped: by TERM, by KILL, or by ending the whole sandbox.

    After TERM it has at most ``grace_seconds`` to exit; after the other stages it has none.
    """

    step: str
    stage: StopStage
    reason: StopReason
    grace_seconds: float = 0.0


class OomKilled(Event, frozen=True, tag="OomKilled"):
    """The kernel killed ``count`` processes in a step's sandbox, which is out of memory; the sandbox lives on."""

    step: str
    count: int


class ProcessEscaped(Event, frozen=True, tag="ProcessEscaped"):
    """A process was killed and did not end. ``detail`` names it."""

    step: str
    detail: str


class ViolationsFound(Event, frozen=True, tag="ViolationsFound"):
    step: str
    violations: tuple[Violation, ...]


class ChecksFinished(Event, frozen=True, tag="ChecksFinished"):
    """All checks of a step, passed and failed, in order."""

    step: str
    checks: tuple[Check, ...]


class SnapshotPublished(Event, frozen=True, tag="SnapshotPublished", kw_only=True):
    commit: str
    tree: str
    base: str | None
    branch: str | None
    entries: int
    ignored: int
    changed: int


class AgentCommitsImported(Event, frozen=True, tag="AgentCommitsImported", kw_only=True):
    """The agent's own commits: ``count`` from the base to ``commit``, kept in ``bundle``.

    ``withheld`` says why there is no bundle; ``violations`` are those of all commits.
    """

    count: int = 0
    commit: str | None = None
    tree: str | None = None
    bundle: str | None = None
    bundle_sha256: str | None = None
    bundle_bytes: int = 0
    withheld: str = ""
    violations: tuple[Violation, ...] = ()


class WorkSaved(Event, frozen=True, tag="WorkSaved"):
    saved_work: SavedWork


class ArtifactsCopied(Event, frozen=True, tag="ArtifactsCopied", kw_only=True):
    """Written after the end of the run. ``sha256`` is of the list of its files there, which has the digest of each.

    ``url`` is that of the store of artifacts, without options.
    """

    url: str
    files: int
    bytes: int
    sha256: str


class RunEnded(Event, frozen=True, tag="RunEnded"):
    """The one terminal event."""

    outcome: Outcome
    exit_code: int


class WorkspaceRequested(Event, frozen=True, tag="WorkspaceRequested", kw_only=True):
    """Written before a workspace is created that belongs to no run. ``path`` is the directory that it adopts.

    ``not_enforced`` are requested limits that its provider cannot enforce on this host; ``image`` is the id of its
    image, for a provider that has images. ``tools`` are those that may be called in it, ``None`` for all.
    ``session`` is the one that it is made for, ``mcp_server`` the one that it hosts.
    """

    provider: str
    project: str
    persistent: bool
    limits: Limits
    ttl_seconds: float
    max_age_seconds: float | None = None
    path: str | None = None
    inode: int | None = None
    url: str | None = None
    branch: str | None = None
    not_enforced: Limits | None = None
    image: str | None = None
    tools: tuple[str, ...] | None = None
    session: str | None = None
    mcp_server: str | None = None


class WorkspaceAttached(Event, frozen=True, tag="WorkspaceAttached"):
    """A workspace became that of a ``session``, or with ``None`` nobody's again."""

    session: str | None


class WorkspaceStatusChanged(Event, frozen=True, tag="WorkspaceStatusChanged"):
    status: WorkspaceStatus
    reason: str = ""


class WorkspaceUsed(Event, frozen=True, tag="WorkspaceUsed"):
    """A workspace was used: it lives ``ttl_seconds`` from now, but never beyond its maximum age."""

    ttl_seconds: float
    max_age_seconds: float | None = None


class ToolCalled(Event, frozen=True, tag="ToolCalled"):
    """A tool was called in a workspace. ``outcome`` is ``ok``, or the code of what was wrong.

    ``by`` is the token that it was called with, empty for a command of this host.
    """

    tool: str
    outcome: str
    milliseconds: int
    by: str = ""


class WorkspaceSaved(Event, frozen=True, tag="WorkspaceSaved"):
    """Unsaved work of a workspace was saved; the patch is relative to the directory that holds it."""

    saved_work: SavedWork


class UnsavedWorkDiscarded(Event, frozen=True, tag="UnsavedWorkDiscarded"):
    """The user gave up the unsaved work of a workspace."""


class McpServerStarted(Event, frozen=True, tag="McpServerStarted"):
    """A hosted server answers, or in a run the ``server`` that the agent of ``step`` may use.

    ``tools`` are those that its clients may call.
    """

    tools: int
    step: str = ""
    server: str = ""


class McpServerEnded(Event, frozen=True, tag="McpServerEnded"):
    """A hosted server has ended; ``pause_seconds`` before it is started anew, ``None`` if it is not.

    In a run it is the ``server`` of the agent of ``step``.
    """

    how: str
    pause_seconds: float | None = None
    step: str = ""
    server: str = ""


class McpCallEnded(Event, frozen=True, tag="McpCallEnded", kw_only=True):
    """One call of a step's agent to an MCP server has ended; contents are not recorded.

    ``tool`` is a tool's name, or the method of a call that is none. Beyond the first thousand calls of a server,
    ``count`` equal ones share one event without ``tool``.
    """

    step: str
    server: str
    tool: str
    sent_bytes: int
    received_bytes: int
    seconds: float
    verdict: McpVerdict
    count: int = 1


class Recorded(NamedTuple):
    """A stored event: its run, its number in that run from 1, and its time (microseconds since the epoch, UTC)."""

    run: str
    seq: int
    at: int
    event: Event


ANY: Any = Union[tuple(Event.__subclasses__())]  # noqa: UP007  # of types that only this line lists


def with_texts(value: T, change: Callable[[str], str]) -> T:
    """Apply ``change`` to every text in an event or a value of one, except the values of enums."""
    return cast("T", _with_texts(value, change))


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    match value:
        case Enum():
            return value
        case str():
            return change(value)
        case tuple() | list():
            return type(value)(_with_texts(item, change) for item in value)
        case dict():
            return {_with_texts(key, change): _with_texts(item, change) for key, item in value.items()}
        case Struct():
            names = value.__struct_fields__
            return replace(value, **{name: _with_texts(getattr(value, name), change) for name in names})
    return value


def encode(event: Event) -> str:
    """Return the stored form: compact JSON that begins with the type, steps in plan order."""
    return codec.encode(event).decode()


def decode(body: str) -> Event:
    """Read the stored form. Raises ``ValueError``, also for a type that this version does not know."""
    return cast(Event, codec.decode(body, ANY))


def as_json(recorded: Recorded) -> dict[str, object]:
    """Return one line of ``events.jsonl`` and of ``--output jsonl``."""
    return {"run": recorded.run, "seq": recorded.seq, "at": recorded.at, **codec.plain(recorded.event)}
