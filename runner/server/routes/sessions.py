"""Routes of sessions: begin one, follow it, call its tools, end it. A token sees those of its projects."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from runner.client.values import Moment
from runner.core.errors import UnknownSession
from runner.core.model import DEFAULT_PROJECT
from runner.core.sanitize import excerpt
from runner.ops import sessions
from runner.ops.agent_types import Task
from runner.ops.sessions import NewSession, SessionWarning, StoredSession
from runner.ops.tools import TOOLS
from runner.ops.workspaces.tools import tool
from runner.server.route import BASE, Call, Reply, Route, api
from runner.server.routes.tools import call_tool
from runner.server.routes.workspaces import Workspace, moment, read_cursor, visible, whole


class Session(Struct, kw_only=True):
    """A session. A ``degraded`` one should have a workspace and has none: ``warnings`` say why.

    ``workspace_id`` is that of the workspace while it is made, too.
    """

    id: str
    status: Annotated[str, Meta(description="`provisioning`, `active` or `ended`.")]
    agent_type: str
    project: str
    task: Task
    workspace_id: str | None
    degraded: bool
    warnings: list[SessionWarning]
    created_by: Annotated[str, Meta(description="The name of the token.")]
    created_at: Moment
    ended_at: Moment | None


class Sessions(Struct):
    """Sessions, newest first. ``next`` is the cursor of those after them, ``null`` at the end."""

    sessions: list[Session]
    next: str | None


class SessionBegin(Struct, kw_only=True, forbid_unknown_fields=True):
    """A session to begin, as its agent type is now."""

    agent_type: str
    task: Task = Task()
    project: str | None = None


class SessionListing(Struct, kw_only=True):
    """A page of a list."""

    status: Literal["provisioning", "active", "ended"] | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    cursor: str | UnsetType = UNSET


class SessionEnd(Struct, kw_only=True):
    """``discard`` gives unsaved work up, which is saved otherwise; ``keep`` leaves the workspace to others."""

    discard: bool = False
    keep: bool = False


class SessionToken(Struct, kw_only=True):
    """The token of the agent of a session, which calls its tools, at ``/mcp`` and nowhere else."""

    token: Annotated[str, Meta(description="Shown once, and taken until the session ends or another is made for it.")]


class Attachment(Struct, kw_only=True, forbid_unknown_fields=True):
    """A session that has no workspace."""

    session_id: str


def shown(stored: StoredSession) -> Session:
    session = stored.session
    return Session(
        id=session.id,
        status=stored.status,
        agent_type=session.agent_type,
        project=session.project,
        task=session.task,
        workspace_id=session.workspace,
        degraded=session.degraded,
        warnings=list(session.warnings),
        created_by=session.by,
        created_at=moment(stored.entry.created),
        ended_at=None if session.ended is None else moment(session.ended),
    )


async def visible_session(call: Call, id: str, *, change: bool = False) -> StoredSession:
    """Return a session. One that the token may not see is not there.

    Raises ``UnknownSession``, and ``OutOfScope`` for a change by a token that only reads.
    """
    with suppress(UnknownSession):
        stored = await sessions.get_session(call.server.env.store, id)
        if call.token.may_see(stored.session.project):
            if change:
                call.require_change(stored.session.project)
            return stored
    raise UnknownSession(f"there is no session `{excerpt(id)}`")


async def _list(call: Call) -> Sessions:
    query = call.query
    before = None if query.cursor is UNSET else read_cursor(query.cursor)
    state = None if query.status is UNSET else query.status
    found: list[StoredSession] = []
    while len(found) <= query.limit:
        rows = await sessions.list_sessions(call.server.env.store, state=state, before=before, limit=query.limit + 1)
        found += [row for row in rows if call.token.may_see(row.session.project)]
        if len(rows) <= query.limit:
            break
        before = (rows[-1].entry.created, rows[-1].session.id)
    page = found[: query.limit]
    more = f"{page[-1].entry.created}.{page[-1].session.id}" if len(found) > query.limit else None
    return Sessions([shown(row) for row in page], more)


async def _create(call: Call) -> Reply:
    body = call.body
    call.require_change(body.project or DEFAULT_PROJECT)
    agent_type = await call.server.agent_types.get(body.agent_type)
    wanted = NewSession(agent_type=agent_type, task=body.task, project=body.project, by=call.token.name)
    made = shown(await call.server.sessions.create(wanted))
    return Reply(value=made, status=202, headers={"location": f"{BASE}/sessions/{made.id}"})


async def _get(call: Call) -> Session:
    return shown(await visible_session(call, call.path["id"]))


async def _end(call: Call) -> Session:
    stored = await visible_session(call, call.path["id"], change=True)
    return shown(await call.server.sessions.end(stored, discard=call.query.discard, keep=call.query.keep))


async def _new_token(call: Call) -> SessionToken:
    session = (await visible_session(call, call.path["id"], change=True)).session
    return SessionToken(token=await sessions.new_token(call.server.env.store, session.id))


async def _attach(call: Call) -> Workspace:
    row = await visible(call, change=True)
    session = await visible_session(call, call.body.session_id, change=True)
    if session.session.project != row.project:
        raise UnknownSession(f"there is no session `{excerpt(call.body.session_id)}` in project `{row.project}`")
    await call.server.sessions.attach(session, row)
    return await whole(call, await visible(call))


async def _detach(call: Call) -> Workspace:
    await call.server.sessions.detach(await visible(call, change=True))
    return await whole(call, await visible(call))


def _tool(name: str) -> Route:
    async def handle(call: Call) -> Struct:
        stored = await visible_session(call, call.path["id"], change=True)
        row = await sessions.workspace_of(call.server.env.store, stored, name)
        return await call_tool(call, row, name)

    summary = f"{(tool(name).__doc__ or '').strip().removesuffix('.')}, in the workspace of a session"
    module = tool(name)
    return api("POST", f"/sessions/{{id}}/tools/{name}", summary, handle, body=module.Arguments, answer=module.Result)


ROUTES = (
    api("GET", "/sessions", "List sessions", _list, answer=Sessions, query=SessionListing),
    api(
        "POST",
        "/sessions",
        "Begin a session; it is `active` once its workspace is ready",
        _create,
        body=SessionBegin,
        answer=Session,
        status=202,
    ),
    api("GET", "/sessions/{id}", "Show a session", _get, answer=Session),
    api(
        "DELETE",
        "/sessions/{id}",
        "End a session; a workspace that was made for it is saved and removed",
        _end,
        query=SessionEnd,
        answer=Session,
    ),
    api(
        "POST",
        "/sessions/{id}/token",
        "Make the token of a session's agent, in the place of an earlier one",
        _new_token,
        answer=SessionToken,
        status=201,
    ),
    *(_tool(name) for name in TOOLS),
    api(
        "POST",
        "/workspaces/{id}/attach",
        "Give a workspace to a session; it is that of one at a time",
        _attach,
        body=Attachment,
        answer=Workspace,
    ),
    api("POST", "/workspaces/{id}/detach", "Part a workspace from its session", _detach, answer=Workspace),
)
