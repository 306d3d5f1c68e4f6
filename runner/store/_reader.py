"""The reading half of a store of any SQL database."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import BinaryIO, TypeVar

from msgspec import Struct

from runner.core.model import ClockReference, Lease
from runner.events.events import Recorded, decode
from runner.events.record import replay
from runner.ports.store import Cursor, EntryRow, PoolRow, ProjectRow, RunnerRow, RunRow, SlotRow, WorkspaceRow
from runner.store._database import Connection, Database
from runner.store._entries import read_entries
from runner.store._leases import read_lease, read_leases
from runner.store._projects import find_project, read_projects
from runner.store._runners import read_runners
from runner.store._runs import ALL, find_run, read_runs
from runner.store._slots import read_counts, read_pools, read_slots
from runner.store._transfer import dump
from runner.store._workspaces import find_workspace, read_anchor, read_newest, read_workspaces

T = TypeVar("T")
_PAGE = 64  # events that a watcher holds


class Journal(Struct, frozen=True):
    """A table of events, and the column of their owner."""

    table: str
    owner: str


RUN_JOURNAL = Journal("events", "run")
WORKSPACE_JOURNAL = Journal("workspace_events", "workspace")


class Reader:
    """The reading half of a store. One call at a time uses the connection."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @property
    def _connection(self) -> Connection:
        return self._database.connection

    async def _read(self, action: Callable[[Connection], T]) -> T:
        return await self._database.run(lambda: action(self._connection))

    async def now(self) -> int:
        return await self._database.now()

    async def events(self, run: str, *, after: int = 0, limit: int | None = None) -> list[Recorded]:
        most = ALL if limit is None else limit
        return await self._read(partial(self._read_events, RUN_JOURNAL, run, after, limit=most))

    async def watch(self, run: str, *, after: int = 0) -> AsyncGenerator[Recorded]:
        while True:
            written = self._database.next_write(run)
            page = await self._database.look(partial(self._read_events, RUN_JOURNAL, run, after, limit=_PAGE))
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
        return await self._read(partial(self._read_events, WORKSPACE_JOURNAL, workspace, after))

    async def lease(self, workspace: str) -> Lease:
        return await self._read(lambda connection: read_lease(connection, workspace))

    async def leases(self) -> list[Lease]:
        return await self._read(read_leases)

    async def workspaces(
        self, *, status: str | None = None, before: Cursor | None = None, limit: int | None = None
    ) -> list[WorkspaceRow]:
        return await self._read(partial(read_workspaces, status=status, before=before, limit=limit))

    async def workspace(self, id: str) -> WorkspaceRow:
        return await self._database.look(lambda connection: find_workspace(connection, id))

    async def anchor(self) -> ClockReference | None:
        return await self._read(read_anchor)

    async def newest(self) -> int:
        return await self._read(read_newest)

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
        return await self._read(partial(wanted, before=before, limit=limit))

    async def run_counts(self) -> dict[str, int]:
        query = "SELECT status, count(*) FROM runs GROUP BY status ORDER BY status"
        return await self._database.run(lambda: dict(self._connection.execute(query).fetchall()))

    async def find(self, run: str) -> RunRow:
        return await self._database.look(lambda connection: find_run(connection, run))

    async def runners(self) -> list[RunnerRow]:
        return await self._read(read_runners)

    async def projects(self) -> list[ProjectRow]:
        return await self._read(read_projects)

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
        return await self._read(wanted)

    async def pools(self) -> list[PoolRow]:
        return await self._read(read_pools)

    async def slots(self) -> list[SlotRow]:
        return await self._read(read_slots)

    async def pool_counts(self) -> dict[str, int]:
        return await self._read(read_counts)

    def _read_events(
        self, journal: Journal, owner: str, after: int, connection: Connection, *, limit: int = ALL
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
