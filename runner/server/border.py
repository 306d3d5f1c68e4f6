"""The border: what every request passes before anything is done for it, and how errors become answers.

Host and Origin come first, then the token, then the size and form of the body; all of it before any work.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

import trio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as Path
from starlette.routing import Router

from runner.core.codec import encode
from runner.core.errors import (
    BadOrigin,
    BodyTooLarge,
    BodyTooSlow,
    NoMethod,
    NoRoute,
    NotJson,
    Rejected,
    RunnerError,
    ServerBusy,
    ServerStopping,
    Unauthorized,
    first_leaf,
)
from runner.core.sanitize import excerpt
from runner.ops.host.tokens import StoredToken, find_token
from runner.server.route import BASE, Call, Reply, Route, Server, read_body, read_query

MAX_BODY = 16 << 20  # bytes
BODY_SECONDS = 30.0
AT_ONCE = 200  # requests that are worked on
_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
_ANYBODY = StoredToken(name="", scopes=(), created=0, sha256="")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class App:
    """The ASGI application of a server."""

    def __init__(self, server: Server, routes: tuple[Route, ...]) -> None:
        self._server = server
        self._room = trio.CapacityLimiter(AT_ONCE)
        by_path: dict[str, dict[str, Route]] = {}
        for route in routes:
            by_path.setdefault(route.path, {})[route.method] = route
        paths = [Path(path, _Resource(self, methods)) for path, methods in by_path.items()]
        self._router = Router(paths, default=self._no_route, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._router(scope, receive, send)  # the start of the server; there are no websockets
            return
        try:
            _check_hosts(Request(scope), self._server.hosts)
            await self._router(scope, receive, send)
        except RunnerError as error:
            await problem(error)(scope, receive, send)

    async def _no_route(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _authorize(Request(scope), self._server)
            raise NoRoute(f"there is nothing at `{excerpt(scope['path'])}`", hint=f"{BASE}/openapi.json has all")
        await send({"type": "websocket.close", "code": 1008})

    async def answer(self, methods: dict[str, Route], request: Request) -> Any:
        """Do what a request asks for. Raises ``RunnerError`` for what was not done."""
        route = methods.get("GET" if request.method == "HEAD" else request.method)
        token = _ANYBODY if route is not None and route.open else _authorize(request, self._server)
        if route is None:
            raise NoMethod(f"`{excerpt(request.method)}` is not possible here", allowed=methods)
        if self._server.stopping.is_set() and not route.open:
            raise ServerStopping("the server is stopping", hint="ask again when it has started")
        query = read_query(request.query_params, route.query) if route.query is not None else None
        body = read_body(await _read(request), route.body) if route.body is not None else None
        call = Call(
            server=self._server,
            token=token,
            path=request.path_params,
            query=query,
            body=body,
            headers=request.headers,
        )
        try:
            self._room.acquire_on_behalf_of_nowait(call)
        except trio.WouldBlock:
            raise ServerBusy(f"the server works on {AT_ONCE} requests already", hint="ask again later") from None
        try:
            return _response(route, await route.handle(call))
        finally:
            self._room.release_on_behalf_of(call)


class _Resource:
    """A path, as the router wants it."""

    def __init__(self, app: App, methods: dict[str, Route]) -> None:
        self._app = app
        self._methods = methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._app.answer(self._methods, Request(scope, receive))
        except ClientDisconnect:
            return
        except RunnerError:
            raise
        except Exception as error:  # noqa: BLE001  # the border: what is nobody's fault but ours, one request's only
            known = first_leaf(error)
            if not isinstance(known, RunnerError):
                traceback.print_exception(error, file=sys.stderr)
                known = RunnerError("this is a bug in runner; it is not your fault")
            response = problem(known)
        await response(scope, receive, send)


def _check_hosts(request: Request, hosts: frozenset[str]) -> None:
    """Refuse names that are not the server's, as a page of another site has that a browser was led to."""
    host = request.headers.get("host", "")
    if _name(f"//{host}") not in hosts:
        hint = "name it when you start the server: --host NAME"
        raise BadOrigin(f"`{excerpt(host)}` is not a name of this server", hint=hint)
    origin = request.headers.get("origin")
    if origin is not None and _name(origin) not in hosts:
        raise BadOrigin(f"requests of pages from `{excerpt(origin)}` are not answered")


def _name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _authorize(request: Request, server: Server) -> StoredToken:
    kind, _, text = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not text:
        raise Unauthorized("there is no token", hint="send `Authorization: Bearer TOKEN`")
    return find_token(server.env.settings, text)


async def _read(request: Request) -> bytes:
    """Read a body that is JSON, within its limits of size and time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise NotJson(f"`{excerpt(kind)}` is not taken", hint="send `Content-Type: application/json`")
    body = bytearray()
    try:
        with trio.fail_after(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY:
                    raise BodyTooLarge(f"the body is larger than {MAX_BODY >> 20} MiB")
    except trio.TooSlowError as error:
        raise BodyTooSlow(f"the body did not arrive within {BODY_SECONDS:g} s") from error
    return bytes(body)


def _response(route: Route, answer: Any) -> Any:
    if callable(answer):
        return answer
    reply = answer if isinstance(answer, Reply) else Reply(value=answer, status=route.status)
    headers = {**_HEADERS, **reply.headers}
    if route.answer is None:
        return Response(status_code=204, headers=headers)
    content = reply.value if isinstance(reply.value, str) else encode(reply.value)
    return Response(content, reply.status, headers, route.media)


def problem(error: RunnerError) -> Response:
    """Return the answer that tells an error, as RFC 9457 has it."""
    findings = error.findings if isinstance(error, Rejected) else ()
    value: dict[str, object] = {
        "type": "about:blank",
        "status": error.http_status,
        "code": error.code,
        "detail": error.message,
        "hint": error.hint,
    }
    if findings:
        value["errors"] = [{"code": one.code, "detail": one.message, "hint": one.hint} for one in findings]
    headers = dict(_HEADERS)
    if isinstance(error, NoMethod):
        headers["allow"] = error.allowed
    if error.http_status == Unauthorized.http_status:
        headers["www-authenticate"] = "Bearer"
    if error.http_status in (ServerBusy.http_status, ServerStopping.http_status):
        headers["retry-after"] = "5"
    if isinstance(error, BodyTooLarge | BodyTooSlow):
        headers["connection"] = "close"
    return Response(encode(value), error.http_status, headers, "application/problem+json")
