"""The rows of workspaces; find the one that a person means."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

from msgspec.structs import asdict

from runner.core.errors import UnknownWorkspace
from runner.core.model import DEFAULT_PROJECT, ClockReference, Limits, WorkspaceStatus
from runner.events.events import Event
from runner.lifecycle.workspace import fold, named
from runner.ports.store import WorkspaceRow
from runner.store._runs import match_id

_COLUMNS = (
    "id, provider, status, lifecycle, created_at, last_used_at, expires_at, repository_url, branch, resource_limits,"
    " snapshot_id, metadata"
)
_WRITE = (
    f"INSERT INTO agent_workspaces ({_COLUMNS}, container_type, provider_workspace_id)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'agent_workspace', ?) ON CONFLICT (id) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS.split(", "))
)


def find_workspace(rows: Sequence[WorkspaceRow], text: str) -> WorkspaceRow:
    """Return the workspace among ``rows`` whose id starts with ``text``.

    Raises ``UnknownWorkspace``, which lists the candidates when there are several.
    """
    names = {row.id: row.id for row in rows}
    id = match_id(names, text, UnknownWorkspace, "workspace", "runner workspace list")
    return next(row for row in rows if row.id == id)


def read_workspaces(connection: sqlite3.Connection) -> list[WorkspaceRow]:
    query = f"SELECT {_COLUMNS} FROM agent_workspaces ORDER BY created_at DESC, id"
    return [_row(values) for values in connection.execute(query)]


def project_workspace(connection: sqlite3.Connection, owner: str, at: int, event: Event) -> None:
    """Update the row of the workspace that an event is about. Raises ``WorkspaceState``."""
    id = named(owner, event)
    if id is None:
        return
    query = f"SELECT {_COLUMNS} FROM agent_workspaces WHERE id = ?"
    found = connection.execute(query, (id,)).fetchone()
    before = _row(found) if found is not None else None
    after = fold(before, owner, at, event)
    if after is None and before is not None:
        connection.execute("DELETE FROM agent_workspaces WHERE id = ?", (id,))
    elif after is not None and after != before:
        connection.execute(_WRITE, _values(after))


def _values(row: WorkspaceRow) -> tuple[str | int | None, ...]:
    project = None if row.project == DEFAULT_PROJECT else row.project
    more = {
        "run": row.run,
        "project": project,
        "path": row.path,
        "inode": row.inode,
        "base": row.base,
        "image": row.image,
        "slot": row.slot,
        "not_enforced": None if row.not_enforced is None else asdict(row.not_enforced),
    }
    metadata = json.dumps({name: value for name, value in more.items() if value is not None})
    limits = None if row.limits is None else json.dumps(asdict(row.limits))
    times = (row.created, row.used, row.expires)
    lifecycle = "persistent" if row.persistent else "ephemeral"
    what = (row.id, row.provider, row.status.value, lifecycle, *times, row.url, row.branch, limits, row.snapshot)
    return (*what, metadata, row.id)


def _row(values: Sequence[Any]) -> WorkspaceRow:
    id, provider, status, lifecycle, created, used, expires, url, branch, limits, snapshot, metadata = values
    more = json.loads(metadata)
    not_enforced = more.pop("not_enforced", None)
    return WorkspaceRow(
        id,
        provider,
        WorkspaceStatus(status),
        created,
        used,
        expires=expires,
        persistent=lifecycle == "persistent",
        url=url,
        branch=branch,
        limits=None if limits is None else Limits(**json.loads(limits)),
        snapshot=snapshot,
        not_enforced=None if not_enforced is None else Limits(**not_enforced),
        **more,
    )


def read_anchor(connection: sqlite3.Connection) -> ClockReference | None:
    row = connection.execute("SELECT boot, difference FROM clock").fetchone()
    return None if row is None else ClockReference(*row)


def write_anchor(connection: sqlite3.Connection, anchor: ClockReference) -> None:
    connection.execute("INSERT OR REPLACE INTO clock VALUES (1, ?, ?)", (anchor.boot, anchor.offset))


def read_newest(connection: sqlite3.Connection) -> int:
    query = "SELECT max(at) FROM (SELECT max(at) AS at FROM events UNION ALL SELECT max(at) FROM workspace_events)"
    (newest,) = connection.execute(query).fetchone()
    return int(newest or 0)
