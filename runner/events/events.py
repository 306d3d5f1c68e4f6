"""The events of a run: the only way in which its state changes.

Events are frozen and small; step output lives in files. The stored form is a type name and a JSON body (``encode``,
``decode``). A type or field is never reused for another meaning, and an unknown type is refused, since a fold over
half a history would lie.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast, get_type_hints

from runner.core.model import (
    Check,
    CheckKind,
    Isolation,
    IsolationClass,
    Limits,
    Outcome,
    PoolMissReason,
    Reason,
    SavedWork,
    Status,
    StopReason,
    StopStage,
    Usage,
    Violation,
    WorkspaceStatus,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Event:
    pass


@dataclass(frozen=True)
class RunStarted(Event):
    """``plan`` is the plan's digest; ``steps`` maps each step's id to its kind, in plan order.

    A store has one run of each ``key`` and name. ``resumes`` is the run that this one continues. ``rehearsal`` is the
    script file that stood in for every model. ``manifests`` is the file or folder that the plan was made from.
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


@dataclass(frozen=True)
class PhaseStarted(Event):
    """``phase`` is ``work``, or ``finalize``, which begins after work has ended for whatever reason."""

    phase: str


@dataclass(frozen=True)
class StepStarted(Event):
    step: str


@dataclass(frozen=True)
class StepReused(Event):
    """A step is not performed: its result in ``from_run``, under the same content ``key``, is reused."""

    step: str
    from_run: str
    key: str


@dataclass(frozen=True)
class StepEnded(Event):
    step: str
    outcome: Outcome


@dataclass(frozen=True)
class CommandFailed(Event):
    """A command failed its step. Its output lies between these byte offsets of the step's two logs."""

    step: str
    stdout: tuple[int, ...]
    stderr: tuple[int, ...]


@dataclass(frozen=True)
class ResourceIntended(Event):
    """Written before anything outside the store is created; ``name`` finds it after a crash."""

    step: str
    kind: str
    name: str
    place: str = ""


@dataclass(frozen=True)
class ResourceCreated(Event):
    step: str
    kind: str
    name: str


@dataclass(frozen=True)
class ResourceRemovalStarted(Event):
    """Written before a resource is removed: nothing new uses it from here on."""

    step: str
    kind: str
    name: str


@dataclass(frozen=True)
class ResourceRemoved(Event):
    """A resource was removed, and its absence was verified."""

    step: str
    kind: str
    name: str


@dataclass(frozen=True)
class LeaseAcquired(Event):
    """Exclusive use of a workspace for ``ttl_seconds``. ``replaces`` is the lease that it replaces: an expired one or,
    with ``forced``, that of a holder known to be dead."""

    workspace: str
    lease: str
    holder: str
    fence: int
    ttl_seconds: float
    replaces: str = ""
    forced: bool = False


@dataclass(frozen=True)
class LeaseRefreshed(Event):
    workspace: str
    lease: str
    ttl_seconds: float


@dataclass(frozen=True)
class LeaseReleased(Event):
    workspace: str
    lease: str


@dataclass(frozen=True)
class BaseCommitRecorded(Event):
    """The checkout is complete; work is compared with ``commit``."""

    commit: str


@dataclass(frozen=True)
class FileInjected(Event):
    """The runner is about to put a file of its own into the tree; it never counts as the agent's work."""

    path: str
    sha256: str


@dataclass(frozen=True)
class ProtectedPathsHashed(Event):
    """Digests of the protected paths before the first command can reach them; empty for a path that does not exist."""

    digests: dict[str, str]


@dataclass(frozen=True)
class ProviderChosen(Event):
    provider: str
    isolation: IsolationClass


@dataclass(frozen=True)
class ProviderRejected(Event):
    """A provider of the chain cannot be used, for ``reason``."""

    provider: str
    reason: str


@dataclass(frozen=True)
class FallbackStarted(Event):
    """``step`` failed with ``provider`` for ``reason``, before any step that is done only once.

    The ``repeated`` steps run again in the workspace of the next ``attempt``, with a provider further down the chain.
    """

    step: str
    provider: str
    reason: str
    attempt: int
    repeated: tuple[str, ...]


@dataclass(frozen=True)
class RetryScheduled(Event):
    """An ``operation`` of a step failed in a way that may pass; it is repeated after ``pause_seconds``."""

    step: str
    operation: str
    code: str
    reason: str
    pause_seconds: float


@dataclass(frozen=True)
class SlotClaimed(Event):
    """The workspace was taken from a warm pool, where it was ``slot``."""

    workspace: str
    slot: str


@dataclass(frozen=True)
class PoolMissed(Event):
    """The workspace is created cold, although a warm pool exists."""

    workspace: str
    reason: PoolMissReason


@dataclass(frozen=True)
class IsolationObserved(Event):
    """Read back from inside the sandbox before the agent starts."""

    step: str
    isolation: Isolation


@dataclass(frozen=True)
class LogOpened(Event):
    """The file that gets the output of a step's agent as it arrives, both streams interleaved."""

    step: str
    path: str


@dataclass(frozen=True)
class ContextPreloaded(Event):
    """The incident context of the prompt: estimated ``tokens`` of each of its ``parts``, and of all together.

    ``cut`` characters of the baseline were left out. ``headline`` is the baseline's first finding, in one line.
    """

    step: str
    parts: dict[str, int]
    tokens: int
    cut: int = 0
    headline: str = ""


@dataclass(frozen=True)
class ModelRequestFinished(Event):
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
    refusal: str | None = None


@dataclass(frozen=True)
class AgentStarted(Event):
    """The agent's CLI is about to start with ``argv``, which does not contain its prompt.

    ``version`` is the CLI's, empty when unknown.
    """

    step: str
    argv: tuple[str, ...]
    version: str = ""


