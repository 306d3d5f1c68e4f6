"""The store of any SQL database: queries, and the writing of events.

One caller at a time writes, for all who wait, in one transaction and one hop to a thread; later callers wait for the
next. A flush costs milliseconds, an event in it microseconds. There is no writer task: it would be no faster,
cancelling must not reach it, and its nursery would wrap what the block raises. Each append is a savepoint, so that a
refused one takes no other with it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, BinaryIO, TypeVar, get_args

from msgspec import Struct

from runner.core.errors import LeaseError, RunExists, RunnerError, RunOver, StoreFailed, WorkspaceState
from runner.core.model import ClockReference, Fence, Lease, SlotState
from runner.events.events import (
    Event,
    LeaseAcquired,
    LeaseRefreshed,
    LeaseReleased,
    PoolMissed,
    Recorded,
    RunEnded,
    RunPlaced,
    RunStarted,
    RunSubmitted,
    RunWaits,
    RunWithdrawn,
    SnapshotPublished,
    decode,
    encode,
)
from runner.events.record import replay
from runner.lifecycle.lease import LeaseEvent
from runner.lifecycle.workspace import WorkspaceEvent, named
from runner.ports.store import Cursor, EntryRow, PoolRow, ProjectRow, RunnerRow, RunRow, SlotRow, WorkspaceRow
from runner.store._database import Connection, Database, Hook
from runner.store._entries import drop_entry, is_entry, read_entries, write_entry
from runner.store._leases import check_fence, forget_leases, read_lease, read_leases, restore_lease, write_lease
from runner.store._projects import find_project, read_projects, write_project
from runner.store._runners import drop_runner, is_runner, read_runners, replace_runner, write_runner
from runner.store._runs import (
    ALL,
    find_run,
    read_runs,
    require_pending,
    run_exists_error,
    start_run,
    submit_run,
)
from runner.store._slots import (
    change_slot,
    drop_slot,
    is_slot,
    project_count,
    read_counts,
    read_pools,
    read_slots,
    write_pools,
    write_sizes,
    write_slot,
)
from runner.store._transfer import dump, is_empty, load
from runner.store._workspaces import (
    find_workspace,
    project_workspace,
    read_anchor,
    read_newest,
    read_workspaces,
    write_anchor,
)

if TYPE_CHECKING:
    import trio
else:
    from runner.core import trio_later as trio

T = TypeVar("T")
_PAGE = 64  # events that a watcher holds

_OF_PENDING = (RunPlaced, RunWaits, RunWithdrawn)
_PROJECTED = frozenset[type[Event]](
    (
        *get_args(WorkspaceEvent),
        *get_args(LeaseEvent),
        PoolMissed,
        RunSubmitted,
        *_OF_PENDING,
        RunStarted,
        RunEnded,
        SnapshotPublished,
    )
)


class _Journal(Struct, frozen=True):
    """A table of events, and the column of their owner."""

    table: str
    owner: str


_RUN_JOURNAL = _Journal("events", "run")
_WORKSPACE_JOURNAL = _Journal("workspace_events", "workspace")


class _Append(Struct, kw_only=True):
    """A request to append and, once it has been written or refused, the answer."""

    owner: str
    events: Sequence[Event]
    rows: list[str]
    fence: Fence | None
    journal: _Journal
    answer: list[Recorded] | RunnerError | None = None


class Reader:
    """The reading half of a store. One call at a time uses the connection."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @property
    def _connection(self) -> Connection:
        return self._database.connection

    async def now(self) -> int:
        return await self._database.now()

    async def events(self, run: str, *, after: int = 0, limit: int | None = None) -> list[Recorded]:
        wanted = partial(self._read_events, _RUN_JOURNAL, run, after, limit=ALL if limit is None else limit)
        return await self._database.run(lambda: wanted(self._connection))

    async def watch(self, run: str, *, after: int = 0) -> AsyncGenerator[Recorded]:
        while True:
            written = self._database.next_write(run)
            page = await self._database.look(partial(self._read_events, _RUN_JOURNAL, run, after, limit=_PAGE))
            for recorded in page:
                after = recorded.seq
                yield recorded
            if len(page) < _PAGE:
                await self._database.wait(written)

    async def export(self, file: BinaryIO) -> int:
        """Write one state of the whole store to a file, in place of what it holds, and return the number of rows."""

        def write() -> int:
            file.seek(0)
            file.truncate()
            return dump(self._connection, file)

        return await self._database.run(lambda: self._database.snapshot(write))

    async def workspace_events(self, workspace: str, *, after: int = 0) -> list[Recorded]:
        return await self._database.run(
            lambda: self._read_events(_WORKSPACE_JOURNAL, workspace, after, self._connection)
        )

    async def lease(self, workspace: str) -> Lease:
        return await self._database.run(lambda: read_lease(self._connection, workspace))

    async def leases(self) -> list[Lease]:
        return await self._database.run(lambda: read_leases(self._connection))

    async def workspaces(
        self, *, status: str | None = None, before: Cursor | None = None, limit: int | None = None
    ) -> list[WorkspaceRow]:
        wanted = partial(read_workspaces, status=status, before=before, limit=limit)
        return await self._database.run(lambda: wanted(self._connection))

    async def workspace(self, id: str) -> WorkspaceRow:
        return await self._database.look(lambda connection: find_workspace(connection, id))

    async def anchor(self) -> ClockReference | None:
        return await self._database.run(lambda: read_anchor(self._connection))

    async def newest(self) -> int:
        return await self._database.run(lambda: read_newest(self._connection))

    async def counts(self) -> dict[str, int]:
        both = "SELECT run, max(seq) FROM events GROUP BY run"
        both += " UNION ALL SELECT workspace, max(seq) FROM workspace_events GROUP BY workspace"
        return await self._database.run(lambda: {owner: int(seq) for owner, seq in self._connection.execute(both)})

    async def check(self) -> None:
        """Read everything. Raises ``StoreDamaged`` for what is not as it was written."""
        await self._database.run(self._database.check)
        runs = {row.id for row in await self.runs()}
        for owner in await self.counts():
            history = await (self.events(owner) if owner in runs else self.workspace_events(owner))
            try:
                if owner in runs:
                    replay(owner, history)
            except (KeyError, TypeError, AttributeError) as error:
                raise self._database.damaged(f"the events of run {owner} do not fit together") from error
            if [recorded.seq for recorded in history] != list(range(1, len(history) + 1)):
                raise self._database.damaged(f"events of {owner} are lacking")
        for read in (self.workspaces, self.leases, self.runners, self.projects, self.entries, self.pools, self.slots):
            await read()
        await self.anchor()
        await self.newest()
        await self.pool_counts()

    async def runs(
        self,
        *,
        status: str | None = None,
        exit_code: int | None = None,
        name: str | None = None,
        since: int | None = None,
        projects: Sequence[str] | None = None,
        before: Cursor | None = None,
        limit: int | None = None,
    ) -> list[RunRow]:
        wanted = partial(read_runs, status=status, exit_code=exit_code, name=name, since=since, projects=projects)
        return await self._database.run(lambda: wanted(self._connection, before=before, limit=limit))

    async def run_counts(self) -> dict[str, int]:
        query = "SELECT status, count(*) FROM runs GROUP BY status ORDER BY status"
        return await self._database.run(lambda: dict(self._connection.execute(query).fetchall()))

    async def find(self, run: str) -> RunRow:
        return await self._database.look(lambda connection: find_run(connection, run))

    async def runners(self) -> list[RunnerRow]:
        return await self._database.run(lambda: read_runners(self._connection))

    async def projects(self) -> list[ProjectRow]:
        return await self._database.run(lambda: read_projects(self._connection))

    async def project(self, name: str) -> ProjectRow:
        return find_project(await self.projects(), name)

    async def entries(
        self,
        kind: str | None = None,
        *,
        name: str | None = None,
        state: str | None = None,
        before: Cursor | None = None,
        limit: int | None = None,
    ) -> list[EntryRow]:
        wanted = partial(read_entries, kind=kind, name=name, state=state, before=before, limit=limit)
        if name is not None:
            return [*await self._database.look(wanted, ("entries", kind, name, state, before, limit))]
        return await self._database.run(lambda: wanted(self._connection))

    async def pools(self) -> list[PoolRow]:
        return await self._database.run(lambda: read_pools(self._connection))

    async def slots(self) -> list[SlotRow]:
        return await self._database.run(lambda: read_slots(self._connection))

    async def pool_counts(self) -> dict[str, int]:
        return await self._database.run(lambda: read_counts(self._connection))

    def _read_events(
        self, journal: _Journal, owner: str, after: int, connection: Connection, *, limit: int = ALL
    ) -> list[Recorded]:
        query = f"SELECT seq, at, body FROM {journal.table} WHERE {journal.owner} = ? AND seq > ? ORDER BY seq LIMIT ?"
        recorded = []
        for seq, at, body in connection.execute(query, (owner, after, limit)):
            try:
                recorded.append(Recorded(owner, seq, at, decode(body)))
            except (ValueError, TypeError) as error:
                what = f"event {seq} of {journal.owner} {owner} cannot be read: {error}"
                raise self._database.damaged(what) from error
        return recorded


