"""Projects in the store: made by a command, or by an applied manifest, which then owns the record."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from runner.core.errors import BadName, ProtectedIgnored, RunnerError, UsageError
from runner.core.ids import is_name
from runner.core.sanitize import excerpt
from runner.core.settings import Settings
from runner.ops.host.state import make_home, open_state, read_state
from runner.policy.protected import check_protected, unite
from runner.ports.store import ProjectRow


async def create_project(settings: Settings, project: ProjectRow) -> ProjectRow:
    """Store a project, or change one that a command has stored; never to less protection.

    Raises ``ProjectOwned``, and ``UsageError`` for protection that would be lost.
    """
    make_home(settings)
    async with open_state(settings) as store:
        for before in await store.projects():
            if before.name == project.name and before.manifest is None and (lost := _lost(before, project)):
                raise UsageError(f"project `{project.name}` exists already, and would lose {lost}", hint=_KEEP)
        return await store.put_project(project)


_KEEP = "repeat what it has besides what is new, or describe it in a manifest"


def _lost(before: ProjectRow, after: ProjectRow) -> str | None:
    """Say which protection a change would remove."""
    if before.workspace_isolation and not after.workspace_isolation:
        return "its isolation (--workspace-isolation)"
    gone = [path for path in before.protected_paths if path not in after.protected_paths]
    return f"what is protected: --protected {gone[0]}" if gone else None


def new_project(
    name: str, root: Path, *, isolated: bool, protected: Sequence[str]
) -> tuple[ProjectRow, list[RunnerError]]:
    """Check a new project, and return it with warnings about it.

    Raises ``BadName``, and ``UsageError`` for a root that is not a directory and paths that cannot be protected.
    """
    if not is_name(name):
        raise BadName(f"`{excerpt(name)}` cannot name a project", hint="use small letters, digits, `-` and `.`")
    if not os.path.isdir(root):
        raise UsageError(f"`{excerpt(str(root))}` is not a directory")
    for path in protected:
        if complaint := check_protected(path):
            raise UsageError(f"--protected: `{excerpt(path)}` {complaint}")
    advice: list[RunnerError] = []
    if protected and not isolated:
        message = f"project `{name}` is not isolated, so {', '.join(protected)} can be written"
        advice.append(ProtectedIgnored(message, hint="--workspace-isolation"))
    return ProjectRow(
        name=name, root=os.path.realpath(root), workspace_isolation=isolated, protected_paths=unite(protected)
    ), advice


async def list_projects(settings: Settings) -> list[ProjectRow]:
    """List projects by name."""
    async with read_state(settings) as store:
        return await store.projects()


async def get_project(settings: Settings, name: str) -> ProjectRow:
    """Return one project. Raises ``UnknownProject``."""
    async with read_state(settings) as store:
        return await store.project(name)