@dataclass(frozen=True)
class CommandsReportedByAgent(Event):
    """Counts of the shell commands that a step's agent asked for, by their status, as reported by its CLI."""

    step: str
    executed: int
    denied: int
    unfinished: int


@dataclass(frozen=True)
class UsageReportedByAgent(Event):
    """Usage reported by an agent that had the key of its model; the gateway has not counted it."""

    step: str
    usage: Usage


@dataclass(frozen=True)
class ClusterAccessOpened(Event):
    """Commands of a step can read a cluster through the runner's proxy, without its credential."""

    step: str
    context: str
    server: str
    namespace: str


@dataclass(frozen=True)
class ClusterRequestFinished(Event):
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
    refusal: str | None = None
    count: int = 1


@dataclass(frozen=True)
class WarningIssued(Event):
    code: str
    message: str
    step: str = ""


@dataclass(frozen=True)
class CancelRequested(Event):
    """``reason`` is ``signal``, ``deadline``, ``lease`` or ``platform``."""

    reason: str


@dataclass(frozen=True)
class StopStageReached(Event):
    """A step's command is being stopped: by TERM, by KILL, or by ending the whole sandbox.

    After TERM it has at most ``grace_seconds`` to exit; after the other stages it has none.
    """

    step: str
    stage: StopStage
    reason: StopReason
    grace_seconds: float = 0.0


@dataclass(frozen=True)
class OomKilled(Event):
    """The kernel killed ``count`` processes in a step's sandbox, which is out of memory; the sandbox lives on."""

    step: str
    count: int


@dataclass(frozen=True)
class ProcessEscaped(Event):
    """A process was killed and did not end. ``detail`` names it."""

    step: str
    detail: str


@dataclass(frozen=True)
class ViolationsFound(Event):
    step: str
    violations: tuple[Violation, ...]


@dataclass(frozen=True)
class ChecksFinished(Event):
    """All checks of a step, passed and failed, in order."""

    step: str
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class SnapshotPublished(Event):
    commit: str
    tree: str
    base: str | None
    branch: str | None
    entries: int
    ignored: int
    changed: int


@dataclass(frozen=True)
class AgentCommitsImported(Event):
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


@dataclass(frozen=True)
class WorkSaved(Event):
    saved_work: SavedWork


@dataclass(frozen=True)
class RunEnded(Event):
    """The one terminal event."""

    outcome: Outcome
    exit_code: int


@dataclass(frozen=True)
class WorkspaceRequested(Event):
    """Written before a workspace is created that belongs to no run. ``path`` is the directory that it adopts.

    ``not_enforced`` are requested limits that its provider cannot enforce on this host; ``image`` is the id of its
    image, for a provider that has images.
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


@dataclass(frozen=True)
class WorkspaceStatusChanged(Event):
    status: WorkspaceStatus
    reason: str = ""


@dataclass(frozen=True)
class WorkspaceUsed(Event):
    """A workspace was used: it lives ``ttl_seconds`` from now, but never beyond its maximum age."""

    ttl_seconds: float
    max_age_seconds: float | None = None


@dataclass(frozen=True)
class WorkspaceSaved(Event):
    """Unsaved work of a workspace was saved; the patch is relative to the directory that holds it."""

    saved_work: SavedWork


@dataclass(frozen=True)
class UnsavedWorkDiscarded(Event):
    """The user gave up the unsaved work of a workspace."""


class Recorded(NamedTuple):
    """A stored event: its run, its number in that run from 1, and its time (microseconds since the epoch, UTC)."""

    run: str
    seq: int
    at: int
    event: Event


_TYPES: dict[str, type[Event]] = {cls.__name__: cls for cls in Event.__subclasses__()}
_VALUES = (Check, Outcome, Isolation, Limits, SavedWork, Usage, Violation)
_ENUMS = (CheckKind, Status, Reason, StopStage, StopReason, IsolationClass, WorkspaceStatus, PoolMissReason)


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
        case _ if is_dataclass(value) and not isinstance(value, type):
            names = [each.name for each in fields(value) if each.init]
            return replace(value, **{name: _with_texts(getattr(value, name), change) for name in names})
    return value


class UnknownEvent(ValueError):
    """The journal holds an event type that this version does not know."""


def encode(event: Event) -> tuple[str, str]:
    """Return the stored form: type name and compact JSON, steps in plan order."""
    body = {f.name: _plain(getattr(event, f.name)) for f in fields(event)}
    return type(event).__name__, json.dumps(body, separators=(",", ":"))


def decode(name: str, body: str) -> Event:
    if name not in _TYPES:
        raise UnknownEvent(name)
    return cast(Event, _build(_TYPES[name], json.loads(body)))


def as_json(recorded: Recorded) -> dict[str, object]:
    """Return one line of ``events.jsonl`` and of ``--output jsonl``."""
    event = recorded.event
    body = {f.name: _plain(getattr(event, f.name)) for f in fields(event)}
    return {"run": recorded.run, "seq": recorded.seq, "at": recorded.at, "type": type(event).__name__, **body}


def _plain(value: object) -> object:
    if isinstance(value, _VALUES):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, IsolationClass):
        return value.word
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _build(kind: type, body: dict[str, Any]) -> object:
    return kind(**{name: _revive(_hints(kind)[name], value) for name, value in body.items()})


def _revive(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    options = [o for o in getattr(hint, "__args__", (hint,)) if o not in (type(None), Ellipsis)]
    if isinstance(value, list):
        return tuple(_revive(options[0], item) for item in value)
    target = options[0]
    if target in _VALUES:
        return _build(target, value)
    if target is IsolationClass:
        return IsolationClass[value.upper()]
    if target in _ENUMS:
        return target(value)
    return value
