"""The store on one machine: SQLite in WAL mode, every acknowledged event flushed to disk.

Several processes may have the same store open.
"""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from runner import __version__
from runner.core.clock import now_microseconds
from runner.core.errors import (
    BadStoreUrl,
    LeaseError,
    RunnerError,
    StoreBusy,
    StoreDamaged,
    StoreFailed,
    StoreTooOld,
)
from runner.core.sanitize import excerpt
from runner.core.settings import without_secrets
from runner.ports.store import RunnerRow
from runner.store._database import OLDEST, Connection, Hook, check_version, scripts_in
from runner.store._reader import Reader
from runner.store._sql import Store

if TYPE_CHECKING:
    import trio
else:
    from runner.core import trio_later as trio

T = TypeVar("T")

BUSY_MILLISECONDS = 5_000
POLL = 0.2  # seconds between looks for what another process has written
_REMEMBERED = 1_000  # answers to looks
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


class SqliteDatabase:
    """A file of this host, with its clock."""

    refusals = (sqlite3.IntegrityError, UnicodeEncodeError)

    def __init__(
        self, connection: sqlite3.Connection, path: Path, clock: Callable[[], int], *, looks: bool = False
    ) -> None:
        self.connection = connection
        self.name = str(path)
        self._path = path
        self._clock = clock
        self._refusal: RunnerError | None = None  # once there is one, this connection writes no more
        self._looks = looks  # whether a second connection may be opened, which only looks
        self._looking: sqlite3.Connection | None = None
        self._polled = False  # whether one of those who wait looks for what other processes write
        self._version = 0  # of the file when ``_written`` was made; another process's commit changes it too
        self._seen: dict[Hashable, Any] = {}  # by ``look``, of the version ``_seen_at``
        self._seen_at = 0

    @cached_property
    def _limiter(self) -> trio.CapacityLimiter:
        return trio.CapacityLimiter(1)

    @cached_property
    def _written(self) -> trio.Event:
        """Set at the next commit by this store; of others nothing is heard."""
        return trio.Event()

    @property
    def writable(self) -> bool:
        return not is_read_only(self._path.parent)

    async def run(self, action: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(self._translated, action, limiter=self._limiter)

    def _translated(self, action: Callable[[], T]) -> T:
        try:
            with _translated_errors(self._path):
                return action()
        except RunnerError as error:
            if isinstance(error.__cause__, sqlite3.Error) and _primary(error.__cause__) == sqlite3.SQLITE_IOERR:
                # After a failed flush the kernel may call pages clean that never reached the disk: a second
                # commit would succeed and lie.
                self._refusal = error
            raise

    async def look(self, action: Callable[[Connection], T], key: Hashable = None) -> T:
        """Look by a second connection, which waits for no commit of the first, and without a thread, which costs more
        than the look. Whatever keeps it from that is left to ``run``.
        """
        await trio.lowlevel.checkpoint_if_cancelled()  # a turn of the loop costs more than the look
        try:
            if (looking := self._look_by()) is not None:
                return action(looking) if key is None else self._recall(looking, action, key)
        except sqlite3.Error:
            self.close()
        return await self.run(lambda: action(self.connection))

    def _recall(self, looking: sqlite3.Connection, action: Callable[[Connection], T], key: Hashable) -> T:
        """Return what was seen by a key when that cannot have changed: no process has committed anything since.

        The number is read before the look, so what is remembered is of that state of the file or of a later one.
        """
        version = _version_by(looking)
        if version != self._seen_at or len(self._seen) >= _REMEMBERED:
            self._seen_at, self._seen = version, {}
        if key not in self._seen:
            self._seen[key] = action(looking)
        found: T = self._seen[key]
        return found

    def _look_by(self) -> sqlite3.Connection | None:
        if self._looking is None and self._looks:
            self._looking = _connect(f"{self._path.absolute().as_uri()}?mode=ro")
            self._looking.execute("PRAGMA busy_timeout = 0")
        return self._looking

    def close(self) -> None:
        """Close what looks; the connection is its opener's."""
        if self._looking is not None:
            self._looking.close()
            self._looking, self._version, self._seen_at = None, 0, 0  # the next one counts anew

    async def now(self) -> int:
        return self._clock()

    def time(self) -> int:
        return self._clock()

    def transact(
        self,
        action: Callable[[], T],
        *,
        names: Callable[[], Collection[str]] = tuple,
        stored: Callable[[T], bool] = lambda answer: False,
    ) -> T:
        """Call ``action`` in a transaction; no two of one file go on at the same time."""
        if self._refusal:
            raise self._refusal
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            answer = action()
            self.connection.execute("COMMIT")
        except BaseException:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise
        return answer

    def snapshot(self, action: Callable[[], T]) -> T:
        self.connection.execute("BEGIN")
        try:
            return action()
        finally:
            self.connection.execute("ROLLBACK")

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        self.connection.execute("SAVEPOINT append")
        try:
            yield
        except (*self.refusals, LeaseError):
            self.connection.execute("ROLLBACK TO append")
            self.connection.execute("RELEASE append")
            raise
        self.connection.execute("RELEASE append")

    def broken_rule(self, error: Exception) -> Literal["unique", "foreign"] | None:
        match getattr(error, "sqlite_errorname", ""):
            case "SQLITE_CONSTRAINT_UNIQUE":
                return "unique"
            case "SQLITE_CONSTRAINT_FOREIGNKEY":
                return "foreign"
        return None

    def check(self) -> None:
        (verdict,) = self.connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise self.damaged(verdict)
        if self.connection.execute("PRAGMA foreign_key_check").fetchone():
            raise self.damaged("there are events of no run")

    def damaged(self, what: str) -> StoreDamaged:
        return _damaged(self._path, what)

    def next_write(self, run: str) -> trio.Event:
        return self._written

    def wake(self, names: Iterable[str]) -> None:
        self._version = 0 if self._looking is None else self._read_version() or 0
        self._written.set()
        self._written = trio.Event()

    async def wait(self, written: trio.Event) -> None:
        """Wait for a write; the first who waits looks for all whether another process has written."""
        if self._polled:
            await written.wait()
            return
        self._polled = True
        try:
            while not written.is_set():
                with trio.move_on_after(POLL):
                    await written.wait()
                version = self._read_version()
                if version is None:
                    break  # so that everybody looks for themselves
                if version != self._version:
                    self.wake(())
        finally:
            self._polled = False
            if not written.is_set():
                self.wake(())  # somebody else takes over

    def _read_version(self) -> int | None:
        """Return a number that changes with each commit of any process, which costs less than a search; ``None`` if
        it cannot be read.
        """
        try:
            looking = self._look_by()
            return None if looking is None else _version_by(looking)
        except sqlite3.Error:
            self.close()
            return None


def _version_by(connection: sqlite3.Connection) -> int:
    """Return a number that differs after each commit by another connection, of whatever process."""
    return int(connection.execute("PRAGMA data_version").fetchone()[0])


class _AtOnce(SqliteDatabase):
    """A file of this host for a process that does nothing else: its methods never wait."""

    async def run(self, action: Callable[[], T]) -> T:
        return self._translated(action)

    async def look(self, action: Callable[[Connection], T], key: Hashable = None) -> T:
        return self._translated(lambda: action(self.connection))


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
) -> AsyncIterator[Store]:
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
        looks = not is_read_only(path.parent)
        database = stack.enter_context(closing(SqliteDatabase(connection, path, now, looks=looks)))
        yield Store(database, nonce, hook=hook, runner=runner)


