"""A server as streamable HTTP for one agent and all that it starts, on connections that its workspace relays.

Who reaches the port is known by that alone: there is no token. What an agent may call is judged here and in the bridge;
each call is told when it has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import trio

from runner.core.codec import encode
from runner.core.model import McpVerdict
from runner.core.sanitize import excerpt
from runner.mcp.bridge import (
    FAILED,
    INVALID_REQUEST,
    MAX_LINE,
    NO_METHOD,
    Bridge,
    BridgeOptions,
    Inbox,
    OwnAnswer,
    Session,
    error_for,
    read_message,
)
from runner.network.http import Request, Response
from runner.network.served_session import JSON_TYPE, RequestRefused, ServedSession
from runner.ports.mcp import MAX_REPORTED, Approve, McpCall, McpGrant, Message, ServerRefused, ServerSilent
from runner.ports.provider import Reader, Writer

PATH = "/mcp"
SESSION = b"mcp-session-id"
BEAT = 15.0  # seconds between signs of life on a stream
LONGEST = 200  # characters of a tool's name that are recorded
_OWNER = "agent"  # of all sessions here
_HOSTS = frozenset({"127.0.0.1", "localhost"})
_STREAM = b"text/event-stream"
_COUNTED = ("tools/call", "prompts/get", "resources/read")  # what a server does, or gives, for being asked
_NOT_BEGUN = (McpVerdict.NOT_ALLOWED, McpVerdict.UNAVAILABLE)  # in whose place another call may be made
_BESIDE_TOOLS = ("prompts/", "resources/", "completion/")
_EMPTY = {"prompts/list": "prompts", "resources/list": "resources", "resources/templates/list": "resourceTemplates"}


@asynccontextmanager
async def open_bridge(
    grant: McpGrant,
    approve: Approve,
    tell: Callable[[str], None],
    on_call: Callable[[McpCall], None],
    *,
    max_reported: int = MAX_REPORTED,
) -> AsyncIterator[AgentBridge]:
    """Open a bridge; see ``ports.mcp.OpenMcp``."""
    bridge = AgentBridge(grant=grant, approve=approve, tell=tell, on_call=on_call, max_reported=max_reported)
    try:
        yield bridge
    finally:
        bridge.close()


class AgentBridge(ServedSession):
    """See the port."""

    def __init__(
        self,
        grant: McpGrant,
        approve: Approve,
        tell: Callable[[str], None],
        on_call: Callable[[McpCall], None],
        max_reported: int,
    ) -> None:
        super().__init__(large_places=4, max_body=MAX_LINE)
        options = BridgeOptions(timeout=grant.timeout, passed=frozenset(grant.passed), tools=grant.tools)
        self._bridge = Bridge(options, approve, tell)
        self._grant, self._tell, self._on_call = grant, tell, on_call
        self._begun = 0  # calls that the budget counts
        self._left_to_tell = max_reported
        self._untold: Counter[McpVerdict] = Counter()

    # --- the server ----------------------------------------------------------------------------------

    async def attach(self, stdin: Writer, stdout: Reader) -> None:
        await self._bridge.attach(stdin, stdout)

    async def wait_ready(self) -> None:
        await self._bridge.ready.wait()

    async def ping(self, seconds: float) -> None:
        try:
            await self._bridge.ask("ping", {}, seconds)
        except ServerSilent:
            raise
        except ServerRefused:
            pass  # it answers, if not this

    def became(self, state: str) -> None:
        self._bridge.became(state)

    @property
    def tools(self) -> tuple[str, ...]:
        return tuple(self._bridge.enabled())

    def close(self) -> None:
        """End what is still under way, and tell the calls that were only counted."""
        super().close()
        for verdict, count in self._untold.items():
            self._on_call(McpCall(tool="", sent_bytes=0, received_bytes=0, seconds=0.0, verdict=verdict, count=count))
        self._untold.clear()

    # --- its client ----------------------------------------------------------------------------------

    def _error_body(self, refused: RequestRefused) -> bytes:
        return encode(error_for(None, INVALID_REQUEST, str(refused)))

    async def _exchange(self, request: Request, response: Response) -> None:
        names = {name for name, _ in request.headers}
        host, _, _ = request.header(b"host").decode("ascii", "replace").partition(":")
        if b"origin" in names or host not in _HOSTS:
            await _say(response, 403, "only clients of this workspace are answered")
        elif request.path != PATH:
            await _say(response, 404, f"the server is at {PATH}")
        elif request.method == "POST":
            await self._post(request, response)
        elif request.method not in ("GET", "DELETE"):
            await _say(response, 405, "a server has POST, GET and DELETE")
        elif (session := self._session(request)) is None:
            await _say(response, 404 if request.header(SESSION) else 400, "initialize a session first")
        elif request.method == "GET":
            await self._follow(session, response)
        else:
            self._bridge.close_session(session)
            await response.send_all(200, JSON_TYPE, b"{}")

    def _session(self, request: Request) -> Session | None:
        return self._bridge.session(request.header(SESSION).decode("ascii", "replace"), _OWNER)

    async def _post(self, request: Request, response: Response) -> None:
        try:
            message = read_message(request.body)
        except ValueError as error:
            await _say(response, 400, str(error))
            return
        if message.get("method") == "initialize" and "id" in message:
            await self._initialize(message, response)
        elif (session := self._session(request)) is None:
            await _say(response, 404 if request.header(SESSION) else 400, "initialize a session first")
        elif "method" in message and "id" in message:
            await self._call(session, message, len(request.body), response)
        else:
            self._bridge.notify(session, message)
            await response.start(202, [(b"content-length", b"0")])

    async def _initialize(self, message: Message, response: Response) -> None:
        answer = await self._bridge.initialize(message)
        body = self._encoded(answer)[0]
        headers = [(b"content-type", JSON_TYPE), (b"content-length", b"%d" % len(body))]
        if "error" not in answer:
            session = self._bridge.open_session(_OWNER, message.get("params") or {})
            headers.append((SESSION, session.id.encode()))
        await response.start(200, headers)
        await response.send(body)

    async def _call(self, session: Session, message: Message, sent: int, response: Response) -> None:
        """Answer a request, and tell of it if it is one that counts."""
        counts, begun = message["method"] in _COUNTED, False
        began, received = trio.current_time(), 0
        verdict = McpVerdict.CANCELLED
        try:
            if (known := self._answered_here(message)) is not None:
                verdict = known.verdict if isinstance(known, OwnAnswer) else McpVerdict.ANSWERED
                await response.send_all(200, JSON_TYPE, encode(known))
                return
            begun = counts
            self._begun += begun
            streams = False
            async with aclosing(self._bridge.exchange(session, message)) as messages:
                async for one in messages:
                    body, judged = self._encoded(one)
                    received += len(body)
                    if "method" not in one:
                        verdict = judged
                        await _finish(response, body, streams=streams)
                    elif body:
                        streams = await _go_on(response, body, streams=streams)
        finally:
            if counts:
                self._begun -= begun and verdict in _NOT_BEGUN
                self._report(message, sent, received, trio.current_time() - began, verdict)

    def _answered_here(self, message: Message) -> Message | None:
        """Return the answer to a request that the server is not to get."""
        id, method, grant = message["id"], message["method"], self._grant
        if grant.only_tools and method in _EMPTY:
            return {"jsonrpc": "2.0", "id": id, "result": {_EMPTY[method]: []}}
        if grant.only_tools and method.startswith(_BESIDE_TOOLS):
            return error_for(id, NO_METHOD, f"`{excerpt(method)}` is not among what this agent may use")
        if method in _COUNTED and grant.max_calls is not None and self._begun >= grant.max_calls:
            text = f"the budget of this run is used up: {self._begun} of {grant.max_calls} calls"
            return error_for(id, FAILED, text, McpVerdict.BUDGET)
        return None

    def _encoded(self, message: Message) -> tuple[bytes, McpVerdict]:
        """Return what the client gets of a message, and what it says of the call; nothing of what has a secret in it
        but is no answer.
        """
        body, secrets = encode(message), self._grant.secrets
        if secrets and (names := secrets.names_in(body)):
            named = ", ".join(sorted(names))
            self._tell(f"a message of it had secret {named} in it, and was withheld")
            if "method" in message:
                return b"", McpVerdict.SECRET
            return encode(error_for(message.get("id"), FAILED, f"the answer shows secret {named}")), McpVerdict.SECRET
        if isinstance(message, OwnAnswer):
            return body, message.verdict
        result = message.get("result")
        failed = "error" in message or (isinstance(result, dict) and result.get("isError") is True)
        return body, McpVerdict.FAILED if failed else McpVerdict.ANSWERED

    def _report(self, message: Message, sent: int, received: int, seconds: float, verdict: McpVerdict) -> None:
        if not self._left_to_tell and not self._connections.closed:
            self._untold[verdict] += 1
            return
        self._left_to_tell -= not self._connections.closed
        method, params = message["method"], message.get("params")
        name = params.get("name") if isinstance(params, dict) and method == "tools/call" else None
        tool = name if isinstance(name, str) else method
        self._on_call(
            McpCall(
                tool=excerpt(tool, LONGEST), sent_bytes=sent, received_bytes=received, seconds=seconds, verdict=verdict
            )
        )

    async def _follow(self, session: Session, response: Response) -> None:
        """Send what answers no call, until the session ends or its client opens another stream."""
        inbox, before = Inbox(), session.stream
        session.stream = inbox
        if before is not None:
            before.put(None)  # a client has one
        try:
            await _begin(response)
            while True:
                message: Message | None = {}
                with trio.move_on_after(BEAT):
                    message = await inbox.get()
                if message is None:
                    return
                body = self._encoded(message)[0] if message else b""
                await response.send(_event(body) if body else b": still here\n\n")
        finally:
            if session.stream is inbox:
                session.stream = None


async def _begin(response: Response) -> None:
    await response.start(200, [(b"content-type", _STREAM), (b"cache-control", b"no-store")])


async def _go_on(response: Response, body: bytes, *, streams: bool) -> bool:
    if not streams:
        await _begin(response)
    await response.send(_event(body))
    return True


async def _finish(response: Response, body: bytes, *, streams: bool) -> None:
    """Send the answer: alone as JSON, unless something came before it."""
    await (response.send(_event(body)) if streams else response.send_all(200, JSON_TYPE, body))


def _event(body: bytes) -> bytes:
    return b"event: message\ndata: " + body + b"\n\n"


async def _say(response: Response, status: int, text: str) -> None:
    await response.send_all(status, JSON_TYPE, encode(error_for(None, INVALID_REQUEST, text)))
