"""The store of any SQL database: what it reads, and the writing of events.

One caller at a time writes, for all who wait, in one transaction and one hop to a thread; later callers wait for the
next. A flush costs milliseconds, an event in it microseconds. There is no writer task: it would be no faster,
cancelling must not reach it, and its nursery would wrap what the block raises. Each append is a savepoint, so that a
refused one takes no other with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, BinaryIO, TypeVar, get_args

from msgspec import Struct

from runner.core.errors import LeaseError, RunExists, RunnerError, RunOver, StoreFailed, WorkspaceState
from runner.core.model import ClockReference, Fence, SlotState
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
    encode,
)
from runner.lifecycle.lease import LeaseEvent
from runner.lifecycle.workspace import WorkspaceEvent, named
from runner.ports.store import EntryRow, PoolRow, ProjectRow, RunnerRow, SlotRow
from runner.store._database import Connection, Database, Hook
from runner.store._entries import drop_entry, is_entry, write_entry
from runner.store._leases import check_fence, forget_leases, restore_lease, write_lease
from runner.store._projects import write_project
from runner.store._reader import RUN_JOURNAL, WORKSPACE_JOURNAL, Journal, Reader
from runner.store._runners import drop_runner, is_runner, replace_runner, write_runner
from runner.store._runs import require_pending, run_exists_error, start_run, submit_run
from runner.store._slots import change_slot, drop_slot, is_slot, project_count, write_pools, write_sizes, write_slot
from runner.store._transfer import is_empty, load
from runner.store._workspaces import project_workspace, write_anchor

if TYPE_CHECKING:
    import trio
else:
    from runner.core import trio_later as trio

T = TypeVar("T")

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


class _Append(Struct, kw_only=True):
    """A request to append and, once it has been written or refused, the answer."""

    owner: str
    events: Sequence[Event]
    rows: list[str]
    fence: Fence | None
    journal: Journal
    answer: list[Recorded] | RunnerError | None = None


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
        return await self._append(RUN_JOURNAL, run, events, fence)

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
        return await self._append(WORKSPACE_JOURNAL, workspace, events, fence)

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
        await self._restore(RUN_JOURNAL, run, history)

    async def restore_workspace(self, workspace: str, history: Sequence[Recorded]) -> None:
        """Insert events as ``restore`` does, into the journal of a workspace."""
        await self._restore(WORKSPACE_JOURNAL, workspace, history)

    async def _restore(self, journal: Journal, owner: str, history: Sequence[Recorded]) -> None:
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
        self, journal: Journal, owner: str, events: Sequence[Event], fence: Fence | None
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

    def _are_stored(self, journal: Journal, events: Sequence[Recorded]) -> bool:
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
