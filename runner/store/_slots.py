"""The rows of warm pools and their slots, and the counts that events add up to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from runner.core.codec import canonical
from runner.core.model import SlotState
from runner.events.events import Event, PoolMissed, SlotClaimed
from runner.lifecycle.pool import NEXT, read_key
from runner.ports.store import PoolRow, SlotRow
from runner.store._database import Connection

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


def read_pools(connection: Connection) -> list[PoolRow]:
    rows = connection.execute("SELECT name, key, size FROM pools ORDER BY name")
    return [PoolRow(name, read_key(json.loads(key)), size) for name, key, size in rows]


def write_pools(connection: Connection, pools: Iterable[PoolRow]) -> None:
    rows = [(pool.name, canonical(pool.key).decode(), pool.size) for pool in pools]
    connection.execute("DELETE FROM pools")
    connection.executemany("INSERT INTO pools VALUES (?, ?, ?)", rows)


def write_sizes(connection: Connection, sizes: Mapping[str, int]) -> None:
    connection.executemany("UPDATE pools SET size = ? WHERE name = ?", [(size, name) for name, size in sizes.items()])


def read_slots(connection: Connection) -> list[SlotRow]:
    rows = connection.execute(f"SELECT {_COLUMNS} FROM slots ORDER BY created, id")
    return [
        SlotRow(id=id, pool=pool, state=SlotState(state), keeper=keeper, created=created, workspace=workspace)
        for id, pool, state, keeper, created, workspace in rows
    ]


def write_slot(connection: Connection, slot: SlotRow, at: int) -> SlotRow:
    made = replace(slot, created=at)
    values = (made.id, made.pool, made.state.value, made.keeper, made.created, made.workspace)
    connection.execute(f"INSERT INTO slots ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", values)
    return made


def change_slot(connection: Connection, id: str, before: SlotState, after: SlotState, workspace: str | None) -> bool:
    """Change a slot in one statement, so that no other writer comes between."""
    assert after in NEXT[before]
    query = "UPDATE slots SET state = ?, workspace = ? WHERE id = ? AND state = ?"
    return connection.execute(query, (after.value, workspace, id, before.value)).rowcount == 1


def is_slot(connection: Connection, id: str, state: SlotState, workspace: str | None) -> bool:
    """Tell whether a slot is in a state, claimed for a workspace if one is given."""
    found = connection.execute("SELECT state, workspace FROM slots WHERE id = ?", (id,)).fetchone()
    return found is not None and tuple(found) == (state.value, workspace)


def drop_slot(connection: Connection, id: str) -> None:
    connection.execute("DELETE FROM slots WHERE id = ?", (id,))


def read_counts(connection: Connection) -> dict[str, int]:
    return dict(connection.execute("SELECT what, count FROM pool_counts ORDER BY what").fetchall())


def project_count(connection: Connection, event: Event) -> None:
    if what := count_name(event):
        query = "INSERT INTO pool_counts VALUES (?, 1) ON CONFLICT (what) DO UPDATE SET count = pool_counts.count + 1"
        connection.execute(query, (what,))
