"""Serve the one client that has started this process: what it may do, and what is left when it has gone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from msgspec import Struct

from runner.core.errors import RunnerError
from runner.core.nurseries import open_services
from runner.core.settings import Settings
from runner.ops import agent_types
from runner.ops.agent_types import Task
from runner.ops.host.tokens import StoredToken
from runner.ops.runs.dependencies import Advise
from runner.ops.workspaces import workspaces as ws
from runner.server.border import known_error
from runner.server.mcp.face import Access, Context, bound, make_face, session_access
from runner.server.mcp.stdio import Read, Write, talk
from runner.server.mcp.tools import all_tools
from runner.server.route import Call, Server
from runner.server.routes import workspaces
from runner.server.routes.workspaces import NewWorkspace
from runner.server.state import open_server

END_SECONDS = 30.0  # for the workspace of a client that has gone
OWNER = StoredToken(name="mcp", scopes=("admin",), created=0, sha256="")


class ClientOptions(Struct, frozen=True, kw_only=True):
    """Options of a client: it gets everything, the tools of a ``workspace``, of a ``session``, or of an ``agent_type``.

    The last has a new workspace, which is destroyed at the end, its work saved, unless it is to ``keep``.
    """

    manifests: Path | None = None
    workspace: str | None = None
    session: str | None = None
    agent_type: str | None = None
    task: Task = Task()
    keep: bool = False


async def serve_client(
    settings: Settings,
    options: ClientOptions,
    read: Read,
    write: Write,
    *,
    stopping: trio.CancelScope,
    advise: Advise,
    say: Callable[[str], None],
) -> None:
    """Answer a client to its end, or until ``stopping`` is cancelled: then what it has called ends first.

    Raises what is wrong with ``options`` before it reads anything.
    """
    async with (
        open_server(
            settings, advise, manifests=options.manifests, hooks={}, hosts=frozenset(), stopping=trio.Event()
        ) as server,
        _open_access(server, options, say) as access,
    ):

        async def of(context: Context) -> Access:
            return access

        with stopping:
            await talk(make_face(server, of), read, write)


@asynccontextmanager
async def _open_access(server: Server, options: ClientOptions, say: Callable[[str], None]) -> AsyncIterator[Access]:
    if options.workspace is not None:
        row = await ws.own_workspace(server.env, options.workspace)
        ws.require_ready(row)

        async def its_id() -> str:
            return row.id

        yield bound(OWNER, row.tools, "workspace", its_id)
    elif options.session is not None:
        yield await session_access(server, options.session, OWNER.name)
    elif options.agent_type is not None:
        found = await server.agent_types.get(options.agent_type)
        agent_types.workspace_options(found, options.task)
        body = NewWorkspace(agent_type=found.name, task=options.task)
        async with _new_workspace(server, body, keep=options.keep, say=say) as id:
            yield bound(OWNER, found.workspace.tools, "workspace", id)
    else:
        yield Access(token=OWNER, tools=all_tools())


@asynccontextmanager
async def _new_workspace(
    server: Server, body: NewWorkspace, *, keep: bool, say: Callable[[str], None]
) -> AsyncIterator[Callable[[], Awaitable[str]]]:
    """Make a workspace while the client looks at its tools; the first call waits for it, or gets what went wrong."""
    made, failure, id = trio.Event(), None, ""

    async def make() -> None:
        nonlocal failure, id
        try:
            id = (await workspaces.create(Call(server=server, token=OWNER, path={}, body=body))).id
        except Exception as error:  # noqa: BLE001  # the border: each call tells it
            failure = known_error(error)
            server.env.advise(failure)
        made.set()

    async def its_id() -> str:
        await made.wait()
        if failure is not None:
            raise failure
        return id

    try:
        async with open_services() as services:
            services.start_soon(make)
            yield its_id
    finally:
        if id and not keep:
            with trio.move_on_after(END_SECONDS, shield=True):
                try:
                    async with server.kept.closed(id):
                        removed = await ws.destroy(server.env, id)
                    if removed.saved is not None:
                        say(f"the work of workspace {id} is saved in {removed.saved}")
                except RunnerError as error:
                    server.env.advise(error)