class Store(Reader):
    def __init__(self, database: Database, nonce: str, *, hook: Hook, runner: RunnerRow | None) -> None:
        super().__init__(database)
        self.runner = runner
        self._registered = False
        self.nonce = nonce
        self.writable = database.writable
        self._hook = hook
        self._backlog: list[_Append] = []
        self._writing: trio.Event | None = None  # set when the commit under way has ended

    async def _change(
        self, action: Callable[[], T], *names: str, stored: Callable[[T], bool] = lambda answer: False
    ) -> T:
        """Write in a transaction of its own; see ``Database.transact``. Once begun it cannot be cancelled: what was
        claimed would be nobody's.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        with trio.CancelScope(shield=True):
            change = partial(self._database.transact, action, names=lambda: names, stored=stored)
            answer = await self._database.run(change)
        return answer  # noqa: RET504 - a scope that was cancelled would go on here

    async def append(self, run: str, events: Sequence[Event], *, fence: Fence | None = None) -> list[Recorded]:
        return await self._append(_RUN_JOURNAL, run, events, fence)

    async def register(self) -> None:
        self._registered = True
        await self.beat()

    async def beat(self) -> None:
        if self.runner is not None and self._registered:
            runner = self.runner
            await self._change(lambda: write_runner(self._connection, runner, self._database.time()))

    async def leave(self) -> None:
        if self.runner is not None and self._registered:
            id, self._registered = self.runner.id, False
            await self._change(lambda: drop_runner(self._connection, id, self._database.time()))

    async def take_run(self, run: str, before: str | None) -> bool:
        assert self.runner is not None
        runner, self._registered = self.runner, True
        return await self._change(
            lambda: replace_runner(self._connection, run, before, runner, self._database.time()),
            stored=lambda taken: taken and is_runner(self._connection, run, runner.id),
        )

    async def put_project(self, project: ProjectRow) -> ProjectRow:
        return await self._change(lambda: write_project(self._connection, project, self._database.time()))

    async def append_to_workspace(
        self, workspace: str, events: Sequence[Event], *, fence: Fence | None = None
    ) -> list[Recorded]:
        return await self._append(_WORKSPACE_JOURNAL, workspace, events, fence)

    async def set_anchor(self, anchor: ClockReference) -> None:
        await self._change(lambda: write_anchor(self._connection, anchor))

    async def put_entry(self, entry: EntryRow) -> EntryRow | None:
        return await self._change(
            lambda: write_entry(self._connection, entry, self._database.time()),
            stored=lambda written: written is not None and is_entry(self._connection, written),
        )

    async def remove_entry(self, kind: str, name: str) -> bool:
        return await self._change(lambda: drop_entry(self._connection, kind, name))

    async def put_pools(self, pools: Sequence[PoolRow]) -> None:
        await self._change(lambda: write_pools(self._connection, pools), "pools")

    async def resize_pools(self, sizes: Mapping[str, int]) -> None:
        await self._change(lambda: write_sizes(self._connection, sizes), "pools")

    async def put_slot(self, slot: SlotRow) -> SlotRow:
        return await self._change(
            lambda: write_slot(self._connection, slot, self._database.time()),
            stored=lambda made: is_slot(self._connection, made.id, made.state, made.workspace),
        )

    async def move_slot(self, id: str, before: SlotState, after: SlotState, workspace: str | None = None) -> bool:
        return await self._change(
            lambda: change_slot(self._connection, id, before, after, workspace),
            stored=lambda changed: changed and is_slot(self._connection, id, after, workspace),
        )

    async def remove_slot(self, id: str) -> None:
        await self._change(lambda: drop_slot(self._connection, id))

    async def load(self, file: BinaryIO) -> int:
        """Become the store that a file was written from, all or nothing, and return the number of rows.

        Cancelling leaves the store empty. Raises ``StoreNotEmpty`` and ``BadExport``.
        """

        def read() -> int:
            file.seek(0)
            return load(self._connection, file, self._database.refusals)

        transact = partial(self._database.transact, read, stored=lambda rows: not is_empty(self._connection))
        return await self._database.run(transact)

    async def restore(self, run: str, history: Sequence[Recorded]) -> None:
        """Insert further events of a run as they were recorded, with their times; all or none.

        For events that a store has accepted once: no lease is checked. Raises ``StoreFailed`` for others.
        """
        await self._restore(_RUN_JOURNAL, run, history)

    async def restore_workspace(self, workspace: str, history: Sequence[Recorded]) -> None:
        """Insert events as ``restore`` does, into the journal of a workspace."""
        await self._restore(_WORKSPACE_JOURNAL, workspace, history)

    async def _restore(self, journal: _Journal, owner: str, history: Sequence[Recorded]) -> None:
        misfits: tuple[type[Exception], ...] = (*self._database.refusals, WorkspaceState, RunExists, RunOver)

        def restore() -> list[Recorded]:
            for recorded in history:
                if isinstance(recorded.event, LeaseAcquired | LeaseRefreshed | LeaseReleased):
                    restore_lease(self._connection, recorded.event, recorded.at)
                else:
                    _project(self._connection, owner, recorded.at, recorded.event)
                row = (owner, recorded.seq, recorded.at, encode(recorded.event))
                self._connection.execute(f"INSERT INTO {journal.table} VALUES (?, ?, ?, ?)", row)
            return [*history]

        def restore_or_refuse() -> list[Recorded]:
            try:
                return restore()
            except misfits as error:
                raise StoreFailed(f"events of {journal.owner} `{owner}` do not fit: {error}") from error

        names = {owner}.union(*(_names(owner, recorded.event) for recorded in history))
        await self._change(restore_or_refuse, *names, stored=lambda answer: self._are_stored(journal, answer))

    async def _append(
        self, journal: _Journal, owner: str, events: Sequence[Event], fence: Fence | None
    ) -> list[Recorded]:
        request = _Append(
            owner=owner, events=events, rows=[encode(event) for event in events], fence=fence, journal=journal
        )
        self._backlog.append(request)
        while request.answer is None:
            if self._writing is None:
                await self._write()
            else:
                await self._writing.wait()
        if isinstance(request.answer, RunnerError):
            raise request.answer
        return request.answer

    async def _write(self) -> None:
        """Commit all waiting requests. Shielded, for others wait for it too; bounded by the database's time-outs."""
        self._writing = trio.Event()
        batch: list[_Append] = []
        try:
            with trio.CancelScope(shield=True):
                await trio.lowlevel.checkpoint()  # callers that the last commit woke come along
                batch, self._backlog = self._backlog, []
                await self._commit(batch)
        finally:
            for request in batch:
                if request.answer is None:
                    request.answer = StoreFailed(f"`{self._database.name}`: the commit did not come to an end")
            self._writing.set()
            self._writing = None
            self._database.wake(request.owner for request in batch)

    async def _commit(self, batch: Sequence[_Append]) -> None:
        """Write a batch in one transaction and leave an answer in each request."""

        def write() -> list[list[Recorded] | RunnerError]:
            answers = [self._try_insert(request) for request in batch]
            self._hook("torn")
            return answers

        def commit() -> list[list[Recorded] | RunnerError]:
            self._hook("before")
            answers = self._database.transact(write, names=lambda: _names_of(batch), stored=stored)
            self._hook("after")
            return answers

        def stored(answers: Sequence[list[Recorded] | RunnerError]) -> bool:
            """Look for one append of the batch: all are there or none."""
            for request, answer in zip(batch, answers, strict=True):
                if not isinstance(answer, RunnerError) and answer:
                    return self._are_stored(request.journal, answer)
            return True

        answers: Sequence[list[Recorded] | RunnerError]
        try:
            answers = await self._database.run(commit)
        except RunnerError as error:
            answers = [error for _ in batch]
        for request, answer in zip(batch, answers, strict=True):
            request.answer = answer

    def _are_stored(self, journal: _Journal, events: Sequence[Recorded]) -> bool:
        """Tell whether the last of events that were written together is in its journal."""
        last = events[-1]
        query = f"SELECT at, body FROM {journal.table} WHERE {journal.owner} = ? AND seq = ?"
        found = self._connection.execute(query, (last.run, last.seq)).fetchone()
        return found is not None and tuple(found) == (last.at, encode(last.event))

    def _try_insert(self, request: _Append) -> list[Recorded] | RunnerError:
        try:
            with self._database.savepoint():
                return self._insert(request)
        except LeaseError as refusal:
            return refusal
        except self._database.refusals as error:
            return _key_conflict(self._connection, request) or self._refusal_of(request, error)

    def _refusal_of(self, request: _Append, error: Exception) -> RunnerError:
        match self._database.broken_rule(error):
            case "unique":
                return RunOver(f"run `{request.owner}` has ended already")
            case "foreign":
                return StoreFailed(f"run `{request.owner}` has not started")
        return StoreFailed(f"events of run `{request.owner}` cannot be stored: {error}")

    def _insert(self, request: _Append) -> list[Recorded]:
        run, at, journal = request.owner, self._database.time(), request.journal
        if request.fence is not None:
            check_fence(self._connection, request.fence, at)
        query = f"SELECT coalesce(max(seq), 0) + 1 FROM {journal.table} WHERE {journal.owner} = ?"
        (first,) = self._connection.execute(query, (run,)).fetchone()
        for event in request.events:
            if type(event) in _PROJECTED:  # a test alone for what an agent says a thousand times
                _project(self._connection, run, at, event, self._named_by(event, at))
        rows = [(run, seq, at, body) for seq, body in zip(count(first), request.rows, strict=False)]
        self._connection.executemany(f"INSERT INTO {journal.table} VALUES (?, ?, ?, ?)", rows)
        return [Recorded(run, seq, at, event) for seq, event in zip(count(first), request.events, strict=False)]

    def _named_by(self, event: Event, at: int) -> str | None:
        """Return the runner that the row of an event names, once it is recorded itself."""
        if self.runner is None or not isinstance(event, RunSubmitted | RunStarted | LeaseAcquired):
            return None
        write_runner(self._connection, self.runner, at)
        self._registered = True
        return self.runner.id


