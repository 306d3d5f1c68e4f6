"""The events of a run: the only way in which its state changes.

Frozen and small; step output lives in files. ``encode`` and ``decode`` are the stored form, a type name
and a JSON body; a type or field is never reused for another meaning. An unknown type is refused, since
a fold over half a history would lie.
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
    file whose script stood for every model. ``manifests`` is the file or folder that the plan was made from.
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
    """``work`` or ``finalize``, which begins after work has ended, for whatever reason."""

    phase: str


@dataclass(frozen=True)
class StepStarted(Event):
    step: str


@dataclass(frozen=True)
class StepReused(Event):
    """The step is not performed: what it did in ``from_run``, under the same content ``key``, is taken over."""

    step: str
    from_run: str
    key: str


@dataclass(frozen=True)
class StepEnded(Event):
    step: str
    outcome: Outcome


@dataclass(frozen=True)
class CommandFailed(Event):
    """A command decided against its step. What it printed lies between these bytes of the step's two logs."""

    step: str
    stdout: tuple[int, ...]
    stderr: tuple[int, ...]


@dataclass(frozen=True)
class ResourceIntended(Event):
    """Durable before anything outside the store is made; ``name`` finds it again after a crash."""

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
    """Durable before the effect is removed: from now on nothing begins with it."""

    step: str
    kind: str
    name: str


@dataclass(frozen=True)
class ResourceRemoved(Event):
    """The effect was removed, and its absence was checked."""

    step: str
    kind: str
    name: str


@dataclass(frozen=True)
class LeaseAcquired(Event):
    """Exclusive use of a workspace for ``ttl_seconds``. ``over`` is the lease that it takes the place of, expired or,
    with ``forced``, of a holder that is known to be dead."""

    workspace: str
    lease: str
    holder: str
    fence: int
    ttl_seconds: float
    over: str = ""
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
    """The checkout is there: ``commit`` is what the work will be compared with."""

    commit: str


@dataclass(frozen=True)
class FileInjected(Event):
    """The runner is about to put a file of its own into the tree: no work of the agent's, whatever becomes of it."""

    path: str
    sha256: str


@dataclass(frozen=True)
class ProtectedPathsHashed(Event):
    """What is at each protected path before the first command can reach it, as a digest; empty for nothing."""

    content: dict[str, str]


@dataclass(frozen=True)
class ProviderChosen(Event):
    provider: str
    isolation: IsolationClass


@dataclass(frozen=True)
class ProviderRejected(Event):
    """One hop of the provider chain, with its reason."""

    provider: str
    reason: str


@dataclass(frozen=True)
class FallbackStarted(Event):
    """``step`` failed with ``provider`` for the ``reason``, and nothing that is done only once has begun.

    The steps ``again`` begin anew, in the workspace of the next ``attempt`` and with a provider further down the chain.
    """

    step: str
    provider: str
    reason: str
    attempt: int
    again: tuple[str, ...]


@dataclass(frozen=True)
class RetryScheduled(Event):
    """What a step asked of the platform failed in a way that may pass, and is asked again after ``pause_seconds``."""

    step: str
    what: str
    code: str
    reason: str
    pause_seconds: float


@dataclass(frozen=True)
class SlotClaimed(Event):
    """The workspace was had warm: it was the ``slot`` of a pool before."""

    workspace: str
    slot: str


@dataclass(frozen=True)
class PoolMissed(Event):
    """The workspace is made cold, though workspaces are kept warm."""

    workspace: str
    reason: PoolMissReason


@dataclass(frozen=True)
class IsolationObserved(Event):
    """Read back from inside the sandbox before the agent starts."""

    step: str
    isolation: Isolation


@dataclass(frozen=True)
class LogOpened(Event):
    """All that a step's agent prints, both streams in the order of arrival, is in this file as it comes."""

    step: str
    path: str


@dataclass(frozen=True)
class ContextPreloaded(Event):
    """What the prompt has of the incident: the estimated ``tokens`` of each of its ``parts``, and of all together.

    ``cut`` characters of the baseline were left out. ``headline`` is what that is about, in a line.
    """

    step: str
    parts: dict[str, int]
    tokens: int
    cut: int = 0
    headline: str = ""


