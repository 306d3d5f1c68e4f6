"""The port of a SQL database: a dialect that all of them speak, and transactions.

Values are written as ``?`` or ``?1``, tables without a schema. ``glob(pattern, text)`` and ``instr(text, part)`` are
SQLite's; a database that lacks them has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, TypeVar

import trio

from runner.core.errors import StoreDamaged

T = TypeVar("T")
Hook = Callable[[str], None]


class Rows(Protocol):
    """The answer to a query."""

    @property
    def rowcount(self) -> int: ...

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

    def savepoint(self) -> AbstractContextManager[None]:
        """Undo the block, and nothing before it, for an error of ``refusals``, which comes out."""

    def broken_rule(self, error: Exception) -> Literal["unique", "foreign"] | None:
        """Return the kind of constraint that an error is about, if any."""

    def check(self) -> None:
        """Raise ``StoreDamaged`` for damage that the database itself can find."""

    def damaged(self, what: str) -> StoreDamaged:
        """Return an error, with the hint that fits this database."""

    async def wait(self, run: str, written: trio.Event) -> None:
        """Wait until there may be events of a run that others have written, or this store has ``written`` some."""
