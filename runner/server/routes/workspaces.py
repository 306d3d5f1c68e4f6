"""Routes of workspaces: make, find, stop and remove them. A token sees those of its projects, and no others exist."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from runner.client.values import Moment
from runner.core.errors import BadRequest, UnknownSnapshot, UnknownWorkspace
from runner.core.model import DEFAULT_PROJECT, Limits
from runner.core.sanitize import excerpt
from runner.events.events import WarningIssued
from runner.ops import agent_types
from runner.ops.tools import ToolName
from runner.ops.workspaces import workspaces as ws
from runner.ops.workspaces.leases import LeaseState, lease_of, list_leases
from runner.ops.workspaces.snapshots import find_snapshot, take_snapshot
from runner.ops.workspaces.workspaces import WorkspaceOptions
from runner.ports.store import WorkspaceRow
from runner.server.route import Call, api


class Lease(Struct, kw_only=True):
    """Exclusive use of a workspace; ``state`` is ``live``, ``expired``, or ``dead`` when its holder is."""

    holder: str
    state: str
    acquired_at: Moment
    expires_at: Moment


class ResourceLimits(Struct, kw_only=True):
    """Limits in processors, bytes and processes; ``null`` for one that is not enforced."""

    cpu: float | None
    memory: int | None
    disk: int | None
    pids: int | None


class Workspace(Struct, kw_only=True):
    """A workspace. ``tools`` are those that may be called in it, ``null`` for all; ``run`` is the run that has it."""

    id: str
    agent_session_id: str | None
    container_type: str
    deployment_mode: str
    provider: str
    status: str
    lifecycle: str
    project: str
    run: str | None
    repository_url: str | None
    branch: str | None
    image: str | None
    tools: list[str] | None
    resource_limits: ResourceLimits
    snapshot_id: str | None
    created_at: Moment
    last_used_at: Moment
    expires_at: Moment | None
    lease: Lease | None
    warnings: Annotated[list[str], Meta(description="Of its making; left out in lists.")] | UnsetType = UNSET


class Workspaces(Struct):
    """Workspaces, newest first. ``next`` is the cursor of those after them, ``null`` at the end."""

    workspaces: list[Workspace]
    next: str | None


class NewWorkspace(Struct, kw_only=True, forbid_unknown_fields=True):
    """A workspace to make: as its agent type has them, or a clone of a repository's newest commit, or empty."""

    agent_type: Annotated[str, Meta(description="Then only `task`, `project` and `persistent` go with it.")] | None = (
        None
    )
    task: agent_types.Task = agent_types.Task()

    repository_url: str | None = None
    branch: str | None = None
    project: str | None = None
    provider: Annotated[str, Meta(description="Exactly this one, with no fallback.")] | None = None
    image: Annotated[str, Meta(description="The system that commands see.")] | None = None
    persistent: Annotated[bool, Meta(description="Never expires.")] = False
    tools: Annotated[list[ToolName], Meta(description="Those that may be called in it; default: all.")] | None = None


class FromSnapshot(Struct, kw_only=True, forbid_unknown_fields=True):
    """A workspace with the files of a snapshot; what is left out is as in the workspace that it was taken of."""

    snapshot_id: Annotated[str, Meta(pattern="^[0-9a-f]{40}$")]
    project: str | None = None
    provider: Annotated[str, Meta(description="Exactly this one, with no fallback.")] | None = None
    image: Annotated[str, Meta(description="The system that commands see.")] | None = None
    persistent: Annotated[bool, Meta(description="Never expires.")] = False
    tools: Annotated[list[ToolName], Meta(description="Those that may be called in it.")] | None = None


class Snapshot(Struct, kw_only=True):
    """A snapshot of a workspace, which outlives it. Files that its ignore files name are not in it."""

    snapshot_id: str
    workspace_id: str
    changed_files: int
    ignored_files: int


class WorkspaceListing(Struct, kw_only=True):
    """A page of a list."""

    status: str | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    cursor: str | UnsetType = UNSET


class Removal(Struct, kw_only=True):
    """``discard`` gives unsaved work up, which is saved otherwise."""

    discard: bool = False


class Removed(Struct, kw_only=True):
    """A workspace that is gone. ``snapshot_id`` is the commit of what was saved, in ``saved_in`` on the server."""

    id: str
    snapshot_id: str | None
    changed_files: int
    saved_in: str | None


