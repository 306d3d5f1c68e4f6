"""The states of a workspace that outlives runs, and the row that its events add up to.

Both stores write what ``fold`` returns, in the transaction that keeps the event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from runner.core.errors import WorkspaceAttachedElsewhere, WorkspaceLimit, WorkspaceState
from runner.core.model import Limits
from runner.core.model import WorkspaceStatus as S
from runner.events.events import (
    BaseCommitRecorded,
    Event,
    ResourceCreated,
    ResourceIntended,
    ResourceRemovalStarted,
    ResourceRemoved,
    SlotClaimed,
    WorkspaceAttached,
    WorkspaceRequested,
    WorkspaceSaved,
    WorkspaceStatusChanged,
    WorkspaceUsed,
)
from runner.lifecycle.ttl import expiry
from runner.ports.store import WorkspaceRow

WorkspaceEvent = (  # only these change a row
    ResourceIntended
    | ResourceCreated
    | ResourceRemovalStarted
    | ResourceRemoved
    | SlotClaimed
    | WorkspaceAttached
    | WorkspaceRequested
    | WorkspaceStatusChanged
    | WorkspaceUsed
    | WorkspaceSaved
    | BaseCommitRecorded
)

_IDLE = 3  # workspaces that an error names
_WAIT = "wait for runs to end, or run `runner recover` for those whose runner has died"

NEXT: Mapping[S, frozenset[S]] = {
    S.CREATING: frozenset({S.PROVISIONING, S.DESTROYING, S.ERROR}),
    S.PROVISIONING: frozenset({S.READY, S.DESTROYING, S.ERROR}),
    S.READY: frozenset({S.STOPPING, S.DESTROYING, S.ERROR}),
    S.STOPPING: frozenset({S.STOPPED, S.DESTROYING, S.ERROR}),
    S.STOPPED: frozenset({S.READY, S.DESTROYING, S.ERROR}),
    S.DESTROYING: frozenset({S.DESTROYED, S.ERROR}),
    S.DESTROYED: frozenset(),
    S.ERROR: frozenset({S.DESTROYING}),
}
UNFINISHED = frozenset({S.CREATING, S.PROVISIONING, S.STOPPING, S.DESTROYING})  # somebody is at it, or died over it


def advance(workspace: str, status: S, to: S) -> S:
    """Return the status after a change. Raises ``WorkspaceState`` for a change that is not allowed."""
    if to not in NEXT[status]:
        message = f"workspace `{workspace}` is {status}, and cannot become {to}"
        raise WorkspaceState(message, hint=hint(workspace, status))
    return to


def hint(workspace: str, status: S) -> str:
    """Return how to bring a workspace out of this status."""
    return _HINTS[status].format(workspace)


_HINTS: Mapping[S, str] = {
    S.CREATING: "wait, or run `runner recover` if the process that makes it has died",
    S.PROVISIONING: "wait, or run `runner recover` if the process that makes it has died",
    S.READY: "it is ready already",
    S.STOPPING: "wait, or run `runner recover` if the process that stops it has died",
    S.STOPPED: "make it ready again: runner workspace resume {}",
    S.DESTROYING: "finish that: runner workspace destroy {}",
    S.DESTROYED: "make another",
    S.ERROR: "remove it: runner workspace destroy {}",
}


def check_limit(
    most: int, rows: Sequence[WorkspaceRow], id: str | None = None, reserved: Mapping[str, int] | None = None
) -> None:
    """Raises ``WorkspaceLimit`` when there is no room for another workspace, or for ``id`` beside those before it.

    ``rows`` are all that there are, whoever has them. Of several that are made at once the first ones have the room.
    A workspace that is ``reserved`` counts from that time, whether it is made yet or not.
    """
    known = {row.id: row for row in rows}
    since = {**{row.id: row.created for row in rows}, **(reserved or {})}
    own = (since[id], id) if id is not None and id in since else None
    before = [other for other, at in since.items() if other != id and (own is None or (at, other) < own)]
    if len(before) < most:
        return
    found = [known[other] for other in before if other in known]
    of_runs = sum(row.run is not None for row in found)
    of_sessions = len(before) - len(found) + sum(row.session is not None for row in found)
    counts = {"runs": of_runs, "sessions": of_sessions, "others": len(before) - of_runs - of_sessions}
    holders = ", ".join(f"{who} {count}" for who, count in counts.items() if count)
    idle = sorted((row for row in found if row.run is None), key=lambda row: row.used)
    names = ", ".join(row.id for row in idle[:_IDLE])
    advice = f"destroy those not in use, longest idle first: {names}" if names else _WAIT
    raise WorkspaceLimit(
        f"there is no room for another workspace beside {len(before)}: `WORKSPACE_MAX` is {most} ({holders})",
        hint=f"{advice}; or set `WORKSPACE_MAX` higher",
    )


def fold(row: WorkspaceRow | None, owner: str, at: int, event: Event) -> WorkspaceRow | None:
    """The row after an event at the moment ``at`` of the journal of ``owner``; ``None`` when there is none.

    Raises ``WorkspaceState``.
    """
    match event:
        case WorkspaceRequested():
            return _requested(owner, at, event)
        case WorkspaceAttached(session=session) if row is not None:
            if session is not None and row.session not in (None, session):
                message = f"workspace `{row.id}` is attached to session `{row.session}`"
                raise WorkspaceAttachedElsewhere(message, hint="wait for its end, or detach it")
            return replace(row, session=session)
        case ResourceIntended(kind="workspace", name=name, place=provider):
            row = row or WorkspaceRow(id=name, provider=provider, status=S.CREATING, created=at, used=at, run=owner)
            return replace(row, provider=provider, status=S.CREATING)
        case ResourceRemoved(kind="workspace"):
            return None
    return row and _changed(row, at, event)


def _changed(row: WorkspaceRow, at: int, event: Event) -> WorkspaceRow | None:
    match event:
        case ResourceCreated(kind="workspace"):
            return replace(row, status=S.READY, used=at)
        case ResourceRemovalStarted(kind="workspace"):
            return replace(row, status=S.DESTROYING)
        case WorkspaceStatusChanged(status=to):
            return None if advance(row.id, row.status, to) is S.DESTROYED else replace(row, status=to)
        case WorkspaceUsed(ttl_seconds=ttl, max_age_seconds=most):
            expires = None if row.persistent else expiry(row.created, at, ttl_seconds=ttl, max_age_seconds=most)
            return replace(row, used=at, expires=expires)
        case WorkspaceSaved(saved_work=saved_work):
            return replace(row, snapshot=saved_work.commit)
        case BaseCommitRecorded(commit=commit):
            return replace(row, base=commit)
        case SlotClaimed(slot=slot):
            return replace(row, slot=slot)
    return row


def named(owner: str, event: Event) -> str | None:
    """The workspace that an event of somebody's journal is about, if it changes a row."""
    match event:
        case ResourceIntended(kind="workspace", name=name) | ResourceCreated(kind="workspace", name=name):
            return name
        case ResourceRemovalStarted(kind="workspace", name=name) | ResourceRemoved(kind="workspace", name=name):
            return name
        case SlotClaimed(workspace=workspace):
            return workspace
        case WorkspaceAttached() | WorkspaceRequested() | WorkspaceStatusChanged() | WorkspaceUsed() | WorkspaceSaved():
            return owner
        case BaseCommitRecorded():
            return owner  # of a run's journal there is no workspace of that name
    return None


def _requested(workspace: str, at: int, event: WorkspaceRequested) -> WorkspaceRow:
    ttl, most = event.ttl_seconds, event.max_age_seconds
    return WorkspaceRow(
        id=workspace,
        provider=event.provider,
        status=S.CREATING,
        created=at,
        used=at,
        persistent=event.persistent,
        expires=None if event.persistent else expiry(at, at, ttl_seconds=ttl, max_age_seconds=most),
        project=event.project,
        path=event.path,
        inode=event.inode,
        url=event.url,
        branch=event.branch,
        limits=event.limits if event.limits != Limits() else None,
        not_enforced=event.not_enforced,
        image=event.image,
        tools=event.tools,
        session=event.session,
        mcp_server=event.mcp_server,
    )
