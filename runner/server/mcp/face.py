"""The face for MCP clients: which tools each one has, and what becomes of its calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import mcp_types as types
import trio
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server as McpServer
from mcp.shared.exceptions import MCPError
from msgspec import Struct

from runner import __version__
from runner.core.codec import encode, plain
from runner.core.errors import BadRequest, Rejected, RunnerError, ServerBusy, ToolFailed, ToolNotEnabled
from runner.core.sanitize import excerpt
from runner.events.events import Recorded
from runner.ops.host.tokens import StoredToken
from runner.ops.sessions import get_session
from runner.ops.tools import TOOLS
from runner.report.diagnostics import render
from runner.server.border import evenly, known_error
from runner.server.mcp.tools import Tool, workspace_tools
from runner.server.route import Call, Server

AT_ONCE = 50  # calls of a token that are worked on
SECONDS = 4000.0  # for one call
MOST_BYTES = 2 << 20  # of a result
_INSTRUCTIONS = """\
Isolated workspaces for work on code, and runs of agents as manifests describe them. What a tool refuses has a code and
a hint: follow the hint.\
"""
Context = ServerRequestContext[Any, Any]


class Access(Struct, frozen=True, kw_only=True):
    """Tools that a client has, and the token that it has them by; ``fixed`` are arguments that it does not give."""

    token: StoredToken
    tools: Mapping[str, Tool]
    fixed: Mapping[str, Callable[[], Awaitable[str]]] = {}

    def listed(self, tool: Tool) -> types.Tool:
        schema = tool.input_schema
        for name in self.fixed:
            del schema["properties"][name]
            schema["required"].remove(name)
        hints = types.ToolAnnotations(read_only_hint=tool.reads, destructive_hint=tool.destroys)
        return types.Tool(
            name=tool.name,
            description=tool.description,
            input_schema=schema,
            output_schema=tool.output_schema,
            annotations=hints,
        )

    def require(self, name: str) -> Tool:
        """Return a tool. Raises ``ToolNotEnabled``, and ``MCPError`` for one that there is not."""
        if name in self.tools:
            return self.tools[name]
        if name in TOOLS:
            hint = f"it has {', '.join(self.tools)}" if self.tools else "it has none"
            raise ToolNotEnabled(f"Tool '{name}' is not enabled for this agent type", hint=hint)
        raise MCPError(types.INVALID_PARAMS, f"there is no tool `{excerpt(name)}`")

    async def completed(self, tool: Tool, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of a call with those that the client does not give. Raises ``BadRequest``."""
        if taken := {*given} & {*self.fixed}:
            raise BadRequest(f"`{min(taken)}` is not an argument of `{tool.name}`", hint="leave it out")
        return {**given, **{name: await value() for name, value in self.fixed.items()}}


def bound(token: StoredToken, names: Sequence[str] | None, of: str, id: Callable[[], Awaitable[str]]) -> Access:
    """Return what a client may do that has tools of one workspace, or ``session``; ``None`` is all of them."""
    enabled = TOOLS if names is None else names
    tools = {name: tool for name, tool in workspace_tools(of).items() if name in enabled}
    return Access(token=token, tools=tools, fixed={of: id})


async def session_access(server: Server, id: str, name: str) -> Access:
    """Return what a client of a session may do: what its agent type enables. Raises ``UnknownSession``."""
    session = (await get_session(server.env.store, id)).session
    token = StoredToken(name=name, scopes=(f"project:{session.project}",), created=0, sha256="")

    async def its_id() -> str:
        return session.id

    return bound(token, session.config.tools if session.config.enabled else (), "session", its_id)


def make_face(server: Server, access: Callable[[Context], Awaitable[Access]]) -> McpServer[Any]:
    """Return the MCP server of a server; ``access`` says what the client of a request may do."""
    calls: Counter[str] = Counter()  # of each token, those that are worked on

    @contextmanager
    def working(token: str) -> Iterator[None]:
        if calls[token] >= AT_ONCE:
            raise ServerBusy(f"{AT_ONCE} calls are worked on already", hint="call again later")
        calls[token] += 1
        try:
            yield
        finally:
            calls[token] -= 1
            if not calls[token]:
                del calls[token]

    async def show(context: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        try:
            its = await access(context)
        except RunnerError as error:
            raise MCPError(types.INVALID_REQUEST, error.message) from error
        return types.ListToolsResult(tools=[its.listed(tool) for tool in its.tools.values()])

    async def call(context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        try:
            its = await access(context)
            tool = its.require(params.name)
            call = Call(server=server, token=its.token, path={})
            ready = tool.call(call, await its.completed(tool, params.arguments or {}))
            with working(its.token.name):
                try:
                    with trio.fail_after(SECONDS):
                        return _result(await evenly(tool.handle(ready, _progress(context))))
                except trio.TooSlowError as error:
                    raise ToolFailed(f"`{tool.name}` took longer than {SECONDS:g} s") from error
        except MCPError:
            raise
        except Exception as error:  # noqa: BLE001  # the border: what is nobody's fault but ours, one call's only
            return _failure(known_error(error))

    return McpServer("runner", version=__version__, instructions=_INSTRUCTIONS, on_list_tools=show, on_call_tool=call)


def _progress(context: Context) -> Callable[[Recorded], Awaitable[None]]:
    numbers = count(1)

    async def tell(recorded: Recorded) -> None:
        words = [type(recorded.event).__name__, getattr(recorded.event, "step", "")]
        await context.session.report_progress(next(numbers), message=" ".join(filter(None, words)))

    return tell


def _result(value: Any) -> types.CallToolResult:
    """Return a value as data, and as the same data in a text, which older clients read."""
    if isinstance(value, str) or value is None:
        return types.CallToolResult(content=[types.TextContent(text=value or "done")])
    raw = encode(value)
    if len(raw) > MOST_BYTES:
        raise BadRequest(f"the result is larger than {MOST_BYTES >> 20} MiB", hint="ask for less")
    return types.CallToolResult(content=[types.TextContent(text=raw.decode())], structured_content=plain(value))


def _failure(error: RunnerError) -> types.CallToolResult:
    findings = error.findings if isinstance(error, Rejected) else [error]
    return types.CallToolResult(content=[types.TextContent(text=render(findings))], is_error=True)