def _names_of(batch: Sequence[_Append]) -> set[str]:
    """Return the names of the journals, leases and workspaces that a batch changes or relies on."""
    names = set()
    for request in batch:
        names.add(request.owner)
        if request.fence is not None:
            names.add(request.fence.workspace)
        for event in request.events:
            names |= _names(request.owner, event)
    return names


def _names(owner: str, event: Event) -> set[str]:
    if isinstance(event, LeaseAcquired | LeaseRefreshed | LeaseReleased):
        return {event.workspace}
    named_workspace = named(owner, event)
    return set() if named_workspace is None else {named_workspace}


def _project(connection: Connection, run: str, at: int, event: Event, runner: str | None = None) -> None:
    """Update the projection tables for an event of a runner."""
    project_workspace(connection, run, at, event)
    project_count(connection, event)
    match event:
        case RunSubmitted() as submitted:
            submit_run(connection, run, submitted, at, runner)
        case RunPlaced() | RunWaits() | RunWithdrawn():
            require_pending(connection, run)
        case RunStarted() as started:
            start_run(connection, run, started, at, runner)
        case RunEnded(outcome=outcome, exit_code=exit_code):
            connection.execute(
                "UPDATE runs SET status = ?, exit_code = ?, ended = ? WHERE id = ?",
                (outcome.status, exit_code, at, run),
            )
            forget_leases(connection)
        case SnapshotPublished(commit=commit, tree=tree, base=base, branch=branch):
            connection.execute(
                "INSERT INTO snapshots VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
                (run, commit, tree, base, branch, at),
            )
        case LeaseAcquired() | LeaseRefreshed():
            write_lease(connection, event, at, runner)
        case LeaseReleased():
            write_lease(connection, event, at, None)
            forget_leases(connection)


def _key_conflict(connection: Connection, request: _Append) -> RunnerError | None:
    """Return the refusal of an append whose key another run has, if that is the reason."""
    for event in request.events:
        if isinstance(event, RunSubmitted | RunStarted) and event.key is not None:
            query = "SELECT id FROM runs WHERE key = ? AND name = ? AND id <> ?"
            for (run,) in connection.execute(query, (event.key, event.name, request.owner)):
                return run_exists_error(run, event)
    return None
