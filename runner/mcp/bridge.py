"""The bridge between one MCP server on its standard streams and the clients that share it.

The server has one session, with the bridge: ids and progress tokens of clients are replaced by numbers that are used
once, so that no answer, however late, can reach another call. One task writes whole lines, and no deadline ends it
within one. What a client lists was approved, whatever the server says by then.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from itertools import count
from typing import Any, cast

import msgspec
import trio
from msgspec import Struct

from runner import __version__
from runner.core.codec import encode
from runner.core.lines import lines
from runner.core.model import McpVerdict
from runner.core.sanitize import excerpt
from runner.ports.mcp import Approve, Lists, Message, ServerRefused, ServerSilent
from runner.ports.provider import Reader, Writer

__all__ = ["Lists", "Message", "ServerRefused", "ServerSilent"]

VERSION = "2025-06-18"  # of the protocol, offered to servers
MAX_LINE = 16 << 20  # bytes of a message
AT_ONCE = 1000  # calls that are not answered yet
SESSIONS = 1000  # of clients, of which the one that was silent longest makes room
UNSENT = 64 << 20  # bytes that the server has not read, beyond which it gets no more
UNREAD = 100  # messages that wait for a client, beyond which notifications are dropped
UNREAD_BYTES = 32 << 20  # in them
READY_SECONDS = 10.0  # that a call waits for a server that is being started
RELIST_SECONDS = 1.0  # between looks at the lists of a server that says that they have changed
PAGES = 100  # of one of its lists
LIST_BYTES = 4 << 20  # of one of its lists
_GIVEN_UP = 10_000  # calls whose answer may still come

PARSE_ERROR, INVALID_REQUEST, NO_METHOD, INVALID_PARAMS = -32700, -32600, -32601, -32602
FAILED = -32000
TIMED_OUT = -32001
_ASKS = {"sampling/createMessage": "sampling", "elicitation/create": "elicitation"}


class _Listing(Struct, frozen=True):
    """A list of servers with a ``capability``: ``field`` in the answer to ``method``; ``key`` names its items."""

    capability: str
    method: str
    field: str
    key: str

    @property
    def changed(self) -> str:
        return f"notifications/{self.capability}/list_changed"


_LISTS = {
    "tools": _Listing("tools", "tools/list", "tools", "name"),
    "prompts": _Listing("prompts", "prompts/list", "prompts", "name"),
    "resources": _Listing("resources", "resources/list", "resources", "uri"),
    "templates": _Listing("resources", "resources/templates/list", "resourceTemplates", "uriTemplate"),
}
_CHANGED = {one.changed for one in _LISTS.values()}


class BridgeOptions(Struct, frozen=True, kw_only=True):
    """Rules of a bridge. ``passed`` are the capabilities of clients that the server may use; ``tools`` the only ones
    that they may, ``None`` for all that were approved.
    """

    timeout: float = 60.0
    passed: frozenset[str] = frozenset()
    tools: tuple[str, ...] | None = None


class OwnAnswer(Message):
    """An answer of the bridge in place of one of the server, and what it says of the call."""

    verdict: McpVerdict


class Inbox:
    """Messages for one reader. Those that ``may_be_lost`` are, when it does not read; ``size`` is their bytes."""

    def __init__(self) -> None:
        self._messages: deque[tuple[Any, int]] = deque()
        self._bytes = 0
        self._waiting = trio.lowlevel.ParkingLot()
        self._putting = trio.lowlevel.ParkingLot()

    def put(self, message: Any, *, size: int = 0, may_be_lost: bool = False) -> None:
        if may_be_lost and (len(self._messages) >= UNREAD or self._bytes + size > UNREAD_BYTES):
            return
        self._messages.append((message, size))
        self._bytes += size
        self._waiting.unpark()

    async def get(self) -> Any:
        while not self._messages:
            await self._waiting.park()
        message, size = self._messages.popleft()
        self._bytes -= size
        self._putting.unpark_all()
        return message

    async def wait_room(self) -> None:
        """Wait until the reader has read enough for another message."""
        while len(self._messages) >= UNREAD:
            await self._putting.park()

    def __len__(self) -> int:
        return len(self._messages)


class Session:
    """A client. ``owner`` is the token that it came with, ``stream`` its open stream for what answers no call."""

    def __init__(self, owner: str, capabilities: Mapping[str, object]) -> None:
        self.id = secrets.token_urlsafe(24)
        self.owner = owner
        self.capabilities = capabilities
        self.stream: Inbox | None = None
        self.calls: dict[str | int, Call] = {}
        self.asked: dict[str, str | int] = {}  # its ids for requests of the server


class Call:
    """A request to the server: ``number`` is its id there, ``id`` that of the client, who may want progress."""

    def __init__(self, number: int, session: Session | None, message: Message) -> None:
        self.number, self.session, self.id = number, session, message.get("id")
        self.token = ((message.get("params") or {}).get("_meta") or {}).get("progressToken")
        self.inbox = Inbox()


class Bridge:
    """A bridge. ``approve`` gets what the server lists and returns what clients may see of it.

    ``tell`` is told of everything that a server should not do.
    """

    def __init__(
        self,
        options: BridgeOptions,
        approve: Approve,
        tell: Callable[[str], None],
    ) -> None:
        self.options = options
        self.lists: Lists = {kind: {} for kind in _LISTS}
        self._withheld: set[str] = set()  # resources that were not approved
        self.ready = trio.Event()
        self.initialized: Message = {}  # what the server says of itself
        self.state = "is not running"
        self._idle = False
        self.relist = trio.Event()
        self._approve, self._tell = approve, tell
        self._numbers = count(1)
        self._calls: dict[int, Call] = {}
        self._given_up: dict[int, None] = {}
        self._sessions: dict[str, Session] = {}
        self._outbox = Inbox()
        self._unsent = 0  # bytes in it
        self._size = 0  # bytes of the line that is dealt with

    def became(self, state: str, *, idle: bool = False) -> None:
        """Take down, for who calls, why the server is not there; nobody waits for one that is ``idle``."""
        self.state, self._idle = state, idle
        if idle:
            self.ready, before = trio.Event(), self.ready
            before.set()  # who waits has nothing to wait for

    async def wait_ready(self, seconds: float = READY_SECONDS) -> bool:
        """Wait a moment for a server that is being started; tell whether it is there."""
        if not self._idle:
            with trio.move_on_after(seconds):
                await self.ready.wait()
        return self.ready.is_set()

    # --- the server ----------------------------------------------------------------------------------

    async def attach(self, stdin: Writer, stdout: Reader) -> None:
        """Talk with a server that was started to the end of its output. Raises ``ServerRefused`` for a bad start."""
        self._outbox, self._unsent = Inbox(), 0
        failure: ServerRefused | None = None

        async def start() -> None:
            nonlocal failure
            try:
                await self._start()
            except ServerRefused as error:
                failure = error
                nursery.cancel_scope.cancel()

        try:
            async with (
                aclosing(lines(lambda: stdout.receive_some(1 << 18), MAX_LINE)) as found,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(self._write, stdin, self._outbox)
                nursery.start_soon(start)
                async for line in found:
                    if line is None:
                        self._tell(f"a message of more than {MAX_LINE >> 20} MiB was refused")
                    else:
                        self._receive(line)
                nursery.cancel_scope.cancel()
        finally:
            self.ready = trio.Event()
            for call in self._calls.values():
                call.inbox.put(error_for(call.id, FAILED, "the server has ended", McpVerdict.ENDED))
            self._calls.clear()
            for session in self._sessions.values():
                session.asked.clear()
        if failure is not None:
            raise failure

    async def _write(self, stdin: Writer, outbox: Inbox) -> None:
        try:
            while True:
                line = await outbox.get()
                await stdin.send_all(line)
                self._unsent -= len(line)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # its output tells when it has ended

    async def _start(self) -> None:
        params = {
            "protocolVersion": VERSION,
            "capabilities": {name: {} for name in sorted(self.options.passed)},
            "clientInfo": {"name": "runner", "version": __version__},
        }
        self.initialized = await self.ask("initialize", params, self.options.timeout)
        self._say({"method": "notifications/initialized"})
        while True:
            self.relist = trio.Event()
            found = {kind: await self._list(listing) for kind, listing in _LISTS.items()}
            before, self.lists = self.lists, await self._approve(found)
            self._withheld = {*found["resources"]} - {*self.lists["resources"]}
            for method in {_LISTS[kind].changed for kind in _LISTS if self.lists[kind] != before[kind]}:
                self._broadcast({"jsonrpc": "2.0", "method": method})
            self.ready.set()
            await trio.sleep(RELIST_SECONDS)
            await self.relist.wait()

    async def _list(self, listing: _Listing) -> dict[str, Message]:
        """Return one of the server's lists, an empty one where it has none."""
        found: dict[str, Message] = {}
        if listing.capability not in _mapping(self.initialized.get("capabilities")):
            return found
        params: Message = {}
        size = 0
        for _ in range(PAGES):
            page = await self._page(listing, params)
            items = page.get(listing.field)
            if not isinstance(items, list) or not all(type(_mapping(one).get(listing.key)) is str for one in items):
                raise ServerRefused(f"`{listing.method}` returned no list of {listing.field}")
            if (size := size + len(encode(items))) > LIST_BYTES:
                raise ServerRefused(f"`{listing.method}` returned more than {LIST_BYTES >> 20} MiB")
            found |= {one[listing.key]: one for one in items}
            if (cursor := page.get("nextCursor")) is None:
                return found
            params = {"cursor": cursor}
        raise ServerRefused(f"`{listing.method}` has more than {PAGES} pages")

    async def _page(self, listing: _Listing, params: Message) -> Message:
        try:
            return await self.ask(listing.method, params, self.options.timeout)
        except ServerSilent:
            raise
        except ServerRefused:
            if listing is not _LISTS["templates"]:
                raise
            return {listing.field: []}  # many have resources and know nothing of templates

    async def ask(self, method: str, params: Message, seconds: float) -> Message:
        """Ask the server itself. Raises ``ServerRefused``."""
        call = self._register(None, {"method": method, "params": params})
        answer: Message | None = None
        try:
            self._say({"id": call.number, "method": method, "params": params})
            with trio.move_on_after(seconds):
                answer = await call.inbox.get()
        finally:
            self._forget(call)
        if answer is None:
            raise ServerSilent(f"it did not answer `{method}` within {seconds:g} s")
        if not isinstance(result := answer.get("result"), dict):
            text = _mapping(answer.get("error")).get("message", "it gave no reason")
            raise ServerRefused(f"it refused `{method}`: {excerpt(str(text))}")
        return result

    def _receive(self, line: bytes) -> None:
        self._size = len(line)
        try:
            found = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._tell(f"a line of its output is not JSON: {excerpt(line[:200].decode(errors='replace'))}")
            return
        for message in found if isinstance(found, list) else [found]:
            match message:
                case {"method": str(method), "id": str() | int() as id}:
                    self._asked(method, id, message)
                case {"method": str(method)}:
                    self._notified(method, message)
                case {"id": int(number)} if type(number) is int and ("result" in message) != ("error" in message):
                    self._answered(number, message)
                case _:
                    self._tell("a line of its output is not a message of JSON-RPC")

    def _answered(self, number: int, message: Message) -> None:
        call = self._calls.pop(number, None)
        if call is not None:
            call.inbox.put({**message, "id": call.id})
        elif number in self._given_up:
            del self._given_up[number]
        else:
            self._tell(f"it answers `{number}`, which nobody has asked")

    def _notified(self, method: str, message: Message) -> None:
        params = _mapping(message.get("params"))
        if method == "notifications/progress":
            token = params.get("progressToken")
            call = self._calls.get(token) if type(token) is int else None
            if call is not None and call.token is not None:
                told = {**message, "params": {**params, "progressToken": call.token}}
                call.inbox.put(told, size=self._size, may_be_lost=True)
        elif method in _CHANGED:
            self.relist.set()
        elif method == "notifications/cancelled":
            self._withdrawn(message)
        else:
            self._broadcast(message)

    def _broadcast(self, message: Message) -> None:
        for session in self._sessions.values():
            if session.stream is not None:
                session.stream.put(message, size=self._size, may_be_lost=True)

    def _asked(self, method: str, id: str | int, message: Message) -> None:
        """Answer a request of the server, or let the one client answer that it can be about."""
        if method == "ping":
            self._say({"id": id, "result": {}})
            return
        kind = _ASKS.get(method)
        calls = [call for call in self._calls.values() if call.session is not None]
        sessions = {call.session for call in calls if call.session is not None}
        if kind in self.options.passed and len(sessions) == 1:
            (session,) = sessions
            if kind in session.capabilities and len(session.asked) < UNREAD:
                theirs = f"runner-{next(self._numbers)}"
                session.asked[theirs] = id
                calls[-1].inbox.put({**message, "id": theirs})
                return
        self._say({"id": id, "error": {"code": NO_METHOD, "message": f"`{excerpt(method)}` is not possible here"}})

    def _withdrawn(self, message: Message) -> None:
        params = _mapping(message.get("params"))
        for session in self._sessions.values():
            for theirs, id in [*session.asked.items()]:
                if id == params.get("requestId"):
                    del session.asked[theirs]
                    if session.stream is not None:
                        session.stream.put({**message, "params": {**params, "requestId": theirs}}, may_be_lost=True)

    # --- clients -------------------------------------------------------------------------------------

    def open_session(self, owner: str, params: Message) -> Session:
        session = Session(owner, _mapping(params.get("capabilities")))
        if len(self._sessions) >= SESSIONS:
            self.close_session(next(iter(self._sessions.values())))
        self._sessions[session.id] = session
        return session

    def session(self, id: str, owner: str) -> Session | None:
        """Return the session of a client, which is then the one that was used last."""
        session = self._sessions.get(id)
        if session is None or session.owner != owner:
            return None
        self._sessions[id] = self._sessions.pop(id)
        return session

    def close_session(self, session: Session) -> None:
        """End a session and its calls."""
        self._sessions.pop(session.id, None)
        for call in [*session.calls.values()]:
            self._cancel(call, "the client has gone")
        for id in session.asked.values():
            self._say({"id": id, "error": {"code": FAILED, "message": "the client has gone"}})
        if session.stream is not None:
            session.stream.put(None)

    def notify(self, session: Session, message: Message) -> None:
        """Pass on what a client says that wants no answer: a notification, or its answer to a request."""
        method, params = message.get("method"), message.get("params")
        if method is None:
            if (id := session.asked.pop(str(message.get("id")), None)) is not None:
                self._say({**message, "id": id})
        elif method == "notifications/cancelled":
            id = (params or {}).get("requestId")
            if isinstance(id, str | int) and (call := session.calls.get(id)) is not None:
                self._cancel(call, str((params or {}).get("reason", "")))
        elif method not in ("notifications/initialized", "notifications/roots/list_changed") and self.ready.is_set():
            self._say(message)

    def _cancel(self, call: Call, reason: str) -> None:
        self._withdraw(call, reason)
        call.inbox.put(error_for(call.id, FAILED, "cancelled", McpVerdict.CANCELLED))

    def _withdraw(self, call: Call, reason: str) -> None:
        """Tell the server that nobody waits for a call any more."""
        if self._calls.get(call.number) is call:
            params = {"requestId": call.number, "reason": reason}
            self._say({"method": "notifications/cancelled", "params": params})
            self._forget(call)

    async def initialize(self, message: Message) -> Message:
        """Return what a client is told of the server, once it is there."""
        if not await self.wait_ready():
            return error_for(message["id"], FAILED, f"the server {self.state}")
        return {"jsonrpc": "2.0", "id": message["id"], "result": self.initialized}

    async def exchange(self, session: Session, message: Message) -> AsyncGenerator[Message]:
        """Yield what the client of a request gets: notifications and requests that belong to it, last the answer."""
        id, method = message["id"], message["method"]
        deadline = trio.current_time() + self.options.timeout
        await self.wait_ready(min(self.options.timeout, READY_SECONDS))
        if (known := self._known(message)) is not None:
            yield known
            return
        call = self._register(session, message)
        session.calls[id] = call
        try:
            self._say(_with_number(message, call))
            while True:
                found: Message | None = None
                with trio.move_on_at(deadline):
                    found = await call.inbox.get()
                if found is None:
                    text = f"`{excerpt(method)}` took longer than {self.options.timeout:g} s"
                    found = error_for(id, TIMED_OUT, text, McpVerdict.TIMEOUT)
                yield found
                if "method" not in found:
                    return
        finally:
            self._withdraw(call, "nobody waits any more")
            if session.calls.get(id) is call:
                del session.calls[id]

    def _known(self, message: Message) -> Message | None:
        """Return the answer that needs no server, or that one who cannot ask it gets."""
        id, method, params = message["id"], message["method"], message.get("params") or {}
        if method == "ping":
            return {"jsonrpc": "2.0", "id": id, "result": {}}
        if not self.ready.is_set():
            return error_for(id, FAILED, f"the server {self.state}", McpVerdict.UNAVAILABLE)
        if len(self._calls) >= AT_ONCE:
            return error_for(id, FAILED, f"{AT_ONCE} calls are not answered yet", McpVerdict.UNAVAILABLE)
        for kind, listing in _LISTS.items():
            if method == listing.method:
                items = self.enabled() if kind == "tools" else self.lists[kind]
                return {"jsonrpc": "2.0", "id": id, "result": {listing.field: [*items.values()]}}
        name, uri = str(params.get("name")), str(params.get("uri"))
        if method == "tools/call" and name not in self.enabled():
            return error_for(id, INVALID_PARAMS, f"there is no tool `{excerpt(name)}`", McpVerdict.NOT_ALLOWED)
        if method == "prompts/get" and name not in self.lists["prompts"]:
            return error_for(id, INVALID_PARAMS, f"there is no prompt `{excerpt(name)}`", McpVerdict.NOT_ALLOWED)
        if method in ("resources/read", "resources/subscribe") and uri in self._withheld:
            text = f"resource `{excerpt(uri)}` waits for `runner mcp approve`"
            return error_for(id, INVALID_PARAMS, text, McpVerdict.NOT_ALLOWED)
        return None

    def enabled(self) -> dict[str, Message]:
        """Return the tools that clients may call."""
        only = self.options.tools
        return {name: tool for name, tool in self.lists["tools"].items() if only is None or name in only}

    # --- both ----------------------------------------------------------------------------------------

    def _register(self, session: Session | None, message: Message) -> Call:
        call = Call(next(self._numbers), session, message)
        self._calls[call.number] = call
        return call

    def _forget(self, call: Call) -> None:
        """Expect no answer any more; one that comes all the same is no lie."""
        if self._calls.pop(call.number, None) is not None:
            self._given_up[call.number] = None
            if len(self._given_up) > _GIVEN_UP:
                del self._given_up[next(iter(self._given_up))]

    def _say(self, message: Message) -> None:
        if self._unsent < UNSENT:  # else the server reads nothing, and whoever waits for it learns that in time
            line = encode({"jsonrpc": "2.0", **message}) + b"\n"
            self._unsent += len(line)
            self._outbox.put(line)


