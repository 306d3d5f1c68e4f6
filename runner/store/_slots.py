"""The rows of warm pools and their slots, and the counts that events add up to."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from runner.core.codec import canonical
from runner.core.model import SlotState
from runner.events.events import Event, PoolMissed, SlotClaimed
from runner.lifecycle.pool import NEXT, read_key
from runner.ports.store import PoolRow, SlotRow

HIT = "hit"
_COLUMNS = "id, pool, state, keeper, created, workspace"


def count_name(event: Event) -> str | None:
    """Return the name of the count that an event increases, if any."""
    match event:
        case SlotClaimed():
            return HIT
        case PoolMissed(reason=reason):
            return reason.value
    return None


def read_pools(connection: sqlite3.Connection) -> list[PoolRow]:
    rows = _rows(connection, "pools", "name, key, size", "name")
    return [PoolRow(name, read_key(json.loads(key)), size) for name, key, size in rows]


def _rows(connection: sqlite3.Connection, table: str, columns: str, order: str) -> list[Any]:
    """Read a table; empty in a store of an older version, which a reader does not migrate."""
    if not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = ?", (table,)).fetchone():
        return []
    return connection.execute(f"SELECT {columns} FROM {table} ORDER BY {order}").fetchall()


def write_pools(connection: sqlite3.Connection, pools: Iterable[PoolRow]) -> None:
    rows = [(pool.name, canonical(pool.key).decode(), pool.size) for pool in pools]
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute("DELETE FROM pools")
        connection.executemany("INSERT INTO pools VALUES (?, ?, ?)", rows)
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def write_sizes(connection: sqlite3.Connection, sizes: Mapping[str, int]) -> None:
    text = json.dumps(sizes)
    query = "SELECT value FROM json_each(?) WHERE json_each.key = pools.name"
    connection.execute(f"UPDATE pools SET size = ({query}) WHERE EXISTS ({query})", (text, text))


def read_slots(connection: sqlite3.Connection) -> list[SlotRow]:
    rows = _rows(connection, "slots", _COLUMNS, "created, id")
    return [
        SlotRow(id=id, pool=pool, state=SlotState(state), keeper=keeper, created=created, workspace=workspace)
        for id, pool, state, keeper, created, workspace in rows
    ]


def write_slot(connection: sqlite3.Connection, slot: SlotRow, at: int) -> SlotRow:
    made = replace(slot, created=at)
    values = (made.id, made.pool, made.state.value, made.keeper, made.created, made.workspace)
    connection.execute(f"INSERT INTO slots ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", values)
    return made


def change_slot(
    connection: sqlite3.Connection, id: str, before: SlotState, after: SlotState, workspace: str | None
) -> bool:
    """Change a slot in one statement, so that no other writer comes between."""
    assert after in NEXT[before]
    query = "UPDATE slots SET state = ?, workspace = ? WHERE id = ? AND state = ?"
    return connection.execute(query, (after.value, workspace, id, before.value)).rowcount == 1


def drop_slot(connection: sqlite3.Connection, id: str) -> None:
    connection.execute("DELETE FROM slots WHERE id = ?", (id,))


def read_counts(connection: sqlite3.Connection) -> dict[str, int]:
    return dict(_rows(connection, "pool_counts", "what, count", "what"))


def project_count(connection: sqlite3.Connection, event: Event) -> None:
    if what := count_name(event):
        query = "INSERT INTO pool_counts VALUES (?, 1) ON CONFLICT (what) DO UPDATE SET count = count + 1"
        connection.execute(query, (what,))