@asynccontextmanager
async def open_reader(path: Path, *, must_exist: bool = False) -> AsyncIterator[Reader]:
    """Open the store in ``path`` for reading, migrated first if need be; also while others write, and on a
    read-only medium.

    A missing one is empty, and not made; with ``must_exist`` it is ``StoreDamaged``.
    """
    with ExitStack() as stack:
        connection = await trio.to_thread.run_sync(partial(_open_to_read, path, stack, must_exist=must_exist))
        stack.enter_context(closing(connection))
        yield Reader(SqliteDatabase(connection, path, now_microseconds))


@contextmanager
def open_at_once(path: Path, *, must_exist: bool = False) -> Iterator[Reader]:
    """Open the store like ``open_reader``, for a process that does nothing else meanwhile.

    Methods of this reader never wait, so that there need be no loop, nor a thread beside it.
    """
    with ExitStack() as stack:
        connection = stack.enter_context(closing(_open_to_read(path, stack, must_exist=must_exist)))
        yield Reader(_AtOnce(connection, path, now_microseconds))


def _open(path: Path, entropy: Callable[[int], bytes], stack: ExitStack, *, must_exist: bool) -> sqlite3.Connection:
    """Open a store for writing; ``stack`` as for ``_open_to_read``."""
    if path.exists() and is_read_only(path.parent):
        return _open_to_read(path, stack, must_exist=must_exist)
    try:
        _check_exists(path, must_exist=must_exist)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _make(path)
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


