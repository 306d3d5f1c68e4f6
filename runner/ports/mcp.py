"""The port of MCP servers: the bridge between one server and the agent that calls its tools.

The agent's CLI talks to a port of its workspace's own loopback; ``McpSession.serve`` serves each connection there. What
the agent may call is judged on this side, whatever the CLI believes. Order of calls: ``OpenMcp.bridge`` around a step's
commands; ``attach`` for each start of the server; ``serve`` for each connection, any number at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from msgspec import Struct

from runner.core.hosts import NetworkSpec
from runner.core.model import McpVerdict
from runner.core.redact import Redactor
from runner.ports.network import Credential, EgressConnection
from runner.ports.provider import Connection, Reader, Writer

MAX_REPORTED = 1000  # calls of one server that are reported one by one: an agent could make millions

Message = dict[str, Any]
Lists = dict[str, dict[str, Message]]  # what a server lists, by kind and then by what names it
Approve = Callable[[Lists], Awaitable[Lists]]  # returns what clients may see of it


class ServerRefused(Exception):
    """The server answered with an error, or not in time."""


class ServerSilent(ServerRefused):
    """The server did not answer in time."""


class McpGrant(Struct, frozen=True, kw_only=True):
    """The rights of an agent at a server. ``tools`` are the only ones, ``None`` for all; with ``only_tools`` it gets no
    prompts and resources. ``passed`` are capabilities of the agent that the server may use. An answer in which
    ``secrets`` finds one is withheld.
    """

    tools: tuple[str, ...] | None = None
    only_tools: bool = False
    max_calls: int | None = None
    timeout: float = 60.0
    passed: tuple[str, ...] = ()
    secrets: Redactor


class McpCall(Struct, frozen=True, kw_only=True):
    """A call that has ended, or ``count`` similar ones, in which case ``tool`` is empty. Its contents are not recorded.

    ``tool`` is a tool's name, or the method of a call that is none.
    """

    tool: str
    sent_bytes: int
    received_bytes: int
    seconds: float
    verdict: McpVerdict
    count: int = 1


class McpSession(Protocol):
    """A server in use."""

    async def attach(self, stdin: Writer, stdout: Reader) -> None:
        """Let the agent's calls through to a server that was started, to the end of its output.

        Calls without an answer by then get an error, and later ones wait a little for the next start. Raises
        ``ServerRefused`` for a bad start.
        """

    async def wait_ready(self) -> None:
        """Wait until the server has told what it lists."""

    async def ping(self, seconds: float) -> None:
        """Ask whether it is there. Raises ``ServerSilent``; an error is a sign of life."""

    def became(self, state: str) -> None:
        """Take down, for who calls meanwhile, why the server is not there: ``is being started anew``."""

    @property
    def tools(self) -> tuple[str, ...]:
        """The tools that the agent may call."""

    async def serve(self, connection: Connection) -> None:
        """Serve one connection to its end; a handler for ``Workspace.listen``."""


class OpenMcp(Protocol):
    """Opens bridges, and ways to servers elsewhere."""

    def bridge(
        self, grant: McpGrant, approve: Approve, tell: Callable[[str], None], on_call: Callable[[McpCall], None]
    ) -> AbstractAsyncContextManager[McpSession]:
        """Open a bridge for the length of the block, whose end ends its connections.

        ``tell`` is told of everything that the server should not do, ``on_call`` of each call when it has ended,
        synchronously, but for those beyond ``MAX_REPORTED``, which are told at the end together; neither may raise.
        """

    def reach(
        self,
        url: str,
        allowed: NetworkSpec,
        credential: Credential | None,
        tell: Callable[[EgressConnection], None],
    ) -> AbstractAsyncContextManager[tuple[Writer, Reader]]:
        """Reach a server by streamable HTTP as if it had standard streams, for the length of the block.

        Each line that is written is a message for it; each line that is read is one of its own. The end of its output
        is that of its session. ``tell`` is told of each connection. Raises ``UsageError`` when the way from this host
        cannot be used.
        """