@dataclass(frozen=True)
class ModelRequestFinished(Event):
    """One request of a step's agent through the model gateway, without its contents, once it has ended.

    ``refusal`` says why it was answered by the gateway itself; ``estimated`` that the answer was cut off before it said
    what was used.
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
    """The words that the agent's CLI is started with, before it is; its prompt is not among them.

    ``version`` is the CLI's, empty when nobody knows it.
    """

    step: str
    argv: tuple[str, ...]
    version: str = ""


@dataclass(frozen=True)
class CommandsReportedByAgent(Event):
    """How many shell commands a step's agent asked for, by what became of them, as its CLI tells it."""

    step: str
    executed: int
    denied: int
    cut: int


@dataclass(frozen=True)
class UsageReportedByAgent(Event):
    """What an agent that had the key of its model itself says that it used; nobody has counted."""

    step: str
    usage: Usage


@dataclass(frozen=True)
class ClusterAccessOpened(Event):
    """Commands of a step can read a cluster, through the runner and without its credential."""

    step: str
    context: str
    server: str
    namespace: str


@dataclass(frozen=True)
class ClusterRequestFinished(Event):
    """One request of a step's commands to the cluster, without its contents, once it has ended.

    Beyond the first thousand of a step, ``count`` alike ones together, with no ``resource``. ``refusal`` says why it
    was answered by the runner and not by the cluster.
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
    """One stage of ending a step's command: TERM, KILL, the whole sandbox.

    After TERM it has ``grace_seconds`` at most to end by itself; after the others it has none.
    """

    step: str
    stage: StopStage
    reason: StopReason
    grace_seconds: float = 0.0


@dataclass(frozen=True)
class OomKilled(Event):
    """The kernel killed ``count`` processes in a step's sandbox for want of memory; the sandbox lives."""

    step: str
    count: int


@dataclass(frozen=True)
class ProcessEscaped(Event):
    """Something escaped: it did not end though it was killed. ``detail`` names it."""

    step: str
    detail: str


@dataclass(frozen=True)
class ViolationsFound(Event):
    step: str
    violations: tuple[Violation, ...]


@dataclass(frozen=True)
class ChecksFinished(Event):
    """All that a step has verified, in order, whether it was so or not."""

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
    """What the agent committed itself, ``count`` commits from the base to ``commit``, and the ``bundle`` that has them.

    ``withheld`` says why there is none; ``violations`` are those of any of the commits.
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
    """The one terminal event. ``left`` lists what may not have been removed."""

    outcome: Outcome
    exit_code: int
    left: tuple[str, ...] = ()


@dataclass(frozen=True)
class WorkspaceRequested(Event):
    """Durable before a workspace is made that belongs to no run. ``path`` is a directory that it adopts.

    ``not_enforced`` are the limits that it should have as well, and that its provider cannot keep here; ``image`` is
    the id of the system that its commands see, for a provider that has images.
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
    """Something was done in a workspace, so it lives ``ttl_seconds`` from now, but never beyond its greatest age."""

    ttl_seconds: float
    max_age_seconds: float | None = None


@dataclass(frozen=True)
class WorkspaceSaved(Event):
    """What was unsaved in a workspace is kept; the patch of ``saved_work`` is relative to where that is."""

    saved_work: SavedWork


@dataclass(frozen=True)
class UnsavedWorkDiscarded(Event):
    """Its user gave up what is unsaved in a workspace."""


class Recorded(NamedTuple):
    """A durable event: its run, its number there from 1, and when (microseconds since the epoch, UTC)."""

    run: str
    seq: int
    at: int
    event: Event


_TYPES: dict[str, type[Event]] = {cls.__name__: cls for cls in Event.__subclasses__()}
_VALUES = (Check, Outcome, Isolation, Limits, SavedWork, Usage, Violation)
_ENUMS = (CheckKind, Status, Reason, StopStage, StopReason, IsolationClass, WorkspaceStatus, PoolMissReason)


def with_texts(value: T, change: Callable[[str], str]) -> T:
    """A value of an event, or an event, in which every text is what ``change`` makes of it; words of enums stay."""
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
    """The stored form: type name and compact JSON, steps in plan order."""
    body = {f.name: _plain(getattr(event, f.name)) for f in fields(event)}
    return type(event).__name__, json.dumps(body, separators=(",", ":"))


def decode(name: str, body: str) -> Event:
    if name not in _TYPES:
        raise UnknownEvent(name)
    return cast(Event, _build(_TYPES[name], json.loads(body)))


def as_json(recorded: Recorded) -> dict[str, object]:
    """One line of ``events.jsonl`` and of ``--output jsonl``."""
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
