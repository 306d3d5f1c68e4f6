"""The port of a SQL database: a dialect that all of them speak, and transactions.

Values are written as ``?`` or ``?1``, tables without a schema. ``glob(pattern, text)`` and ``instr(text, part)`` are
SQLite's; a database that lacks them has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from runner.core.errors import StoreDamaged, StoreTooNew, StoreTooOld

if TYPE_CHECKING:
    import trio

OLDEST = 10  # of the schemas that are read

T = TypeVar("T")
Hook = Callable[[str], None]


class Rows(Protocol):
    """The answer to a query."""

    @property
    def rowcount(self) -> int: ...

    @property
    def description(self) -> Any:
        """List the columns, each by a tuple that begins with its name."""

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    def execute(self, query: str, values: Sequence[Any] = ..., /) -> Rows: ...

    def executemany(self, query: str, rows: Iterable[Sequence[Any]], /) -> Rows: ...


class Database(Protocol):
    """A store's connection. ``name`` is what messages call it, without a password."""

    @property
    def name(self) -> str: ...

    @property
    def writable(self) -> bool: ...

    @property
    def connection(self) -> Connection:
        """The connection, for an action of ``run`` only: the next one may have another."""

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        """The errors of a statement that leave the transaction as it was before its savepoint."""

    async def run(self, action: Callable[[], T]) -> T:
        """Call ``action`` in a thread, one at a time. Raises ``StoreBusy``, ``StoreFailed`` and ``StoreDamaged``.

        What only reads may be called again after a connection was lost; what writes calls ``transact``.
        """

    async def look(self, action: Callable[[Connection], T], key: Hashable = None) -> T:
        """Call ``action``, which reads few rows by their key, as ``run`` would; at once where that is quick.

        The last answer to the same ``key`` may stand for another look while nobody, anywhere, has written; so it is
        shared and must not be changed.
        """

    async def now(self) -> int:
        """Return the time by the database's clock: microseconds since the epoch."""

    def time(self) -> int:
        """Return the time for what a transaction writes."""

    def transact(
        self,
        action: Callable[[], T],
        *,
        names: Callable[[], Collection[str]] = tuple,
        stored: Callable[[T], bool] = lambda answer: False,
    ) -> T:
        """Call ``action`` in a transaction, durable when this returns, and return its answer.

        Transactions that have one of ``names`` in common come one after the other. When the connection is lost
        ``action`` is called again, after a commit whose reply was lost only if its answer is not ``stored``.
        """

    def snapshot(self, action: Callable[[], T]) -> T:
        """Call ``action``, which only reads, on one state of the database."""

    def savepoint(self) -> AbstractContextManager[None]:
        """Undo the block, and nothing before it, for an error of ``refusals``, which comes out."""

    def broken_rule(self, error: Exception) -> Literal["unique", "foreign"] | None:
        """Return the kind of constraint that an error is about, if any."""

    def check(self) -> None:
        """Raise ``StoreDamaged`` for damage that the database itself can find."""

    def damaged(self, what: str) -> StoreDamaged:
        """Return an error, with the hint that fits this database."""

    def next_write(self, run: str) -> trio.Event:
        """Return what is set once events of a run may have been written, by this store or where others are heard."""

    def wake(self, names: Iterable[str]) -> None:
        """Tell who waits that this store has written what has these names."""

    async def wait(self, written: trio.Event) -> None:
        """Wait for a write, but no longer than until it is time to look for those that are not heard of."""


def scripts_in(folder: Path) -> list[str]:
    """List the migrations in their order: the first makes an empty database a store of version ``OLDEST``."""
    return [file.read_text() for file in sorted(folder.glob("*.sql"))]


def check_version(name: str, version: int, runner: str, *, newest: int, hint: str) -> None:
    """Raise ``StoreTooNew`` and ``StoreTooOld`` for a schema that this runner does not know."""
    schemas = f"(schema {version}, this runner knows {OLDEST} to {newest})"
    if version > newest:
        raise StoreTooNew(f"`{name}` was written by runner {runner} {schemas}", hint=f"use runner {runner} or newer")
    if version < OLDEST:
        raise StoreTooOld(f"`{name}` was written by runner {runner} {schemas}", hint=hint)