def _mapping(found: object) -> Message:
    """Return what should be an object, and an empty one for anything else that somebody sent."""
    return found if isinstance(found, dict) else {}


def read_message(raw: bytes) -> Message:
    """Read a message of a client. Raises ``ValueError`` with what is wrong with it."""
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ValueError("the body is not JSON") from None
    match found:
        case {"jsonrpc": "2.0", "method": str()} | {"jsonrpc": "2.0", "id": str() | int()}:
            params = found.get("params", {})
            meta = params.get("_meta", {}) if isinstance(params, dict) else None
            token = meta.get("progressToken", 0) if isinstance(meta, dict) else None
            if type(found.get("id", 0)) in (int, str) and type(token) in (int, str):
                return cast(Message, found)
    raise ValueError("the body is not one message of JSON-RPC 2.0")


def _with_number(message: Message, call: Call) -> Message:
    """Return a request of a client with the id and the progress token that it has for the server."""
    told = {**message, "id": call.number}
    if call.token is not None:
        params = message["params"]
        told["params"] = {**params, "_meta": {**params["_meta"], "progressToken": call.number}}
    return told


def error_for(id: object, code: int, text: str, verdict: McpVerdict = McpVerdict.NOT_ALLOWED) -> OwnAnswer:
    answer = OwnAnswer(jsonrpc="2.0", id=id, error={"code": code, "message": text})
    answer.verdict = verdict
    return answer
