"""The store on one machine: SQLite in WAL mode, every acknowledged event flushed to disk.

One caller at a time writes, for all who wait, in one transaction and one hop to a thread; later callers wait for the
next. A flush costs milliseconds, an event in it microseconds. There is no writer task: it would be no faster,
cancelling must not reach it, and its nursery would wrap what the block raises. Each append is a savepoint, so that a
refused one takes no other with it. Several processes may have the same store open.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar, get_args

import trio
from msgspec import Struct

from runner import __version__
from runner.core.clock import now_microseconds
from runner.core.errors import (
    BadStoreUrl,
    LeaseError,
    RunnerError,
    RunOver,
    StoreBusy,
    StoreDamaged,
    StoreFailed,
    StoreTooNew,
    StoreTooOld,
    WorkspaceState,
)
from runner.core.model import ClockReference, Fence, Lease, SlotState, Status
from runner.core.sanitize import excerpt
from runner.core.settings import without_secrets
from runner.events.events import (
    Event,
    LeaseAcquired,
    LeaseRefreshed,
    LeaseReleased,
    PoolMissed,
    Recorded,
    RunEnded,
    RunStarted,
    SnapshotPublished,
    decode,
    encode,
)
from runner.events.record import replay
from runner.lifecycle.lease import LeaseEvent
from runner.lifecycle.workspace import WorkspaceEvent
from runner.ports.store import Cursor, PoolRow, ProjectRow, RunnerRow, RunRow, SlotRow, WorkspaceRow
from runner.store._leases import check_fence, forget_leases, read_lease, read_leases, restore_lease, write_lease
from runner.store._projects import find_project, read_projects, write_project
from runner.store._rows import storable
from runner.store._runners import drop_runner, read_runners, replace_runner, write_runner
from runner.store._runs import find_run, read_runs, run_exists_error
from runner.store._slots import (
    change_slot,
    drop_slot,
    project_count,
    read_counts,
    read_pools,
    read_slots,
    write_pools,
    write_sizes,
    write_slot,
)
from runner.store._workspaces import (
    find_workspace,
    project_workspace,
    read_anchor,
    read_newest,
    read_workspaces,
    write_anchor,
)

OLDEST = 10  # of the schemas that are read
BUSY_MILLISECONDS = 5_000
POLL = 0.2  # seconds between looks for events that another process has written: a search by the primary key
_BUSY_TIMEOUT = f"PRAGMA busy_timeout = {BUSY_MILLISECONDS}"
_PRAGMAS = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = ON",
)
_ERRORS: dict[int, type[RunnerError]] = {  # by primary result code; anything else is StoreFailed
    sqlite3.SQLITE_BUSY: StoreBusy,
    sqlite3.SQLITE_LOCKED: StoreBusy,
    sqlite3.SQLITE_CORRUPT: StoreDamaged,
    sqlite3.SQLITE_NOTADB: StoreDamaged,
    sqlite3.SQLITE_ERROR: StoreDamaged,  # of statements that never change: a table or column is not there
}
REBUILD_HINT = "`runner store rebuild` reads it anew from the directories of its runs"
_HINTS: dict[type[RunnerError], str] = {
    StoreBusy: "another process keeps the store locked; try again when it is done",
    StoreDamaged: f"the file is left as it is; {REBUILD_HINT}",
    StoreFailed: "check space and permissions there; nothing unfinished was written",
}

_PROJECTED = frozenset[type[Event]](
    (*get_args(WorkspaceEvent), *get_args(LeaseEvent), PoolMissed, RunStarted, RunEnded, SnapshotPublished)
)

T = TypeVar("T")
Hook = Callable[[str], None]


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
    """The reading half of a store. One call at a time uses the connection. The clock is that of this host."""

    def __init__(self, connection: sqlite3.Connection, path: Path, now: Callable[[], int] = now_microseconds) -> None:
        self._connection = connection
        self._path = path
        self._now = now
        self._limiter = trio.CapacityLimiter(1)
        self._written = trio.Event()  # set at the next commit by this store; of others nothing is heard

    async def now(self) -> int:
        return self._now()

    async def events(self, run: str, *, after: int = 0) -> list[Recorded]:
        return await self._in_thread(lambda: self._read_events(_RUN_JOURNAL, run, after))

    async def watch(self, run: str, *, after: int = 0) -> AsyncGenerator[Recorded]:
        while True:
            written = self._written
            for recorded in await self.events(run, after=after):
                after = recorded.seq
                yield recorded
            with trio.move_on_after(POLL):
                await written.wait()

    async def workspace_events(self, workspace: str, *, after: int = 0) -> list[Recorded]:
        return await self._in_thread(lambda: self._read_events(_WORKSPACE_JOURNAL, workspace, after))

    async def lease(self, workspace: str) -> Lease:
        return await self._in_thread(lambda: read_lease(self._connection, workspace))

    async def leases(self) -> list[Lease]:
        return await self._in_thread(lambda: read_leases(self._connection))

    async def workspaces(
        self, *, status: str | None = None, before: Cursor | None = None, limit: int | None = None
    ) -> list[WorkspaceRow]:
        wanted = partial(read_workspaces, self._connection, status=status, before=before, limit=limit)
        return await self._in_thread(wanted)

    async def workspace(self, id: str) -> WorkspaceRow:
        return await self._in_thread(lambda: find_workspace(self._connection, id))

    async def anchor(self) -> ClockReference | None:
        return await self._in_thread(lambda: read_anchor(self._connection))

    async def newest(self) -> int:
        return await self._in_thread(lambda: read_newest(self._connection))

    async def counts(self) -> dict[str, int]:
        both = "SELECT run, max(seq) FROM events GROUP BY run"
        both += " UNION ALL SELECT workspace, max(seq) FROM workspace_events GROUP BY workspace"
        return await self._in_thread(lambda: {owner: int(seq) for owner, seq in self._connection.execute(both)})

    async def check(self) -> None:
        """Read everything. Raises ``StoreDamaged`` for what is not as it was written."""
        await self._in_thread(self._check)
        runs = {row.id for row in await self.runs()}
        for owner in await self.counts():
            history = await (self.events(owner) if owner in runs else self.workspace_events(owner))
            try:
                if owner in runs:
                    replay(owner, history)
            except (KeyError, TypeError, AttributeError) as error:
                raise _damaged(self._path, f"the events of run {owner} do not fit together") from error
            if [recorded.seq for recorded in history] != list(range(1, len(history) + 1)):
                raise _damaged(self._path, f"events of {owner} are lacking")
        for read in (self.workspaces, self.leases, self.runners, self.projects, self.pools, self.slots):
            await read()
        await self.anchor()
        await self.newest()
        await self.pool_counts()

    def _check(self) -> None:
        (verdict,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise _damaged(self._path, verdict)
        if self._connection.execute("PRAGMA foreign_key_check").fetchone():
            raise _damaged(self._path, "there are events of no run")

    async def runs(
        self,
        *,
        status: str | None = None,
        name: str | None = None,
        since: int | None = None,
        before: Cursor | None = None,
        limit: int | None = None,
    ) -> list[RunRow]:
        wanted = partial(read_runs, self._connection, status=status, name=name, since=since, before=before, limit=limit)
        return await self._in_thread(wanted)

    async def find(self, run: str) -> RunRow:
        return await self._in_thread(lambda: find_run(self._connection, run))

    async def runners(self) -> list[RunnerRow]:
        return await self._in_thread(lambda: read_runners(self._connection))

    async def projects(self) -> list[ProjectRow]:
        return await self._in_thread(lambda: read_projects(self._connection))

    async def project(self, name: str) -> ProjectRow:
        return find_project(await self.projects(), name)

    async def pools(self) -> list[PoolRow]:
        return await self._in_thread(lambda: read_pools(self._connection))

    async def slots(self) -> list[SlotRow]:
        return await self._in_thread(lambda: read_slots(self._connection))

    async def pool_counts(self) -> dict[str, int]:
        return await self._in_thread(lambda: read_counts(self._connection))

    def _read_events(self, journal: _Journal, owner: str, after: int) -> list[Recorded]:
        query = f"SELECT seq, at, body FROM {journal.table} WHERE {journal.owner} = ? AND seq > ? ORDER BY seq"
        recorded = []
        for seq, at, body in self._connection.execute(query, (owner, after)):
            try:
                recorded.append(Recorded(owner, seq, at, decode(body)))
            except (ValueError, TypeError) as error:
                what = f"event {seq} of {journal.owner} {owner} cannot be read: {error}"
                raise _damaged(self._path, what) from error
        return recorded

    async def _in_thread(self, action: Callable[[], T]) -> T:
        def translated() -> T:
            with _translated_errors(self._path):
                return action()

        return await trio.to_thread.run_sync(translated, limiter=self._limiter)


class SqliteStore(Reader):
    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        nonce: str,
        now: Callable[[], int],
        *,
        hook: Hook,
        runner: RunnerRow | None,
    ) -> None:
        super().__init__(connection, path, now)
        self.runner = runner
        self._registered = False
        self.nonce = nonce
        self.writable = not is_read_only(path.parent)
        self._hook = hook
        self._backlog: list[_Append] = []
        self._writing: trio.Event | None = None  # set when the commit under way has ended
        self._refusal: RunnerError | None = None  # once there is one, this connection writes no more

    async def append(self, run: str, events: Sequence[Event], *, fence: Fence | None = None) -> list[Recorded]:
        return await self._append(_RUN_JOURNAL, run, events, fence)

    async def register(self) -> None:
        self._registered = True
        await self.beat()

    async def beat(self) -> None:
        if self.runner is not None and self._registered:
            runner = self.runner
            await self._in_thread(lambda: write_runner(self._connection, runner, self._now()))

    async def leave(self) -> None:
        if self.runner is not None and self._registered:
            id, self._registered = self.runner.id, False
            await self._in_thread(lambda: drop_runner(self._connection, id, self._now()))

    async def take_run(self, run: str, before: str | None) -> bool:
        assert self.runner is not None
        runner, self._registered = self.runner, True
        return await self._in_thread(lambda: replace_runner(self._connection, run, before, runner, self._now()))

    async def put_project(self, project: ProjectRow) -> ProjectRow:
        return await self._in_thread(lambda: write_project(self._connection, project, self._now()))

    async def append_to_workspace(
        self, workspace: str, events: Sequence[Event], *, fence: Fence | None = None
    ) -> list[Recorded]:
        return await self._append(_WORKSPACE_JOURNAL, workspace, events, fence)

    async def set_anchor(self, anchor: ClockReference) -> None:
        await self._in_thread(lambda: write_anchor(self._connection, anchor))

    async def put_pools(self, pools: Sequence[PoolRow]) -> None:
        await self._in_thread(lambda: write_pools(self._connection, pools))

    async def resize_pools(self, sizes: Mapping[str, int]) -> None:
        await self._in_thread(lambda: write_sizes(self._connection, sizes))

    async def put_slot(self, slot: SlotRow) -> SlotRow:
        return await self._in_thread(lambda: write_slot(self._connection, slot, self._now()))

    async def move_slot(self, id: str, before: SlotState, after: SlotState, workspace: str | None = None) -> bool:
        return await self._in_thread(lambda: change_slot(self._connection, id, before, after, workspace))

    async def remove_slot(self, id: str) -> None:
        await self._in_thread(lambda: drop_slot(self._connection, id))

    async def restore(self, run: str, history: Sequence[Recorded]) -> None:
        """Insert further events of a run as they were recorded, with their times; all or none.

        For events that a store has accepted once: no lease is checked. Raises ``StoreFailed`` for others.
        """
        await self._in_thread(lambda: self._restore(_RUN_JOURNAL, run, history))

    async def restore_workspace(self, workspace: str, history: Sequence[Recorded]) -> None:
        """Insert events as ``restore`` does, into the journal of a workspace."""
        await self._in_thread(lambda: self._restore(_WORKSPACE_JOURNAL, workspace, history))

    def _restore(self, journal: _Journal, owner: str, history: Sequence[Recorded]) -> None:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            for recorded in history:
                if isinstance(recorded.event, LeaseAcquired | LeaseRefreshed | LeaseReleased):
                    restore_lease(connection, recorded.event, recorded.at)
                else:
                    _project(connection, owner, recorded.at, recorded.event)
                row = (owner, recorded.seq, recorded.at, encode(recorded.event))
                connection.execute(f"INSERT INTO {journal.table} VALUES (?, ?, ?, ?)", row)
            connection.execute("COMMIT")
        except (sqlite3.IntegrityError, WorkspaceState) as error:
            raise StoreFailed(f"events of {journal.owner} `{owner}` do not fit: {error}") from error
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

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
        """Commit all waiting requests. Shielded, for others wait for it too; bounded by the busy time-out."""
        self._writing = trio.Event()
        batch: list[_Append] = []
        try:
            with trio.CancelScope(shield=True):
                await trio.lowlevel.checkpoint()  # callers that the last commit woke come along
                batch, self._backlog = self._backlog, []
                await trio.to_thread.run_sync(self._commit, batch, limiter=self._limiter)
        finally:
            for request in batch:
                if request.answer is None:
                    request.answer = StoreFailed(f"`{self._path}`: the commit did not come to an end")
            self._writing.set()
            self._writing = None
            self._written.set()
            self._written = trio.Event()

    def _commit(self, batch: Sequence[_Append]) -> None:
        """Write a batch in one transaction and leave an answer in each request."""
        try:
            with _translated_errors(self._path):
                self._hook("before")
                if self._refusal:
                    raise self._refusal
                self._connection.execute("BEGIN IMMEDIATE")
                answers = [self._try_insert(request) for request in batch]
                self._hook("torn")
                self._connection.execute("COMMIT")
                self._hook("after")
        except RunnerError as error:
            answers = [error for _ in batch]
            self._roll_back(error)
        for request, answer in zip(batch, answers, strict=True):
            request.answer = answer

    def _try_insert(self, request: _Append) -> list[Recorded] | RunnerError:
        answer: list[Recorded] | RunnerError
        self._connection.execute("SAVEPOINT append")
        try:
            answer = self._insert(request)
        except (sqlite3.IntegrityError, UnicodeEncodeError) as error:
            self._connection.execute("ROLLBACK TO append")
            answer = _key_conflict(self._connection, request) or _refusal_of(request, error)
        except LeaseError as refusal:
            self._connection.execute("ROLLBACK TO append")
            answer = refusal
        self._connection.execute("RELEASE append")
        return answer

    def _insert(self, request: _Append) -> list[Recorded]:
        run, at, journal = request.owner, self._now(), request.journal
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
        if self.runner is None or not isinstance(event, RunStarted | LeaseAcquired):
            return None
        write_runner(self._connection, self.runner, at)
        self._registered = True
        return self.runner.id

    def _roll_back(self, error: RunnerError) -> None:
        if isinstance(error.__cause__, sqlite3.Error) and _primary(error.__cause__) == sqlite3.SQLITE_IOERR:
            # After a failed flush the kernel may call pages clean that never reached the disk: a second
            # commit would succeed and lie.
            self._refusal = error
        if self._connection.in_transaction:
            with _translated_errors(self._path):
                self._connection.execute("ROLLBACK")


def place(url: str) -> Path:
    """Return the file that a URL names. Raises ``BadStoreUrl``."""
    path = url.removeprefix("sqlite://")
    if not path.startswith("/") or not path.strip("/"):
        raise BadStoreUrl(f"`{excerpt(without_secrets(url))}` names no file", hint="write sqlite:///PATH")
    return Path("/" + path.lstrip("/"))


def exists(path: Path) -> bool:
    return path.exists()


@asynccontextmanager
async def open_store(
    path: Path,
    *,
    now: Callable[[], int] = now_microseconds,
    entropy: Callable[[int], bytes],
    hook: Hook = lambda point: None,
    must_exist: bool = False,
    runner: RunnerRow | None = None,
) -> AsyncIterator[SqliteStore]:
    """Open the store in ``path``, migrated first if need be, and made unless it ``must_exist``.

    On a read-only medium it can be read, and every write is refused with ``StoreFailed``.

    ``now`` returns microseconds since the epoch. ``hook`` is called in the writing thread at each commit with
    ``before``, ``torn`` (rows written, not committed) and ``after``. Raises ``StoreFailed``, ``StoreBusy``,
    ``StoreDamaged``, ``StoreTooOld`` and ``StoreTooNew``.
    """
    with ExitStack() as stack:
        opened = await trio.to_thread.run_sync(partial(_open, path, entropy, stack, must_exist=must_exist))
        connection = stack.enter_context(closing(opened))
        with _translated_errors(path):
            (nonce,) = connection.execute("SELECT nonce FROM meta").fetchone()
        yield SqliteStore(connection, path, nonce, now, hook=hook, runner=runner)


@asynccontextmanager
async def open_reader(path: Path, *, must_exist: bool = False) -> AsyncIterator[Reader]:
    """Open the store in ``path`` for reading, also while others write, and on a read-only medium.

    A missing one is empty, and not made; with ``must_exist`` it is ``StoreDamaged``.
    """
    with ExitStack() as stack:
        connection = await trio.to_thread.run_sync(partial(_open_to_read, path, stack, must_exist=must_exist))
        stack.enter_context(closing(connection))
        yield Reader(connection, path)


def _open(path: Path, entropy: Callable[[int], bytes], stack: ExitStack, *, must_exist: bool) -> sqlite3.Connection:
    """Open a store for writing; ``stack`` as for ``_open_to_read``."""
    if path.exists() and is_read_only(path.parent):
        return _open_to_read(path, stack, must_exist=must_exist)
    try:
        _check_exists(path, must_exist=must_exist)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.exists():
            _check_regular(path)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise StoreFailed(f"`{path}` cannot be opened: {error.strerror}", hint=_HINTS[StoreFailed]) from error
    with _translated_errors(path):
        connection = _connect(str(path))
        try:
            connection.execute(_BUSY_TIMEOUT)
            _check_version(connection, path, must_exist=must_exist)  # before a foreign file is changed in any way
            for pragma in _PRAGMAS:
                connection.execute(pragma)
            migrate(connection, path, scripts(), entropy)
        except BaseException:
            connection.close()
            raise
    return connection


def _open_to_read(path: Path, stack: ExitStack, *, must_exist: bool) -> sqlite3.Connection:
    """Open a store for reading; ``stack`` holds what must live as long as the connection."""
    with _translated_errors(path):
        _check_exists(path, must_exist=must_exist)
        if not os.path.exists(path):
            connection = _connect(":memory:")
            migrate(connection, path, scripts(), bytes)
            return connection
        _check_regular(path)
        if is_read_only(path.parent):
            connection = _open_checked(_read_only_uri(path, stack), path, must_exist=must_exist)
            connection.execute("PRAGMA query_only = ON")  # also of a copy, from which nothing would come back
            return connection
        return _open_checked(f"{path.absolute().as_uri()}?mode=ro", path, must_exist=must_exist)


def _open_checked(name: str, path: Path, *, must_exist: bool) -> sqlite3.Connection:
    connection = _connect(name)
    try:
        connection.execute(_BUSY_TIMEOUT)
        _check_version(connection, path, must_exist=must_exist)
    except BaseException:
        connection.close()
        raise
    return connection


def is_read_only(directory: Path) -> bool:
    """Tell whether the medium that a directory is on takes no writes."""
    return bool(os.statvfs(directory).f_flag & os.ST_RDONLY)


def _read_only_uri(path: Path, stack: ExitStack) -> str:
    """Return the URI of a database that cannot be written, for which SQLite would make files beside it.

    The log that a killed runner has left beside it counts, so a copy of both is read.
    """
    log = path.with_name(f"{path.name}-wal")
    if not log.exists() or not log.stat().st_size:
        return f"{path.absolute().as_uri()}?immutable=1"
    copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="runner-store-")), path.name)
    shutil.copyfile(path, copy)
    shutil.copyfile(log, copy.with_name(log.name))
    return f"{copy.as_uri()}?mode=rw"


def _check_regular(path: Path) -> None:
    if not path.is_file():
        raise _damaged(path, "it is not a regular file")


def _connect(name: str) -> sqlite3.Connection:
    # Autocommit: transactions are written out. Any worker thread may use it; a limiter lets in one at a time.
    return sqlite3.connect(name, isolation_level=None, check_same_thread=False, uri=name.startswith("file:"))


def scripts() -> list[str]:
    """List the migrations in their order: the first makes an empty file a store of version ``OLDEST``."""
    return [file.read_text() for file in sorted((Path(__file__).parent / "migrations").glob("*.sql"))]


def migrate(
    connection: sqlite3.Connection, path: Path, scripts: Sequence[str], entropy: Callable[[int], bytes]
) -> None:
    """Migrate a database to the newest schema, each script in a transaction of its own; never back.

    One with content is copied beside itself first, as ``NAME.schema-VERSION``.
    """
    newest = OLDEST + len(scripts) - 1
    new = not _version(connection, path, newest)
    while (version := _version(connection, path, newest)) < newest:
        if not new:
            _back_up(connection, path.with_name(f"{path.name}.schema-{version}"))
        connection.execute("BEGIN IMMEDIATE")
        try:
            if _version(connection, path, newest) == version:  # else another process was faster
                then = max(version + 1, OLDEST)
                for statement in scripts[then - OLDEST].split(";\n"):
                    connection.execute(statement)
                if version == 0:
                    connection.execute("INSERT INTO meta VALUES (?, 0, '')", (entropy(8).hex(),))
                connection.execute("UPDATE meta SET schema_version = ?, runner = ?", (then, __version__))
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def _version(connection: sqlite3.Connection, path: Path, newest: int) -> int:
    """Return the schema's number, 0 for an empty file. Raises ``StoreTooNew``, ``StoreTooOld`` and ``StoreDamaged``."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    if not tables:
        return 0
    found = connection.execute("SELECT schema_version, runner FROM meta").fetchone() if "meta" in tables else None
    if found is None:
        raise _damaged(path, "it is a database, but not a store")
    version, runner = found
    schemas = f"(schema {version}, this runner knows {OLDEST} to {newest})"
    if version > newest:
        raise StoreTooNew(f"`{path}` was written by runner {runner} {schemas}", hint=f"use runner {runner} or newer")
    if version < OLDEST:
        raise StoreTooOld(f"`{path}` was written by runner {runner} {schemas}", hint=_HINTS[StoreDamaged])
    return int(version)


