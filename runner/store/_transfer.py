"""A whole store as lines of JSON: a header, then a list for each row that begins with its table, then their number.

Tables, columns and values (but for one) are the same in each database, so that a row is carried as it is. Left out is
the reading of a host's clock, which means nothing elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import TYPE_CHECKING, BinaryIO

import msgspec
from msgspec import Struct

from runner.core.errors import BadExport, StoreNotEmpty
from runner.store._database import Connection

if TYPE_CHECKING:
    import trio
else:
    from runner.core import trio_later as trio

TABLES = {  # by their keys, in an order in which no row names one of a later table
    "runs": ("id",),
    "events": ("run", "seq"),
    "snapshots": ("run", "commit"),
    "agent_workspaces": ("id",),
    "leases": ("workspace",),
    "runners": ("id",),
    "workspace_events": ("workspace", "seq"),
    "projects": ("name",),
    "pools": ("name",),
    "slots": ("id",),
    "pool_counts": ("what",),
    "entries": ("kind", "name"),
}
_FILLED = {"events": "type", "workspace_events": "type"}  # columns that the database itself fills
_FLAG = "workspace_isolation"  # which SQLite has as 0 and 1
_PAGE = 500  # rows held at a time
_LONGEST = 64 << 20  # bytes of a line
_HINT = "export it again: nothing was changed"

Row = list[bool | int | str | None]


class Header(Struct, frozen=True, tag="store", tag_field="is"):
    """The first line: the ``columns`` of each table in ``schema``, which ``runner`` has written."""

    schema: int
    runner: str
    nonce: str
    columns: dict[str, list[str]]


class End(Struct, frozen=True, tag="end", tag_field="is"):
    rows: int


_LINE = msgspec.json.Decoder(Header | End | Row)


def dump(connection: Connection, file: BinaryIO) -> int:
    """Write every row, and return their number."""
    encoder, rows = msgspec.json.Encoder(), 0
    header = _header(connection)
    file.write(encoder.encode(header) + b"\n")
    for table, columns in header.columns.items():
        for page in _pages(connection, table, columns):
            if _FLAG in columns:
                at = columns.index(_FLAG)
                page = [[*row[:at], bool(row[at]), *row[at + 1 :]] for row in page]
            file.writelines(encoder.encode([table, *row]) + b"\n" for row in page)
            rows += len(page)
    file.write(encoder.encode(End(rows)) + b"\n")
    return rows


def load(connection: Connection, file: BinaryIO, refusals: tuple[type[Exception], ...]) -> int:
    """Read every row into an empty store, which becomes the one that was written, and return their number.

    Raises ``StoreNotEmpty`` and ``BadExport``.
    """
    if not is_empty(connection):
        raise StoreNotEmpty("the store is not empty", hint="import into a new one: nothing was changed")
    lines, ours = _lines(file), _header(connection)
    header = next(lines, None)
    if not isinstance(header, Header):
        raise BadExport("it has no header of a store", hint="name a file that `runner store export` has written")
    if header.schema != ours.schema:
        schemas = f"schema {header.schema} of runner {header.runner}; this runner has {ours.schema}"
        raise BadExport(f"it has {schemas}", hint="export and import with the same version of runner")
    if {*map(_named, header.columns.items())} != {*map(_named, ours.columns.items())}:
        raise BadExport(f"its tables are not those of schema {ours.schema}", hint=_HINT)
    connection.execute("UPDATE meta SET nonce = ?", (header.nonce,))
    rows, last = 0, None
    for table, of_table in groupby(lines, key=lambda line: line[0] if isinstance(line, list) else None):
        if table is None:
            last = next(of_table)
            break
        if (columns := header.columns.get(str(table))) is None:
            raise BadExport(f"it has a row of the unknown table `{table}`", hint=_HINT)
        insert = f"INSERT INTO {table} ({_quoted(columns)}) VALUES ({', '.join('?' * len(columns))})"
        while page := [line[1:] for line in islice(of_table, _PAGE) if isinstance(line, list)]:
            trio.from_thread.check_cancelled()
            try:
                connection.executemany(insert, page)
            except refusals as error:
                raise BadExport(f"rows {rows + 1} to {rows + len(page)} do not fit: {error}", hint=_HINT) from error
            rows += len(page)
    if last != End(rows) or next(lines, None) is not None:
        raise BadExport(f"it does not end after {rows} rows, as it says", hint=_HINT)
    return rows


def is_empty(connection: Connection) -> bool:
    return not any(connection.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() for table in TABLES)


def _header(connection: Connection) -> Header:
    schema, runner, nonce = connection.execute("SELECT schema_version, runner, nonce FROM meta").fetchone()
    return Header(schema, runner, nonce, {table: _columns(connection, table) for table in TABLES})


def _columns(connection: Connection, table: str) -> list[str]:
    found = connection.execute(f"SELECT * FROM {table} LIMIT 0")
    return [column[0] for column in found.description if column[0] != _FILLED.get(table)]


def _quoted(columns: Iterable[str]) -> str:
    return ", ".join(f'"{column}"' for column in columns)


def _named(columns: tuple[str, list[str]]) -> tuple[str, ...]:
    return (columns[0], *sorted(columns[1]))


def _pages(connection: Connection, table: str, columns: list[str]) -> Iterator[list[Row]]:
    """Yield the rows by their keys, each page from where the last one ended."""
    key = _quoted(TABLES[table])
    places = [columns.index(column) for column in TABLES[table]]
    query = f"SELECT {_quoted(columns)} FROM {table}"
    page = connection.execute(f"{query} ORDER BY {key} LIMIT {_PAGE}").fetchall()
    while page:
        trio.from_thread.check_cancelled()
        yield page
        after = [page[-1][place] for place in places]
        above = f"WHERE ({key}) > ({', '.join('?' * len(after))})"
        page = connection.execute(f"{query} {above} ORDER BY {key} LIMIT {_PAGE}", after).fetchall()


def _lines(file: BinaryIO) -> Iterator[Header | End | Row]:
    number = 0
    while text := file.readline(_LONGEST):
        number += 1
        try:
            yield _LINE.decode(text)
        except msgspec.DecodeError as error:
            raise BadExport(f"line {number} is not one of an export: {error}", hint=_HINT) from error