class Place(Struct, kw_only=True):
    """A path on the server."""

    path: Annotated[str, Meta(min_length=1, pattern=r"^[^\x00]*$")]


def moment(microseconds: int) -> str:
    return datetime.fromtimestamp(microseconds / 1e6, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


async def visible(call: Call, *, change: bool = False) -> WorkspaceRow:
    """Return the workspace that a path names. One that the token may not see is not there.

    Raises ``UnknownWorkspace``, and ``OutOfScope`` for a change by a token that only reads.
    """
    id = call.path["id"]
    with suppress(UnknownWorkspace):
        row = call.server.kept.row(id) if change else None
        row = row or await call.server.env.store.workspace(id)
        if row.id == id and call.token.may_see(row.project):
            if change:
                call.require_change(row.project)
            return row
    raise UnknownWorkspace(f"there is no workspace `{excerpt(id)}`")


async def _list(call: Call) -> Workspaces:
    env, query = call.server.env, call.query
    status = None if query.status is UNSET else query.status
    before = None if query.cursor is UNSET else read_cursor(query.cursor)
    leases = {lease.workspace: lease for lease in await list_leases(env)}
    found: list[WorkspaceRow] = []
    while len(found) <= query.limit:
        rows = await env.store.workspaces(status=status, before=before, limit=query.limit + 1)
        found += [row for row in rows if call.token.may_see(row.project)]
        if len(rows) <= query.limit:
            break
        before = (rows[-1].created, rows[-1].id)
    page = found[: query.limit]
    more = f"{page[-1].created}.{page[-1].id}" if len(found) > query.limit else None
    return Workspaces([_shown(row, leases.get(row.id)) for row in page], more)


def read_cursor(text: str) -> tuple[int, str]:
    """Return the place in a list after which to go on; a text that is none means the end."""
    created, _, id = text.partition(".")
    return (int(created) if created.isdecimal() and len(created) < 19 else 0, id)


async def _get(call: Call) -> Workspace:
    return await whole(call, await visible(call))


async def create(call: Call) -> Workspace:
    body = call.body
    call.require_change(body.project or DEFAULT_PROJECT)
    if body.agent_type is not None:
        return await _create_of_type(call)
    if body.task != agent_types.Task():
        raise BadRequest("a `task` is for an `agent_type`", hint="write `repository_url`")
    options = WorkspaceOptions(
        url=body.repository_url,
        branch=body.branch,
        project=body.project,
        provider=body.provider,
        image=body.image,
        persistent=body.persistent,
        tools=None if body.tools is None else tuple(body.tools),
        isolated=True,
        warm=True,
    )
    return await _made(call, await ws.create(call.server.env, options))


async def _made(call: Call, row: WorkspaceRow) -> Workspace:
    if row.slot is not None:
        await call.server.kept.open(row.id)  # what was warm stays so
    return await whole(call, row)


async def _create_of_type(call: Call) -> Workspace:
    body, env = call.body, call.server.env
    given = [
        name for name in ("repository_url", "branch", "provider", "image", "tools") if getattr(body, name) is not None
    ]
    if given:
        raise BadRequest(f"`{given[0]}` is what the agent type says", hint="leave one of them out")
    found = await call.server.agent_types.get(body.agent_type)
    options = replace(agent_types.workspace_options(found, body.task), project=body.project, persistent=body.persistent)
    prepare = partial(agent_types.set_up, found.workspace, body.task)
    return await _made(call, await ws.create(env, options, prepare))


async def whole(call: Call, row: WorkspaceRow) -> Workspace:
    """Return all that there is about a workspace."""
    shown = _shown(row, await lease_of(call.server.env, row.id))
    history = await call.server.env.store.workspace_events(row.id)
    events = [recorded.event for recorded in history]
    shown.warnings = [event.message for event in events if isinstance(event, WarningIssued)]
    return shown


async def _destroy(call: Call) -> Removed:
    row = await visible(call, change=True)
    async with call.server.kept.closed(row.id):
        removed = await ws.destroy(call.server.env, row.id, discard=call.query.discard)
    work = removed.saved_work
    if work is None or removed.saved is None:
        return Removed(id=row.id, snapshot_id=None, changed_files=0, saved_in=None)
    return Removed(id=row.id, snapshot_id=work.commit, changed_files=work.changed, saved_in=str(removed.saved))


async def _stop(call: Call) -> Workspace:
    row = await visible(call, change=True)
    async with call.server.kept.closed(row.id):
        return await whole(call, await ws.stop(call.server.env, row.id))


async def _resume(call: Call) -> Workspace:
    row = await visible(call, change=True)
    return await whole(call, await ws.resume(call.server.env, row.id))


async def _snapshot(call: Call) -> Snapshot:
    row = await visible(call, change=True)
    async with call.server.kept.closed(row.id):
        taken = await take_snapshot(call.server.env, row.id)
    return Snapshot(
        snapshot_id=taken.commit, workspace_id=row.id, changed_files=taken.changed, ignored_files=taken.ignored
    )


async def _create_from_snapshot(call: Call) -> Workspace:
    body, env = call.body, call.server.env
    found = await find_snapshot(env, body.snapshot_id)
    if not call.token.may_see(found.project):
        raise UnknownSnapshot(f"there is no snapshot `{body.snapshot_id}`")
    project = body.project or found.project
    call.require_change(project)
    options = WorkspaceOptions(
        snapshot=found,
        project=None if project == DEFAULT_PROJECT else project,
        provider=body.provider,
        image=body.image,
        persistent=body.persistent,
        tools=found.tools if body.tools is None else tuple(body.tools),
        isolated=True,
        warm=True,
    )
    return await _made(call, await ws.create(env, options))


async def _find(call: Call) -> Workspace:
    found = await ws.find_by_path(call.server.env.settings, Path(call.query.path))
    if not call.token.may_see(found.row.project):
        raise UnknownWorkspace(f"`{excerpt(call.query.path)}` is in no workspace")
    return await whole(call, found.row)


def _shown(row: WorkspaceRow, lease: LeaseState | None) -> Workspace:
    limits = row.limits or Limits()
    return Workspace(
        id=row.id,
        agent_session_id=row.session,
        container_type="agent_workspace" if row.mcp_server is None else "mcp_server",
        deployment_mode="self_hosted",
        provider=row.provider,
        status=row.status.value,
        lifecycle="persistent" if row.persistent else "ephemeral",
        project=row.project,
        run=row.run,
        repository_url=row.url,
        branch=row.branch,
        image=row.image,
        tools=None if row.tools is None else list(row.tools),
        resource_limits=ResourceLimits(
            cpu=limits.cpus, memory=limits.memory_bytes, disk=limits.disk_bytes, pids=limits.pids
        ),
        snapshot_id=row.snapshot,
        created_at=moment(row.created),
        last_used_at=moment(row.used),
        expires_at=None if row.expires is None else moment(row.expires),
        lease=None
        if lease is None
        else Lease(
            holder=lease.holder,
            state=lease.state,
            acquired_at=moment(lease.acquired),
            expires_at=moment(lease.expires),
        ),
    )


ROUTES = (
    api("GET", "/workspaces", "List workspaces", _list, answer=Workspaces, query=WorkspaceListing),
    api("POST", "/workspaces", "Make a workspace", create, body=NewWorkspace, answer=Workspace, status=201),
    api(
        "POST",
        "/workspaces/from-snapshot",
        "Make a workspace with the files of a snapshot",
        _create_from_snapshot,
        body=FromSnapshot,
        answer=Workspace,
        status=201,
    ),
    api("GET", "/workspaces/find", "Find the workspace that a path is in", _find, query=Place, answer=Workspace),
    api("GET", "/workspaces/{id}", "Show a workspace and who has it", _get, answer=Workspace),
    api(
        "DELETE",
        "/workspaces/{id}",
        "End what runs in a workspace, save what is unsaved, and remove it",
        _destroy,
        query=Removal,
        answer=Removed,
    ),
    api(
        "POST",
        "/workspaces/{id}/snapshot",
        "Save the files of a workspace, in which nothing runs meanwhile; it goes on",
        _snapshot,
        answer=Snapshot,
        status=201,
    ),
    api("POST", "/workspaces/{id}/stop", "End what runs in a workspace; its files stay", _stop, answer=Workspace),
    api("POST", "/workspaces/{id}/resume", "Let a stopped workspace be used again", _resume, answer=Workspace),
)