def _back_up(connection: sqlite3.Connection, to: Path) -> None:
    """Copy a database; the copy gets its name once it is whole: several processes may do this at a time."""
    file, part = tempfile.mkstemp(dir=to.parent, prefix=f".{to.name}.")
    os.close(file)
    try:
        with closing(sqlite3.connect(part)) as copy:
            connection.backup(copy)
        os.replace(part, to)
    except BaseException:
        os.unlink(part)
        raise


def _project(connection: sqlite3.Connection, run: str, at: int, event: Event, runner: str | None = None) -> None:
    """Update the projection tables for an event of a runner."""
    project_workspace(connection, run, at, event)
    project_count(connection, event)
    match event:
        case RunStarted() as started:
            connection.execute(
                "INSERT INTO runs (id, name, status, plan, created, key, resumes, rehearsal, manifests, runner)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
                (run, started.name, Status.RUNNING, started.plan, at, started.key, *_sources(started), runner),
            )
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


def _sources(started: RunStarted) -> list[str | None]:
    return [said and storable(said) for said in (started.resumes, started.rehearsal, started.manifests)]


def _key_conflict(connection: sqlite3.Connection, request: _Append) -> RunnerError | None:
    """Return the refusal of an append whose key another run has, if that is the reason."""
    for event in request.events:
        if isinstance(event, RunStarted) and event.key is not None:
            query = "SELECT id FROM runs WHERE key = ? AND name = ? AND id <> ?"
            for (run,) in connection.execute(query, (event.key, event.name, request.owner)):
                return run_exists_error(run, event)
    return None


