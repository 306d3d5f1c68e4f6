"""The rows of workspaces; find the one that a person means."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from msgspec.structs import asdict

from runner.core.errors import UnknownWorkspace
from runner.core.model import DEFAULT_PROJECT, ClockReference, Limits, WorkspaceStatus
from runner.events.events import Event
from runner.lifecycle.workspace import fold, named
from runner.ports.store import Cursor, WorkspaceRow
from runner.store._database import Connection
from runner.store._rows import where
from runner.store._runs import ALL, Noun, count_of, find_by_prefix, only

_COLUMNS = (
    "id, agent_session_id, provider, status, lifecycle, created_at, last_used_at, expires_at, repository_url, branch,"
    " resource_limits, snapshot_id, container_type, mcp_config, metadata"
)
_WRITE = (
    f"INSERT INTO agent_workspaces ({_COLUMNS}, deployment_mode, provider_workspace_id)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'self_hosted', ?)"
    " ON CONFLICT (id) DO UPDATE SET " + ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS.split(", "))
)
_ANCHOR = (
    "INSERT INTO clock VALUES (1, ?, ?)"
    " ON CONFLICT (id) DO UPDATE SET boot = excluded.boot, difference = excluded.difference"
)
_WORKSPACE = Noun("workspace", UnknownWorkspace, "runner workspace list")


def one_workspace(rows: Sequence[WorkspaceRow], count: int, text: str) -> WorkspaceRow:
    """Return the workspace that ``text`` means; see ``only``. Raises ``UnknownWorkspace``."""
    return only({row.id: row for row in rows}, count, text, _WORKSPACE)


def find_workspace(connection: Connection, text: str) -> WorkspaceRow:
    """Return the workspace whose id starts with ``text``. Raises ``UnknownWorkspace``."""
    found = find_by_prefix(connection, "agent_workspaces", _COLUMNS, "created_at", text)
    return one_workspace([_row(values[:-1]) for values in found], count_of(found), text)


def read_workspaces(
    connection: Connection,
    *,
    status: str | None = None,
    before: Cursor | None = None,
    limit: int | None = None,
) -> list[WorkspaceRow]:
    clause, values = where(("status = ?", None if status is None else (status,)), ("(created_at, id) < (?, ?)", before))
    query = f"SELECT {_COLUMNS} FROM agent_workspaces {clause} ORDER BY created_at DESC, id DESC LIMIT ?"
    return [_row(found) for found in connection.execute(query, (*values, ALL if limit is None else limit))]


def project_workspace(connection: Connection, owner: str, at: int, event: Event) -> None:
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
        "tools": row.tools,
        "not_enforced": None if row.not_enforced is None else asdict(row.not_enforced),
    }
    metadata = json.dumps({name: value for name, value in more.items() if value is not None})
    limits = None if row.limits is None else json.dumps(asdict(row.limits))
    times = (row.created, row.used, row.expires)
    lifecycle = "persistent" if row.persistent else "ephemeral"
    what = (
        row.id,
        row.session,
        row.provider,
        row.status.value,
        lifecycle,
        *times,
        row.url,
        row.branch,
        limits,
        row.snapshot,
        "agent_workspace" if row.mcp_server is None else "mcp_server",
        None if row.mcp_server is None else json.dumps({"name": row.mcp_server}),
    )
    return (*what, metadata, row.id)


def _row(values: Sequence[Any]) -> WorkspaceRow:
    id, session, provider, status, lifecycle, created, used, expires, url, branch, limits, snapshot, *rest = values
    _, mcp_config, metadata = rest
    more = json.loads(metadata)
    not_enforced, tools = more.pop("not_enforced", None), more.pop("tools", None)
    return WorkspaceRow(
        id=id,
        provider=provider,
        status=WorkspaceStatus(status),
        created=created,
        used=used,
        expires=expires,
        session=session,
        persistent=lifecycle == "persistent",
        url=url,
        branch=branch,
        limits=None if limits is None else Limits(**json.loads(limits)),
        snapshot=snapshot,
        not_enforced=None if not_enforced is None else Limits(**not_enforced),
        tools=None if tools is None else tuple(tools),
        mcp_server=None if mcp_config is None else json.loads(mcp_config)["name"],
        **more,
    )


def read_anchor(connection: Connection) -> ClockReference | None:
    row = connection.execute("SELECT boot, difference FROM clock").fetchone()
    return None if row is None else ClockReference(*row)


def write_anchor(connection: Connection, anchor: ClockReference) -> None:
    connection.execute(_ANCHOR, (anchor.boot, anchor.offset))


def read_newest(connection: Connection) -> int:
    both = "SELECT max(at) AS at FROM events UNION ALL SELECT max(at) FROM workspace_events"
    (newest,) = connection.execute(f"SELECT max(at) FROM ({both}) AS journals").fetchone()
    return int(newest or 0)
