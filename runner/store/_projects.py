"""The project records of a store, and who may change one."""

from __future__ import annotations

import json
from collections.abc import Sequence

from msgspec.structs import replace

from runner.core.errors import ProjectOwned, UnknownProject, nearest
from runner.core.sanitize import excerpt
from runner.ports.store import ProjectRow
from runner.store._database import Connection
from runner.store._rows import storable

_COLUMNS = "name, root, workspace_isolation, protected_paths, manifest, updated"


def read_projects(connection: Connection) -> list[ProjectRow]:
    rows = connection.execute(f"SELECT {_COLUMNS} FROM projects ORDER BY name")
    return [
        ProjectRow(
            name=name,
            root=root,
            workspace_isolation=bool(isolated),
            protected_paths=tuple(json.loads(protected)),
            manifest=manifest,
            updated=updated,
        )
        for name, root, isolated, protected, manifest, updated in rows
    ]


def write_project(connection: Connection, project: ProjectRow, at: int) -> ProjectRow:
    """Write a record in one statement, so that no other writer comes between. Raises ``ProjectOwned``."""
    manifest = project.manifest and storable(project.manifest)
    protected = json.dumps(project.protected_paths)
    found = connection.execute(
        f"INSERT INTO projects ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET"
        " root = excluded.root, workspace_isolation = excluded.workspace_isolation,"
        " protected_paths = excluded.protected_paths, manifest = excluded.manifest, updated = excluded.updated"
        " WHERE projects.manifest IS NULL OR excluded.manifest IS NOT NULL RETURNING name",
        (project.name, storable(project.root), project.workspace_isolation, protected, manifest, at),
    ).fetchall()
    if not found:
        raise project_owned_error(find_project(read_projects(connection), project.name))
    return replace(project, updated=at)


def project_owned_error(project: ProjectRow) -> ProjectOwned:
    hint = f"change `{project.manifest}`, and apply it"
    return ProjectOwned(f"`{project.name}` is the project of a manifest", hint=hint)


def find_project(rows: Sequence[ProjectRow], name: str) -> ProjectRow:
    """Return the project of that name. Raises ``UnknownProject`` with near misses."""
    for row in rows:
        if row.name == name:
            return row
    raise UnknownProject(f"there is no project `{excerpt(name)}`", hint=nearest(name, [row.name for row in rows]))