def _refusal_of(request: _Append, error: Exception) -> RunnerError:
    if getattr(error, "sqlite_errorname", "") == "SQLITE_CONSTRAINT_UNIQUE":
        return RunOver(f"run `{request.owner}` has ended already")
    if getattr(error, "sqlite_errorname", "") == "SQLITE_CONSTRAINT_FOREIGNKEY":
        return StoreFailed(f"run `{request.owner}` has not started")
    return StoreFailed(f"events of run `{request.owner}` cannot be stored: {error}")


def _damaged(path: Path, what: str) -> StoreDamaged:
    return StoreDamaged(f"`{path}` is damaged: {what}", hint=_HINTS[StoreDamaged])


def _check_exists(path: Path, *, must_exist: bool) -> None:
    if must_exist and not os.path.exists(path):
        raise StoreDamaged(f"`{path}` is missing, and `{path.parent}` holds what runs have left", hint=REBUILD_HINT)


def _check_version(connection: sqlite3.Connection, path: Path, *, must_exist: bool) -> None:
    if not _version(connection, path, OLDEST + len(scripts()) - 1) and must_exist:
        raise StoreDamaged(f"`{path}` is empty, and `{path.parent}` holds what runs have left", hint=REBUILD_HINT)


def _primary(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


@contextmanager
def _translated_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        undecodable = isinstance(error, sqlite3.OperationalError) and str(error).startswith("Could not decode")
        kind = StoreDamaged if undecodable else _ERRORS.get(_primary(error), StoreFailed)
        raise kind(f"`{path}`: {error}", hint=_HINTS[kind]) from error
    except (ValueError, TypeError, KeyError) as error:  # what is no text, number, word or JSON that was ever written
        raise _damaged(path, f"what is in it cannot be read: {error}") from error
