"""Routes of projects, which manifests and `runner project create` make. A token sees its own, and no others exist."""

from __future__ import annotations

from runner.client.values import Project, Projects
from runner.core.errors import UnknownProject
from runner.core.sanitize import excerpt
from runner.ports.store import ProjectRow
from runner.server.route import Call, api
from runner.server.routes.workspaces import moment


async def _visible(call: Call) -> list[ProjectRow]:
    return [row for row in await call.server.env.store.projects() if call.token.may_see(row.name)]


async def _list(call: Call) -> Projects:
    return Projects([shown(row) for row in await _visible(call)])


async def _get(call: Call) -> Project:
    for row in await _visible(call):
        if row.name == call.path["id"]:
            return shown(row)
    raise UnknownProject(f"there is no project `{excerpt(call.path['id'])}`")


def shown(row: ProjectRow) -> Project:
    return Project(
        name=row.name,
        root=row.root,
        workspace_isolation=row.workspace_isolation,
        protected_paths=list(row.protected_paths),
        manifest=row.manifest,
        updated_at=moment(row.updated),
    )


ROUTES = (
    api("GET", "/projects", "List projects", _list, answer=Projects),
    api("GET", "/projects/{id}", "Show a project", _get, answer=Project),
)
