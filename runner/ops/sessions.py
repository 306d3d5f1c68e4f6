"""Sessions of agents: each gets the workspace of its agent type, as that is when the session begins.

An entry of the store says how far a session is. While it is provisioned its process keeps a directory of the home
locked; a session whose process has died is provisioned anew. When every provider fails, it is active without a
workspace, and says so.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import trio
from msgspec import Struct
from msgspec.structs import replace

from runner.artifacts.run_lock import is_locked, try_lock
from runner.core.codec import decode, encode
from runner.core.errors import (
    NoWorkspace,
    RunnerError,
    SessionDegraded,
    SessionNotProvisioned,
    SessionState,
    ToolNotEnabled,
    UnknownSession,
    UnknownWorkspace,
    WorkspaceState,
)
from runner.core.model import DEFAULT_PROJECT
from runner.core.sanitize import excerpt
from runner.events.events import WorkspaceAttached
from runner.ops.agent_types import AgentType, Task, WorkspaceConfig, check_task, set_up, workspace_options
from runner.ops.host import tokens
from runner.ops.host.liveness import read_liveness
from runner.ops.workspaces import workspaces
from runner.ops.workspaces.capacity import ACTIVE, PROVISIONING, SESSION, require_room
from runner.ops.workspaces.create_checks import choose_provider
from runner.ops.workspaces.tools import KeptWorkspaces
from runner.ops.workspaces.workspace_lease import WorkspaceEnv
from runner.ops.workspaces.workspaces import own_workspace, require_ready
from runner.ports.store import Cursor, EntryRow, Reader, Store, WorkspaceRow
from runner.safefs import trees

ENDED = "ended"
_ATTEMPTS = 2
_HOME = "sessions"  # in the home, what is locked while a session is provisioned


class SessionWarning(Struct, frozen=True):
    """Something that an agent should know of its session."""

    code: str
    message: str


class Session(Struct, frozen=True, kw_only=True):
    """A session as it is stored. Times are microseconds since the epoch, UTC.

    ``config`` is that of its agent type when it began. ``workspace`` may still be made; ``own`` says that it was
    made for this session. A ``degraded`` one should have a workspace and has none. ``runner`` provisions it.
    """

    id: str
    agent_type: str
    project: str
    task: Task
    config: WorkspaceConfig
    by: str
    workspace: str | None = None
    own: bool = False
    degraded: bool = False
    warnings: tuple[SessionWarning, ...] = ()
    runner: str | None = None
    ended: int | None = None


class StoredSession(Struct, frozen=True):
    """A session with its entry, which a change is made to."""

    session: Session
    entry: EntryRow

    @property
    def status(self) -> str:
        return self.entry.state


class NewSession(Struct, frozen=True, kw_only=True):
    """A session to make; ``by`` is the name of the token."""

    agent_type: AgentType
    task: Task
    project: str | None
    by: str


async def list_sessions(
    store: Reader, *, state: str | None = None, before: Cursor | None = None, limit: int | None = None
) -> list[StoredSession]:
    """List sessions, newest first."""
    return [_stored(entry) for entry in await store.entries(SESSION, state=state, before=before, limit=limit)]


async def get_session(store: Reader, id: str) -> StoredSession:
    """Return one session. Raises ``UnknownSession``."""
    for entry in await store.entries(SESSION, name=id):
        return _stored(entry)
    raise UnknownSession(f"there is no session `{excerpt(id)}`")


async def workspace_of(store: Reader, stored: StoredSession, tool: str) -> WorkspaceRow:
    """Return the workspace that a session may call a tool in.

    Raises ``NoWorkspace`` for an agent type without one, ``ToolNotEnabled``, ``SessionDegraded``, and ``SessionState``
    for a session that is not active.
    """
    session = stored.session
    if not session.config.enabled:
        message = f"agents of type `{session.agent_type}` have no workspace"
        raise NoWorkspace(message, hint="set `enabled` in its workspace-config, for sessions that come")
    _require_active(stored)
    tools = session.config.tools
    if tools is not None and tool not in tools:
        hint = f"it has {', '.join(tools)}" if tools else "it has none"
        raise ToolNotEnabled(f"Tool '{tool}' is not enabled for this agent type", hint=hint)
    if session.workspace is None:
        why = session.warnings[-1].message if session.degraded and session.warnings else "it was detached"
        hint = "work without tools, attach a workspace, or begin another session"
        raise SessionDegraded(f"session `{session.id}` has no workspace: {why}", hint=hint)
    row = await store.workspace(session.workspace)
    if row.id != session.workspace:
        raise UnknownWorkspace(f"there is no workspace `{session.workspace}`")
    return row


async def new_token(store: Store, id: str) -> str:
    """Make the token of a session, in the place of an earlier one, and return its text, which is not stored."""
    await store.remove_entry(tokens.KIND, _token_name(id))
    return await tokens.create_token(store, _token_name(id), (f"session:{id}",))


def _token_name(id: str) -> str:
    return f"session-{id}"


def _require_active(stored: StoredSession) -> None:
    if stored.status != ACTIVE:
        hint = "ask again when it is active" if stored.status == PROVISIONING else "begin another"
        raise SessionState(f"session `{stored.session.id}` is {stored.status}", hint=hint)


class Sessions:
    """The sessions of a server. What it provisions goes on when whoever asked for it has gone."""

    def __init__(self, env: WorkspaceEnv, kept: KeptWorkspaces, nursery: trio.Nursery) -> None:
        self._env, self._kept, self._nursery = env, kept, nursery
        self._work: dict[str, tuple[trio.CancelScope, trio.Event]] = {}

    async def create(self, wanted: NewSession) -> StoredSession:
        """Begin a session; its workspace is made after this returns.

        Raises ``WorkspaceLimit``, ``UnknownProject``, and ``BadUrl`` and ``BadConfig`` for the task.
        """
        store, config = self._env.store, wanted.agent_type.workspace
        check_task(config, wanted.task)
        project = DEFAULT_PROJECT
        if wanted.project is not None:
            project = (await store.project(wanted.project)).name
        session = Session(
            id=workspaces.new_id(),
            agent_type=wanted.agent_type.name,
            project=project,
            task=wanted.task,
            config=config,
            by=wanted.by,
        )
        if not config.enabled:
            return await self._begin(session, ACTIVE)
        session = replace(session, workspace=workspaces.new_id(), own=True, runner=self._runner)
        await store.register()
        lock = await trio.to_thread.run_sync(try_lock, self._place(session.id))
        assert lock is not None
        try:
            stored = await self._begin(session, PROVISIONING)
            await require_room(store, self._env.settings.max_workspaces, session.workspace)
        except BaseException:
            with trio.CancelScope(shield=True):
                await store.remove_entry(SESSION, session.id)
                await trio.to_thread.run_sync(trees.remove, self._place(session.id))
            os.close(lock)
            raise
        self._start(stored, lock)
        return stored

    async def _begin(self, session: Session, state: str) -> StoredSession:
        entry = EntryRow(kind=SESSION, name=session.id, body=encode(session).decode(), state=state)
        made = await self._env.store.put_entry(entry)
        assert made is not None  # nobody else has its id
        return StoredSession(session, made)

    @property
    def _runner(self) -> str | None:
        return self._env.store.runner.id if self._env.store.runner is not None else None

    def _place(self, id: str) -> Path:
        return self._env.settings.home / _HOME / id

    # --- provisioning -----------------------------------------------------------------------------

    def _start(self, stored: StoredSession, lock: int) -> None:
        scope, over = trio.CancelScope(), trio.Event()
        self._work[stored.session.id] = scope, over

        async def whole() -> None:
            try:
                with scope:
                    await self._provision(stored)
            except RunnerError as error:  # of the store: whoever looks next provisions it
                self._env.advise(error)
            finally:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(trees.remove, self._place(stored.session.id))
                os.close(lock)
                del self._work[stored.session.id]
                over.set()

        self._nursery.start_soon(whole)

    async def _provision(self, stored: StoredSession) -> None:
        session, tried = stored.session, list[str]()
        made: WorkspaceRow | None = None
        while made is None:
            before = len(tried)
            try:
                made = await self._make(session, tried)
            except RunnerError as error:
                on = f" on `{tried[-1]}`" if len(tried) > before else ""
                message = f"the workspace of session `{session.id}` could not be made{on}: {error.message}"
                self._env.advise(SessionNotProvisioned(message, hint=error.hint))
                warning = SessionWarning(error.code, f"{message}; {error.hint}" if error.hint else message)
                session = replace(session, warnings=(*session.warnings, warning))
                if len(tried) in (before, _ATTEMPTS) or session.config.provider is not None:
                    break
                session = replace(session, workspace=workspaces.new_id())  # an id is used once
                stored = await self._put(stored, session, PROVISIONING)
        if made is None:
            self._env.advise(SessionDegraded(f"session `{session.id}` goes on without a workspace"))
            session = replace(session, workspace=None, own=False, degraded=True)
        await self._put(stored, replace(session, runner=None), ACTIVE)
        if made is not None and made.slot is not None:
            await self._kept.open(made.id)  # what was warm stays so

    async def _make(self, session: Session, tried: list[str]) -> WorkspaceRow:
        """Make the workspace on the first provider that fits and was not ``tried``, and add that."""
        options = replace(
            workspace_options(AgentType(name=session.agent_type, workspace=session.config), session.task),
            project=session.project if session.project != DEFAULT_PROJECT else None,
            id=session.workspace,
            session=session.id,
        )
        chosen = await choose_provider(self._env, options.provider, options.image, adopting=False, without=tried)
        tried.append(chosen.provider.name)
        prepare = partial(set_up, session.config, session.task)
        return await workspaces.create(self._env, options, prepare, chosen)

    async def _put(self, stored: StoredSession, session: Session, state: str) -> StoredSession:
        """Change a session. Raises ``SessionState`` when somebody else has changed it."""
        entry = replace(stored.entry, body=encode(session).decode(), state=state)
        written = await self._env.store.put_entry(entry)
        if written is None:
            raise SessionState(f"session `{session.id}` has changed meanwhile", hint="look at it, and try again")
        return StoredSession(session, written)

    async def recover(self) -> None:
        """Provision the sessions whose process has died, and forget those that are older than ``RUN_RETENTION``."""
        store = self._env.store
        for stored in await list_sessions(store, state=PROVISIONING):
            session = stored.session
            lock = None
            if await self._is_abandoned(session):
                lock = await trio.to_thread.run_sync(try_lock, self._place(session.id))
            if lock is None:
                continue
            await store.register()
            after = replace(session, workspace=workspaces.new_id(), runner=self._runner)
            try:
                stored = await self._put(stored, after, PROVISIONING)
            except SessionState:  # another server was faster
                await trio.to_thread.run_sync(trees.remove, self._place(session.id))
                os.close(lock)
                continue
            self._start(stored, lock)
        oldest = await store.now() - round(self._env.settings.run_retention * 1e6)
        for stored in await list_sessions(store, state=ENDED, before=(oldest, "")):
            await store.remove_entry(SESSION, stored.session.id)

    async def _is_abandoned(self, session: Session) -> bool:
        """Tell whether nobody provisions a session any more."""
        if session.id in self._work or is_locked(self._place(session.id)):
            return False
        liveness = await read_liveness(self._env.store, self._env.settings.home)
        return liveness.is_dead(session.runner, locked=False)

    # --- attaching and ending ---------------------------------------------------------------------

    async def attach(self, stored: StoredSession, row: WorkspaceRow) -> StoredSession:
        """Make a workspace that of a session, which has none.

        Raises ``SessionState``, ``NoWorkspace``, ``WorkspaceState`` and ``WorkspaceAttachedElsewhere``.
        """
        session = stored.session
        if not session.config.enabled:
            raise NoWorkspace(
                f"agents of type `{session.agent_type}` have no workspace", hint="begin one of another type"
            )
        _require_active(stored)
        if session.workspace is not None:
            message = f"session `{session.id}` has workspace `{session.workspace}`"
            raise SessionState(message, hint="detach that first")
        require_ready(await own_workspace(self._env, row.id))
        await self._env.store.append_to_workspace(row.id, [WorkspaceAttached(session.id)])
        try:
            return await self._put(stored, replace(session, workspace=row.id, own=False, degraded=False), ACTIVE)
        except BaseException:
            with trio.CancelScope(shield=True):
                await self._env.store.append_to_workspace(row.id, [WorkspaceAttached(None)])
            raise

    async def detach(self, row: WorkspaceRow) -> None:
        """Part a workspace from its session; it stays. Raises ``WorkspaceState`` when it has none."""
        if row.session is None:
            raise WorkspaceState(f"workspace `{row.id}` is attached to no session")
        for entry in await self._env.store.entries(SESSION, name=row.session):
            stored = _stored(entry)
            if stored.status == PROVISIONING:
                _require_active(stored)
            if stored.session.workspace == row.id:
                await self._put(stored, replace(stored.session, workspace=None, own=False), stored.status)
        await self._env.store.append_to_workspace(row.id, [WorkspaceAttached(None)])

    async def end(self, stored: StoredSession, *, discard: bool, keep: bool) -> StoredSession:
        """End a session and free its workspace: what was made for it is saved and destroyed, unless you ``keep`` it.

        An ended one stays so. Raises ``SessionState`` while another server provisions it, and as ``destroy`` does.
        """
        store, id = self._env.store, stored.session.id
        if id in self._work:
            scope, over = self._work[id]
            scope.cancel()
            await over.wait()
            stored = await get_session(store, id)
        session = stored.session
        if stored.status == ENDED:
            return stored
        if stored.status == PROVISIONING and not await self._is_abandoned(session):
            raise SessionState(f"another server provisions session `{id}`", hint="end it when it is active")
        if stored.status == ACTIVE and session.workspace is not None:
            await self._free(session, discard=discard, keep=keep)
        await self._env.store.remove_entry(tokens.KIND, _token_name(id))
        after = replace(session, workspace=session.workspace if keep else None, runner=None, ended=await store.now())
        return await self._put(stored, after, ENDED)

    async def _free(self, session: Session, *, discard: bool, keep: bool) -> None:
        rows = [row for row in await self._env.store.workspaces() if row.id == session.workspace]
        for row in rows:  # it may have expired
            if session.own and not keep:
                async with self._kept.closed(row.id):
                    await workspaces.destroy(self._env, row.id, discard=discard)
            elif row.session == session.id:
                await self._env.store.append_to_workspace(row.id, [WorkspaceAttached(None)])


def _stored(entry: EntryRow) -> StoredSession:
    return StoredSession(decode(entry.body, Session), entry)
