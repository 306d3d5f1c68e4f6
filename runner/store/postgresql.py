"""The store that several hosts share: PostgreSQL, by psycopg in worker threads.

Nothing is kept in a session beyond a transaction, so that a pooler may serve each one by another: settings are local,
and nothing is prepared. Only LISTEN needs a connection of its own; behind a pooler it is replaced by looking.

A lost connection is made again. What was under way is done again, but for a transaction whose commit was sent and not
answered: there the journal says what became of it.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar
from zlib import crc32

import trio

from runner import __version__
from runner.core.errors import BadStoreUrl, LeaseError, RunnerError, StoreBusy, StoreDamaged, StoreFailed
from runner.core.sanitize import excerpt
from runner.core.settings import without_secrets
from runner.ports.store import RunnerRow
from runner.store._database import OLDEST, Connection, Hook, Rows, check_version, scripts_in
from runner.store._password import PasswordCommand, split_command
from runner.store._reader import Reader
from runner.store._sql import Store
from runner.store.memory import MemoryStore

try:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict
except ImportError as error:
    raise BadStoreUrl("the PostgreSQL store is not installed", hint="pip install 'plan-runner[postgres]'") from error

POLL = 0.5  # seconds between looks for events of others where nothing is heard of them
LISTENING_POLL = 5.0  # seconds between looks where they are heard: what was lost with a connection
OPENING, RECONNECTING = 3.0, 60.0  # seconds that a server may be away at first, and later
STATEMENT = 30.0  # seconds until a statement that is not answered ends its connection
_CONNECTING = "10"  # seconds, of each address
_LOCKS = 0x6B62  # of advisory locks: a namespace
_MIGRATION = -1  # the lock of who migrates
_STRIPES = 256  # locks for all names, since the server has room for thousands
_BEGIN = (
    "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL statement_timeout = '25s'; SET LOCAL lock_timeout ="
    " '15s'; SET LOCAL idle_in_transaction_session_timeout = '10s';"
    " SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off';"
)
_NOW = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
_AGAIN = {"40001", "40P01"}  # SQLSTATEs of transactions that were undone for the sake of others
_BUSY = {*_AGAIN, "53300", "55P03", "57014"}
_DAMAGED = {"42703", "42883", "42P01", "XX001", "XX002"}
_HINTS = {
    "25006": "name the primary server: this one is read-only",
    "42501": "let the role own the schema `kb`, or create it in the database",
}
_STARTING = ("starting up", "not yet accepting", "shutting down", "recovery mode", "too many", "connection slots")
_DAMAGE_HINT = "restore the database, then add what each host has with `runner store rebuild`"

T = TypeVar("T")


class Place:
    """A database by its URL; ``name`` is the URL without what may be secret."""

    def __init__(self, options: dict[str, Any], command: PasswordCommand | None = None) -> None:
        self.options, self.command = options, command
        port = f":{options['port']}" if "port" in options else ""
        host = options.get("host", "")
        self.name = excerpt(f"postgresql://{'' if '/' in host else host}{port}/{options.get('dbname', '')}")


def place(url: str) -> Place:
    """Return what a URL says. Raises ``BadStoreUrl``."""
    url, command = split_command(url)
    try:
        return Place(conninfo_to_dict(url), command)
    except psycopg.Error:  # which repeats the URL
        hint = "write postgresql://USER@HOST/DATABASE; the password may be in PGPASSFILE"
        raise BadStoreUrl(f"`{excerpt(without_secrets(url))}` is not a URL of PostgreSQL", hint=hint) from None


def exists(place: Place) -> bool:
    """Tell nothing without a connection: whoever opens it will see."""
    return True


@asynccontextmanager
async def open_store(
    place: Place,
    *,
    entropy: Callable[[int], bytes],
    now: Callable[[], int] | None = None,
    hook: Hook = lambda point: None,
    must_exist: bool = False,
    runner: RunnerRow | None = None,
) -> AsyncIterator[Store]:
    """Open the store, migrated first if need be, and made unless it ``must_exist``.

    ``now`` replaces the database's clock, and ``hook`` is called as by ``sqlite.open_store``. Raises ``StoreFailed``,
    ``StoreBusy``, ``StoreDamaged``, ``StoreTooOld`` and ``StoreTooNew``.
    """
    async with _opened(place, now) as database:
        nonce = await database.run(lambda: database.migrate(entropy, must_exist=must_exist))
        yield Store(database, nonce, hook=hook, runner=runner)


@asynccontextmanager
async def open_reader(place: Place, *, must_exist: bool = False) -> AsyncIterator[Reader | MemoryStore]:
    """Open the store for reading, migrated first if need be.

    A missing one is empty, and not made; with ``must_exist`` it is ``StoreDamaged``.
    """
    async with _opened(place, None) as database:
        if await database.run(lambda: database.version(must_exist=must_exist)):
            await database.run(lambda: database.migrate(bytes, must_exist=must_exist))
            yield Reader(database)
        else:
            yield MemoryStore()


@asynccontextmanager
async def _opened(place: Place, now: Callable[[], int] | None) -> AsyncIterator[PostgresDatabase]:
    database = PostgresDatabase(place, now)
    try:
        yield database
    finally:
        database.close()


class Session:
    """A connection that takes the dialect of this room. ``since`` is when the statement under way began, if any."""

    def __init__(self, raw: psycopg.Connection[Any]) -> None:
        self.raw = raw
        self.since: float | None = None

    def execute(self, query: str, values: Sequence[Any] = (), /) -> Rows:
        return self._done(_translated(query), values)

    def executemany(self, query: str, rows: Iterable[Sequence[Any]], /) -> Rows:
        rows = [*rows]
        if len(rows) == 1:  # for which a pipeline is slower
            return self.execute(query, rows[0])
        with self._timed():
            cursor = self.raw.cursor()
            cursor.executemany(_translated(query), rows)
        found: Rows = cursor
        return found

    def simple(self, statements: str) -> Rows:
        """Send statements without values at once. The answer is that of the last."""
        return self._done(statements.encode(), ())

    def _done(self, query: bytes, values: Sequence[Any]) -> Rows:
        with self._timed():
            cursor = self.raw.execute(query, values or None)
        while cursor.nextset():
            pass
        found: Rows = cursor
        return found

    @contextmanager
    def _timed(self) -> Iterator[None]:
        self.since = time.monotonic()
        try:
            yield
        finally:
            self.since = None

    def break_off(self) -> None:
        """End the connection under a thread that waits for it."""
        with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(self.raw.fileno())) as ours:
            ours.shutdown(socket.SHUT_RDWR)


@cache
def _translated(query: str) -> bytes:
    numbers = count(1)
    query = re.sub(r"\?(\d*)", lambda found: f"${found[1] or next(numbers)}", query)
    query = re.sub(r"\b(FROM|INTO|UPDATE) (?=[a-z])", r"\1 kb.", query)
    return query.replace("instr(", "strpos(").replace("glob(", "kb.glob(").encode()


def _stripe(name: str) -> int:
    return crc32(name.encode(errors="backslashreplace")) % _STRIPES


class PostgresDatabase:
    """A database and its clock, by one connection at a time, and another that listens once something is watched."""

    refusals = (psycopg.IntegrityError, psycopg.DataError, UnicodeEncodeError)

    def __init__(self, place: Place, clock: Callable[[], int] | None) -> None:
        self.name = place.name
        self.writable = True
        self._options, self._command = place.options, place.command
        self._clock = clock
        self._at = 0  # of the transaction under way
        self._fresh = False  # while nothing was done since its savepoint
        self._session: Session | None = None
        self._patience = OPENING
        self._turn = trio.Lock()
        self._given_up = threading.Event()  # set while nobody waits for the answer any more
        self._writes: dict[int, trio.Event] = {}
        self._listener: trio.CancelScope | None = None
        self._joining = trio.Lock()
        self._pooled = False

    @property
    def connection(self) -> Session:
        if self._session is None:
            self._session = Session(self._connect())
        return self._session

    def close(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
        self._drop()

    def _drop(self) -> None:
        if self._session is not None:
            self._session.raw.close()
            self._session = None

    def _connect(self) -> psycopg.Connection[Any]:
        """Connect. Raises ``StoreFailed`` for what no waiting helps against."""
        options = {"connect_timeout": _CONNECTING, "application_name": "runner", **self._options}
        if self._command is not None:
            options["password"] = self._command.password()
        try:
            return psycopg.connect(
                "",
                **options,
                client_encoding="utf8",
                autocommit=True,
                prepare_threshold=None,
                cursor_factory=psycopg.RawCursor,
            )
        except psycopg.OperationalError as error:
            if "authentication failed" in str(error) and self._command is not None and self._command.forget():
                return self._connect()
            if "FATAL" in str(error) and not any(words in str(error) for words in _STARTING):
                hint = "check the URL, the role and its password there"
                raise StoreFailed(f"`{self.name}` refuses the connection: {_text(error)}", hint=hint) from error
            raise

    # --- threads ----------------------------------------------------------------------------------

    async def run(self, action: Callable[[], T]) -> T:
        """Call ``action`` in a thread, as the port says. Cancelling ends its connection, and with it the wait."""
        answer: list[T] = []
        errors: list[BaseException] = []

        def captured() -> None:  # for a nursery would wrap it
            try:
                with self._translated_errors():
                    answer.append(self._repeated(action))
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

        async with self._turn, trio.open_nursery() as nursery:
            self._given_up.clear()
            nursery.start_soon(self._watch_over)
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(captured)
            self._given_up.set()
            nursery.cancel_scope.cancel()
        if errors:
            raise errors[0]
        return answer[0]

    async def look(self, action: Callable[[Connection], T], key: Hashable = None) -> T:
        return await self.run(lambda: action(self.connection))

    async def _watch_over(self) -> None:
        """End the connection of a statement that takes too long, or whose caller was cancelled."""
        try:
            while True:
                await trio.sleep(1)
                session = self._session
                since = None if session is None else session.since
                if session is not None and since is not None and time.monotonic() > since + STATEMENT:
                    session.break_off()
        finally:
            if not self._given_up.is_set():
                self._given_up.set()
                if self._session is not None:
                    self._session.break_off()

    def _repeated(self, action: Callable[[], T]) -> T:
        """Call ``action`` until the server is there to answer, and has not undone it for the sake of others."""
        until = time.monotonic() + self._patience
        for tries in count():
            try:
                answer = action()
            except psycopg.Error as error:
                lost = self._is_lost(error)
                if lost:
                    self._drop()
                if not (lost or error.sqlstate in _AGAIN):
                    raise
                if time.monotonic() > until:
                    self._patience = OPENING  # the rest of a run does not wait as long for each event
                    raise
                if self._given_up.wait(min(0.05 * 2**tries, 1.0)):
                    raise
            else:
                self._patience = RECONNECTING
                return answer
        raise AssertionError

    def _is_lost(self, error: psycopg.Error) -> bool:
        """Tell whether an error has ended the connection, or there is none."""
        fatal = error.diag.severity_nonlocalized in ("FATAL", "PANIC")
        return fatal or self._session is None or self._session.raw.closed

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise self._error(error) from error
        except (ValueError, TypeError, KeyError) as error:  # what is no number, word or JSON that was ever written
            raise self.damaged(f"what is in it cannot be read: {error}") from error

    def _error(self, error: psycopg.Error) -> RunnerError:
        said, state = f"`{self.name}`: {_text(error)}", error.sqlstate or ""
        if state in _BUSY:
            return StoreBusy(said, hint="other runners keep it busy; try again when they are done")
        if state in _DAMAGED:
            return StoreDamaged(said, hint=_DAMAGE_HINT)
        if self._is_lost(error):
            hint = "check that the server runs, and that the network lets this host in"
            return StoreFailed(f"`{self.name}` cannot be reached: {_text(error)}", hint=hint)
        return StoreFailed(said, hint=_HINTS.get(state, "check the server's log; nothing unfinished was written"))

    # --- transactions -----------------------------------------------------------------------------

    async def now(self) -> int:
        if self._clock is not None:
            return self._clock()
        return await self.run(lambda: int(self.connection.simple(_NOW).fetchone()[0]))

    def time(self) -> int:
        return self._at if self._clock is None else self._clock()

    def transact(
        self,
        action: Callable[[], T],
        *,
        names: Callable[[], Collection[str]] = tuple,
        stored: Callable[[T], bool] = lambda answer: False,
    ) -> T:
        stripes = sorted({_stripe(name) for name in names()})
        unanswered: list[T] = []  # of the transaction whose commit was sent last

        def attempt() -> T:
            session = self.connection
            try:
                self._begin(session, stripes)
                if unanswered and stored(unanswered[-1]):
                    session.simple("ROLLBACK")
                    return unanswered[-1]
                answer = action()
                unanswered.append(answer)
                session.simple(_commit(stripes))
            except BaseException:
                with suppress(psycopg.Error):  # which would say the same
                    session.simple("ROLLBACK")
                raise
            return answer

        return self._repeated(attempt)

    def snapshot(self, action: Callable[[], T]) -> T:
        session = self.connection
        session.simple("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            return action()
        finally:
            with suppress(psycopg.Error):  # which would say the same
                session.simple("ROLLBACK")

    def _begin(self, session: Session, stripes: Sequence[int]) -> None:
        """Begin, and wait for all who have a stripe in common, in an order in which none waits for another."""
        locks = f"SELECT pg_advisory_xact_lock({_LOCKS}, stripe) FROM unnest(ARRAY{stripes}) AS stripe;"
        begin = f"{_BEGIN}{locks if stripes else ''} SAVEPOINT append; {_NOW}"
        self._at = int(session.simple(begin).fetchone()[0])
        self._fresh = True

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        if not self._fresh:
            self.connection.simple("RELEASE append; SAVEPOINT append")
        self._fresh = False
        try:
            yield
        except (*self.refusals, LeaseError):
            self.connection.simple("ROLLBACK TO append")
            self._fresh = True
            raise

    def broken_rule(self, error: Exception) -> Literal["unique", "foreign"] | None:
        match error:
            case psycopg.errors.UniqueViolation():
                return "unique"
            case psycopg.errors.ForeignKeyViolation():
                return "foreign"
        return None

    # --- schema -----------------------------------------------------------------------------------

    def version(self, *, must_exist: bool) -> int:
        """Return the schema's number, 0 for none. Raises ``StoreTooNew``, ``StoreTooOld`` and ``StoreDamaged``."""
        # Of the catalogue, since what to_regclass has not found once it may not find for the rest of the session.
        made = "SELECT EXISTS (SELECT 1 FROM pg_tables WHERE schemaname = 'kb' AND tablename = 'meta')"
        if not self.connection.simple(made).fetchone()[0]:
            if must_exist:
                what = f"`{self.name}` has no store, and this home holds what runs have left"
                raise StoreDamaged(what, hint="add it with `runner store rebuild`")
            return 0
        found = self.connection.execute("SELECT schema_version, runner FROM meta").fetchone()
        if found is None:
            raise self.damaged("it has the tables of a store, but not its version")
        check_version(self.name, *found, newest=OLDEST + len(_scripts()) - 1, hint=_DAMAGE_HINT)
        return int(found[0])

    def migrate(self, entropy: Callable[[int], bytes], *, must_exist: bool) -> str:
        """Migrate to the newest schema, one process at a time, all or nothing. Return the store's nonce."""
        asked = "SELECT pg_is_in_recovery() OR current_setting('default_transaction_read_only')::boolean"
        (read_only, encoding) = self.connection.simple(f"{asked}, current_setting('server_encoding')").fetchone()
        if encoding != "UTF8":
            raise StoreFailed(f"`{self.name}` has the encoding {encoding}", hint="create a database with UTF8")
        self.writable = not read_only
        scripts = _scripts()
        if self.version(must_exist=must_exist) < OLDEST + len(scripts) - 1:
            self.transact(lambda: self._apply(scripts, entropy))
        return str(self.connection.execute("SELECT nonce FROM meta").fetchone()[0])

    def _apply(self, scripts: Sequence[str], entropy: Callable[[int], bytes]) -> None:
        session = self.connection
        session.simple(f"SELECT pg_advisory_xact_lock({_LOCKS}, {_MIGRATION})")
        version = self.version(must_exist=False)
        if not session.simple("SELECT EXISTS (SELECT 1 FROM pg_namespace WHERE nspname = 'kb')").fetchone()[0]:
            session.simple("CREATE SCHEMA kb")
        for script in scripts[version and version + 1 - OLDEST :]:
            session.simple(script)
        if not version:
            session.execute("INSERT INTO meta VALUES (?, 0, '')", (entropy(8).hex(),))
        newest = OLDEST + len(scripts) - 1
        session.execute("UPDATE meta SET schema_version = ?, runner = ?", (newest, __version__))

    def check(self) -> None:
        """Check nothing: the server does, whenever a page is read."""

    def damaged(self, what: str) -> StoreDamaged:
        return StoreDamaged(f"`{self.name}` is damaged: {what}", hint=_DAMAGE_HINT)

    # --- watching ---------------------------------------------------------------------------------

    def next_write(self, run: str) -> trio.Event:
        return self._writes.setdefault(_stripe(run), trio.Event())

    def wake(self, names: Iterable[str]) -> None:
        self._wake({_stripe(name) for name in names})

    def _wake(self, stripes: Iterable[int]) -> None:
        for stripe in stripes:
            if (event := self._writes.pop(stripe, None)) is not None:
                event.set()

    async def wait(self, written: trio.Event) -> None:
        async with self._joining:
            if self._listener is None and not self._pooled:
                raw = await trio.to_thread.run_sync(self._listen)
                if raw is not None:
                    self._listener = trio.CancelScope()
                    trio.lowlevel.spawn_system_task(self._hear, raw, self._listener)
                    return  # to look once more: what came before it is not heard
        with trio.move_on_after(POLL if self._listener is None else LISTENING_POLL):
            await written.wait()

    def _listen(self) -> psycopg.Connection[Any] | None:
        """Open a connection that listens; ``None`` where there is none now, or a pooler in between."""
        try:
            raw = self._connect()
            (pid,) = raw.execute(b"SELECT pg_backend_pid()").fetchone() or (0,)
            if pid == raw.info.backend_pid:
                raw.execute(b"LISTEN kb")
                return raw
            self._pooled = True
            raw.close()
        except (psycopg.Error, StoreFailed):
            return None
        return None

    async def _hear(self, raw: psycopg.Connection[Any], scope: trio.CancelScope) -> None:
        """Wake who waits for events of which the server tells, as long as the connection lasts."""
        with scope, raw, suppress(psycopg.Error):
            while True:
                await trio.lowlevel.wait_readable(raw.fileno())
                for notify in raw.notifies(timeout=0):
                    self._wake(int(stripe) for stripe in notify.payload.split(",") if stripe.isdecimal())
        self._listener = None
        self._wake([*self._writes])


def _commit(stripes: Sequence[int]) -> str:
    """Return what commits, and then tells those who listen: in a transaction of its own, since who tells waits for
    all others who do, and without a flush.
    """
    if not stripes:
        return "COMMIT"
    payload = ",".join(map(str, stripes))
    return f"COMMIT; BEGIN; SET LOCAL synchronous_commit = off; SELECT pg_notify('kb', '{payload}'); COMMIT"


def _text(error: psycopg.Error) -> str:
    return excerpt(error.diag.message_primary or str(error).partition("\n")[0], 300)


def _scripts() -> list[str]:
    return scripts_in(Path(__file__).parent / "migrations" / "postgresql")
