"""The lease rows of a SQLite store, written by events in the transaction that keeps these."""

from __future__ import annotations

import sqlite3

from runner.lifecycle.lease import LeaseEvent, advance, check, free
from runner.model import Fence, Lease

_COLUMNS = "workspace, fence, id, holder, acquired, refreshed, expires"


def read_lease(connection: sqlite3.Connection, workspace: str) -> Lease:
    query = f"SELECT {_COLUMNS} FROM leases WHERE workspace = ?"
    row = connection.execute(query, (workspace,)).fetchone()
    return Lease(*row) if row is not None else free(workspace)


def read_leases(connection: sqlite3.Connection) -> list[Lease]:
    query = f"SELECT {_COLUMNS} FROM leases WHERE id <> '' ORDER BY acquired, workspace"
    return [Lease(*row) for row in connection.execute(query)]


def check_fence(connection: sqlite3.Connection, fence: Fence, at: int) -> None:
    """Raises ``LeaseLost``."""
    check(read_lease(connection, fence.workspace), fence, at)


def write_lease(connection: sqlite3.Connection, event: LeaseEvent, at: int) -> None:
    """Raises ``LeaseHeld`` and ``LeaseLost``."""
    row = advance(read_lease(connection, event.workspace), event, at)
    values = (row.workspace, row.fence, row.id, row.holder, row.acquired, row.refreshed, row.expires)
    connection.execute(f"INSERT OR REPLACE INTO leases ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", values)


def forget_lease(connection: sqlite3.Connection, workspace: str) -> None:
    """Drop the free row of a workspace that is gone, whose id is never given again."""
    query = "DELETE FROM leases WHERE workspace = ? AND id = '' AND workspace NOT IN (SELECT id FROM agent_workspaces)"
    connection.execute(query, (workspace,))
