"""Several servers as one, for a client that has a place for one: names of tools and prompts begin with the server's.

A resource is of the server that lists it; no two have the same, or the first has it. What a server asks of the client
carries the server's name in its id, so that the answer finds the way back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing

import trio

from runner import __version__
from runner.core.codec import encode
from runner.core.lines import lines
from runner.core.model import McpVerdict
from runner.core.sanitize import excerpt
from runner.mcp.bridge import (
    AT_ONCE,
    FAILED,
    INVALID_PARAMS,
    INVALID_REQUEST,
    MAX_LINE,
    NO_METHOD,
    READY_SECONDS,
    VERSION,
    Bridge,
    Inbox,
    Session,
    error_for,
    read_message,
)
from runner.ports.mcp import Message

BETWEEN = "__"  # a server's name and that of its tool
_OWNER = "gateway"
_DRAIN = 2.0  # seconds for answers at the end of the input
_LISTS = {
    "tools/list": "tools",
    "prompts/list": "prompts",
    "resources/list": "resources",
    "resources/templates/list": "resourceTemplates",
}
_NAMED = ("tools/call", "prompts/get")
_OF_RESOURCES = ("resources/read", "resources/subscribe", "resources/unsubscribe")

Read = Callable[[], Awaitable[bytes]]
Write = Callable[[bytes], Awaitable[None]]


class Gateway:
    """The one server that a client talks with. ``bridges`` are by name, and stay."""

    def __init__(self, bridges: Mapping[str, Bridge]) -> None:
        self._bridges = bridges
        self._sessions: dict[str, Session] = {}
        self._under_way: dict[str | int, trio.CancelScope] = {}
        self._outbox = Inbox()
        self._quiet = trio.Event()  # nothing is under way, and all is written

    async def talk(self, read: Read, write: Write) -> None:
        """Answer a client until it closes its end, or reads no more. Answers under way get a moment then."""
        async with aclosing(lines(read, MAX_LINE)) as found, trio.open_nursery() as nursery:
            nursery.start_soon(self._write, write, nursery.cancel_scope)
            async for line in found:
                await self._outbox.wait_room()  # a client that does not read is not read either
                self._receive(line, nursery)
            with trio.move_on_after(_DRAIN):
                await self._quiet.wait()
            nursery.cancel_scope.cancel()
        for name, session in self._sessions.items():
            self._bridges[name].close_session(session)

    async def _write(self, write: Write, whole: trio.CancelScope) -> None:
        while True:
            message = await self._outbox.get()
            try:
                await write(encode(message) + b"\n")
            except BrokenPipeError:
                whole.cancel()
            if not self._under_way and not len(self._outbox):
                self._quiet.set()

    def _receive(self, line: bytes | None, nursery: trio.Nursery) -> None:
        if line is None:
            self._outbox.put(error_for(None, INVALID_REQUEST, f"a message is longer than {MAX_LINE >> 20} MiB"))
            return
        try:
            message = read_message(line)
        except ValueError as error:
            self._outbox.put(error_for(None, INVALID_REQUEST, str(error)))
            return
        if "method" not in message or "id" not in message:
            self._notified(message)
        elif len(self._under_way) >= AT_ONCE or message["id"] in self._under_way:
            text = "a request of this id is under way" if message["id"] in self._under_way else "too many are under way"
            self._outbox.put(error_for(message["id"], FAILED, text))
        else:
            self._under_way[message["id"]] = trio.CancelScope()
            self._quiet = trio.Event()
            nursery.start_soon(self._answer, message, nursery)

    def _notified(self, message: Message) -> None:
        """Pass on what wants no answer: to the server that it is about, or to all."""
        params = message.get("params") or {}
        if "method" not in message:
            name, _, id = str(message.get("id")).partition(":")
            if name in self._sessions:
                self._bridges[name].notify(self._sessions[name], {**message, "id": id})
        elif message["method"] == "notifications/cancelled":
            if (found := self._under_way.get(params.get("requestId", ""))) is not None:
                found.cancel()
        else:
            for name, session in self._sessions.items():
                self._bridges[name].notify(session, message)

    async def _answer(self, message: Message, nursery: trio.Nursery) -> None:
        id, answer = message["id"], None
        try:
            with self._under_way[id]:
                match message["method"]:
                    case "initialize":
                        answer = await self._initialize(message, nursery)
                    case "ping":
                        answer = {"jsonrpc": "2.0", "id": id, "result": {}}
                    case method if method in _LISTS:
                        answer = await self._list(message)
                    case _:
                        answer = await self._pass_on(message)
        finally:
            del self._under_way[id]
        if answer is not None:
            self._outbox.put(answer)
        elif not self._under_way:
            self._quiet.set()  # a client that cancels gets no answer

    async def _initialize(self, message: Message, nursery: trio.Nursery) -> Message:
        """Begin a session with every server. Those that are not there yet tell of their lists when they are."""
        params = message.get("params") or {}
        for name, bridge in self._bridges.items():
            if name not in self._sessions:
                session = self._sessions[name] = bridge.open_session(_OWNER, params)
                session.stream = Inbox()
                nursery.start_soon(self._follow, session.stream)
        changes = {"listChanged": True}
        names = ", ".join(self._bridges)
        result = {
            "protocolVersion": VERSION,
            "capabilities": {"tools": changes, "prompts": changes, "resources": changes},
            "serverInfo": {"name": "runner-gateway", "version": __version__},
            "instructions": f"Tools of the servers {names}; each name begins with that of its server.",
        }
        await trio.lowlevel.checkpoint()
        return {"jsonrpc": "2.0", "id": message["id"], "result": result}

    async def _follow(self, stream: Inbox) -> None:
        while (message := await stream.get()) is not None:
            await self._outbox.wait_room()
            self._outbox.put(message)

    async def _list(self, message: Message) -> Message:
        """Return what all servers list that are there, or come within the time of a start."""
        method, field = message["method"], _LISTS[message["method"]]
        with trio.move_on_after(READY_SECONDS):
            for bridge in self._bridges.values():
                await bridge.wait_ready()
        found: list[Message] = []
        seen: set[object] = set()
        for name in [name for name in self._sessions if self._bridges[name].ready.is_set()]:
            answer = await self._ask(name, {**message, "params": {}})
            items = answer.get("result", {}).get(field, [])
            if method in ("tools/list", "prompts/list"):
                found += ({**one, "name": f"{name}{BETWEEN}{one['name']}"} for one in items)
            else:
                found += (one for one in items if _key(one) not in seen)
                seen |= {_key(one) for one in items}
        return {"jsonrpc": "2.0", "id": message["id"], "result": {field: found}}

    async def _pass_on(self, message: Message) -> Message:
        id, method, params = message["id"], message["method"], message.get("params") or {}
        if not self._sessions:
            return error_for(id, INVALID_REQUEST, "initialize a session first")
        if method == "logging/setLevel":
            for name in self._sessions:
                await self._ask(name, message)
            return {"jsonrpc": "2.0", "id": id, "result": {}}
        if method in _NAMED:
            name, between, own = str(params.get("name")).partition(BETWEEN)
            if between and name in self._sessions:
                return await self._ask(name, {**message, "params": {**params, "name": own}})
            what = "tool" if method == "tools/call" else "prompt"
            text = f"there is no {what} `{excerpt(str(params.get('name')))}`"
            return error_for(id, INVALID_PARAMS, text, McpVerdict.NOT_ALLOWED)
        if method in _OF_RESOURCES:
            if (owner := self._owner(str(params.get("uri")))) is not None:
                return await self._ask(owner, message)
            return error_for(id, INVALID_PARAMS, f"no server has `{excerpt(str(params.get('uri')))}`")
        return error_for(id, NO_METHOD, f"`{excerpt(method)}` is not possible here")

    def _owner(self, uri: str) -> str | None:
        """Return the server that lists a resource, or the only one that has templates for others."""
        for name in self._sessions:
            if uri in self._bridges[name].lists["resources"]:
                return name
        having = [name for name in self._sessions if self._bridges[name].lists["templates"]]
        return having[0] if len(having) == 1 else None

    async def _ask(self, name: str, message: Message) -> Message:
        """Return a server's answer; what comes before it is passed on."""
        exchange = self._bridges[name].exchange(self._sessions[name], message)
        async with aclosing(exchange) as messages:
            async for one in messages:
                if "method" not in one:
                    return one
                await self._outbox.wait_room()
                self._outbox.put({**one, "id": f"{name}:{one['id']}"} if "id" in one else one)
        return error_for(message["id"], FAILED, "the server has ended")


def _key(item: Message) -> object:
    return item.get("uri") or item.get("uriTemplate")
