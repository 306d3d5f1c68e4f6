"""The lease rows of a store, written by events in the transaction that stores the events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import json
from msgspec.structs import replace

from runner.core.model import Fence, Holder, Lease
from runner.events.events import LeaseAcquired
from runner.lifecycle.lease import LeaseEvent, advance, check, free
from runner.store._database import Connection
from runner.store._rows import as_rows

_COLUMNS = "workspace, fence, id, holder, acquired, refreshed, expires, runner"
_WRITE = (
    f"INSERT INTO leases ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (workspace) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS.split(", "))
)
_HOLDER: json.Decoder[Holder] = json.Decoder(Holder)


def read_lease(connection: Connection, workspace: str) -> Lease:
    query = f"SELECT {_COLUMNS} FROM leases WHERE workspace = ?"
    return next(_leases(connection.execute(query, (workspace,))), free(workspace))


def read_leases(connection: Connection) -> list[Lease]:
    query = f"SELECT {_COLUMNS} FROM leases WHERE id <> '' ORDER BY acquired, workspace"
    return list(_leases(connection.execute(query)))


def _leases(found: Iterable[Sequence[Any]]) -> Iterator[Lease]:
    """Make leases of rows, whose holder is JSON, NULL for none."""
    return as_rows(Lease, ((*row[:3], row[3] and _HOLDER.decode(row[3]), *row[4:]) for row in found))


def check_fence(connection: Connection, fence: Fence, at: int) -> None:
    """Raise ``LeaseLost`` when the fence is not that of the current lease."""
    check(read_lease(connection, fence.workspace), fence, at)


def write_lease(connection: Connection, event: LeaseEvent, at: int, runner: str | None) -> None:
    """Apply an event of a runner to a lease. Raises ``LeaseHeld`` and ``LeaseLost``."""
    _write(connection, advance(read_lease(connection, event.workspace), event, at, runner))


def restore_lease(connection: Connection, event: LeaseEvent, at: int) -> None:
    """Apply an event to a lease that others may have had in between, whose events are not known any more."""
    row = read_lease(connection, event.workspace)
    match event:
        case LeaseAcquired(fence=fence):
            _write(connection, advance(Lease(workspace=event.workspace, fence=fence - 1), event, at))
        case _ if row.id == event.lease:
            _write(connection, advance(replace(row, expires=max(row.expires, at + 1)), event, at))


def _write(connection: Connection, row: Lease) -> None:
    holder = None if row.holder is None else json.encode(row.holder).decode()
    values = (row.workspace, row.fence, row.id, holder, row.acquired, row.refreshed, row.expires, row.runner)
    connection.execute(_WRITE, values)


def forget_leases(connection: Connection) -> None:
    """Remove the free rows of workspaces that are gone, whose ids are never used again.

    While a run may still make its workspace the row stays: the next holder would get the fence of an earlier one, who
    could write again.
    """
    run = "substr(workspace, 1, instr(workspace || '-', '-') - 1)"
    connection.execute(
        "DELETE FROM leases WHERE id = '' AND workspace NOT IN (SELECT id FROM agent_workspaces)"
        f" AND NOT EXISTS (SELECT 1 FROM runs WHERE id = {run} AND ended IS NULL)"
    )
