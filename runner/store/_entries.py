"""The entries of a store, each changed only by who has read its last version."""

from __future__ import annotations

from msgspec.structs import replace

from runner.ports.store import Cursor, EntryRow
from runner.store._database import Connection
from runner.store._rows import as_rows, where
from runner.store._runs import ALL

_COLUMNS = "kind, name, body, state, version, created"


def read_entries(
    connection: Connection,
    kind: str | None = None,
    *,
    name: str | None = None,
    state: str | None = None,
    before: Cursor | None = None,
    limit: int | None = None,
) -> list[EntryRow]:
    clause, values = where(
        ("kind = ?", None if kind is None else (kind,)),
        ("name = ?", None if name is None else (name,)),
        ("state = ?", None if state is None else (state,)),
        ("(created, name) < (?, ?)", before),
    )
    query = f"SELECT {_COLUMNS} FROM entries {clause} ORDER BY created DESC, name DESC LIMIT ?"
    return list(as_rows(EntryRow, connection.execute(query, (*values, ALL if limit is None else limit))))


def write_entry(connection: Connection, entry: EntryRow, at: int) -> EntryRow | None:
    """Write an entry unless it is of another version by now."""
    if entry.version:
        query = (
            "UPDATE entries SET state = ?, body = ?, version = version + 1 WHERE kind = ? AND name = ? AND version = ?"
        )
        values: tuple[object, ...] = (entry.state, entry.body, entry.kind, entry.name, entry.version)
    else:
        entry = replace(entry, created=at)
        query = "INSERT INTO entries VALUES (?, ?, ?, 1, ?, ?) ON CONFLICT DO NOTHING"
        values = (entry.kind, entry.name, entry.state, at, entry.body)
    written = connection.execute(query, values).rowcount
    return replace(entry, version=entry.version + 1) if written else None


def is_entry(connection: Connection, entry: EntryRow) -> bool:
    return entry in read_entries(connection, entry.kind, name=entry.name)


def drop_entry(connection: Connection, kind: str, name: str) -> bool:
    return connection.execute("DELETE FROM entries WHERE kind = ? AND name = ?", (kind, name)).rowcount > 0