def _make(path: Path) -> None:
    """Make an empty file for its owner only, unless there is a file that can be used.

    That one is not opened: to close it would end the locks that this process has on it by its other connections, and
    the next process to leave would remove the log that they write to.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        _check_regular(path)
        if not os.access(path, os.R_OK | os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None


def _open_to_read(path: Path, stack: ExitStack, *, must_exist: bool) -> sqlite3.Connection:
    """Open a store for reading; ``stack`` holds what must live as long as the connection."""
    with _translated_errors(path):
        _check_exists(path, must_exist=must_exist)
        if not os.path.exists(path):
            return _empty(path)
        _check_regular(path)
        read_only = is_read_only(path.parent)
        name = _read_only_uri(path, stack) if read_only else f"{path.absolute().as_uri()}?mode=ro"
        connection, version = _open_checked(name, path, must_exist=must_exist)
        if read_only:
            connection.execute("PRAGMA query_only = ON")  # also of a copy, from which nothing would come back
        if version == _newest():
            return connection
        connection.close()
        if not version:  # another process is making it
            return _empty(path)
        if read_only:
            hint = "copy its folder to where it can be written, and name that in RUNNER_HOME"
            raise StoreTooOld(f"`{path}` has schema {version}, and cannot be migrated where it is", hint=hint)
        _open(path, bytes, stack, must_exist=must_exist).close()  # migrates it
        return _open_checked(name, path, must_exist=must_exist)[0]


def _empty(path: Path) -> sqlite3.Connection:
    connection = _connect(":memory:")
    migrate(connection, path, scripts(), bytes)
    return connection


def _open_checked(name: str, path: Path, *, must_exist: bool) -> tuple[sqlite3.Connection, int]:
    """Open a database and return its version too."""
    connection = _connect(name)
    try:
        connection.execute(_BUSY_TIMEOUT)
        return connection, _check_version(connection, path, must_exist=must_exist)
    except BaseException:
        connection.close()
        raise


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
    return scripts_in(Path(__file__).parent / "migrations")


def _newest() -> int:
    return OLDEST + len(scripts()) - 1


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
    check_version(str(path), version, runner, newest=newest, hint=_HINTS[StoreDamaged])
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


def _damaged(path: Path, what: str) -> StoreDamaged:
    return StoreDamaged(f"`{path}` is damaged: {what}", hint=_HINTS[StoreDamaged])


def _check_exists(path: Path, *, must_exist: bool) -> None:
    if must_exist and not os.path.exists(path):
        raise StoreDamaged(f"`{path}` is missing, and `{path.parent}` holds what runs have left", hint=REBUILD_HINT)


def _check_version(connection: sqlite3.Connection, path: Path, *, must_exist: bool) -> int:
    version = _version(connection, path, _newest())
    if not version and must_exist:
        raise StoreDamaged(f"`{path}` is empty, and `{path.parent}` holds what runs have left", hint=REBUILD_HINT)
    return version


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
