"""The border: what every request passes before anything is done for it, and how errors become answers.

Host and Origin come first, then the token, then the size and form of the body; all of it before any work.
"""

from __future__ import annotations

import math
import re
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any, TypeVar

import trio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as Path
from starlette.routing import Router

from runner.client.values import Advice
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
    TooManyRequests,
    TwoLengths,
    Unauthorized,
    first_leaf,
)
from runner.core.sanitize import excerpt
from runner.ops.host.tokens import StoredToken, find_token
from runner.report.format import size
from runner.server.route import BASE, Call, Reply, Route, Server, read_body, read_query

MAX_BODY = 16 << 20  # bytes
BODY_SECONDS = 30.0
AT_ONCE = 200  # requests that are worked on
MOST_UNPROVED = 50  # bodies of requests without a token that are read
EVEN = 0.01  # seconds; whole ones pass before a refusal that says something is not known
BURST = 5.0  # seconds whose requests may come at once
_TOKENS = 10_000  # whose requests are counted before those that rest are forgotten
_OF_A_BODY = frozenset({b"content-length", b"transfer-encoding"})
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(?::\d*)?", re.ASCII)
_ORIGIN = re.compile(rf"https?://{_HOST.pattern}", re.ASCII)
_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
_ANYBODY = StoredToken(name="", scopes=(), created=0, sha256="")

T = TypeVar("T")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Pages = Callable[["App"], Sequence[Path]]


class App:
    """The ASGI application of a server."""

    def __init__(self, server: Server, routes: tuple[Route, ...], pages: Pages, *, rate: float) -> None:
        self.server = server
        self.routes = {(route.method, route.path): route for route in routes}
        self._rate = _Rate(rate)
        self._at_work = 0  # requests
        self._anybody = trio.CapacityLimiter(MOST_UNPROVED)
        by_path: dict[str, dict[str, Route]] = {}
        for route in routes:
            by_path.setdefault(route.path, {})[route.method] = route
        paths = [Path(path, _Resource(self, methods)) for path, methods in by_path.items()]
        paths += pages(self)
        self._names: dict[object, str] = {path.endpoint: path.path for path in paths}
        self._router = _Router(paths, default=self._no_route, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._router(scope, receive, send)  # there are no websockets
            return
        began = trio.current_time()

        async def count(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                route, seconds = self._names.get(scope.get("endpoint"), "none"), trio.current_time() - began
                self.server.metrics.answered(scope["method"], route, message["status"], seconds)
            await send(message)

        try:
            _check_head(scope["headers"], self.server.hosts)
            await self._router(scope, receive, count)
        except RunnerError as error:
            await problem(error)(scope, receive, count)

    async def _no_route(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await authorize(Request(scope), self.server)
            raise NoRoute(f"there is nothing at `{excerpt(scope['path'])}`", hint=f"{BASE}/openapi.json has all")
        await send({"type": "websocket.close", "code": 1008})

    async def answer(self, methods: dict[str, Route], request: Request) -> Any:
        """Do what a request asks for. Raises ``RunnerError`` for what was not done."""
        route = methods.get("GET" if request.method == "HEAD" else request.method)
        token = _ANYBODY if route is not None and route.open else await authorize(request, self.server)
        if route is None:
            raise NoMethod(f"`{excerpt(request.method)}` is not possible here", allowed=methods)
        query = read_query(request.query_params, route.query) if route.query is not None else None
        if route.headers is not None:
            read_query(request.headers, route.headers, "headers do")
        body: Any = None
        if route.raw_bytes:
            body = await self._read_raw(route, request)
        elif route.body is not None:
            body = read_body(await read_limited(request), route.body)
        elif any(name in _OF_A_BODY for name, _ in request.scope["headers"]):  # unread, it would cut the client off
            await read_limited(request, None)
        call = Call(
            server=self.server,
            token=token,
            path=request.path_params,
            query=query,
            body=body,
            headers=request.headers,
        )
        return _response(route, await self.do(route, call))

    async def _read_raw(self, route: Route, request: Request) -> bytes:
        """Read a body as it is. Those of anybody are in memory before they are judged, so not many at once."""
        if not route.open:
            return await read_limited(request, most=route.raw_bytes)
        try:
            self._anybody.acquire_on_behalf_of_nowait(request)
        except trio.WouldBlock:
            message = f"the server reads {MOST_UNPROVED} messages already that nobody has proved"
            raise ServerBusy(message, hint="send it again later") from None
        try:
            return await read_limited(request, most=route.raw_bytes)
        finally:
            self._anybody.release_on_behalf_of(request)

    def admit(self, token: StoredToken) -> None:
        """Count a request of a token. Raises ``ServerStopping`` and ``TooManyRequests``."""
        if self.server.stopping.is_set():
            raise ServerStopping("the server is stopping", hint="ask again when it has started")
        self._rate.take(token.name)

    async def do(self, route: Route, call: Call) -> Any:
        """Do what a route does, while there is room for it. Raises ``ServerBusy`` and ``ServerStopping``."""
        if not route.open:
            self.admit(call.token)
        if self._at_work >= AT_ONCE:
            raise ServerBusy(f"the server works on {AT_ONCE} requests already", hint="ask again later")
        self._at_work += 1
        try:
            return await evenly(route.handle(call))
        finally:
            self._at_work -= 1


class _Router(Router):
    """Finds the path of a request by one pattern, where Starlette tries some fifty."""

    def __init__(self, paths: Sequence[Path], **more: Any) -> None:
        super().__init__(paths, **more)
        self._paths = paths
        patterns = (re.sub(r"\?P<\w+>", "?:", path.path_regex.pattern) for path in paths)
        self._any = re.compile("|".join(f"({pattern})" for pattern in patterns))

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._any.match(scope["path"]) if scope["type"] == "http" else None
        if found is None or found.lastindex is None:
            await self.default(scope, receive, send)
            return
        path = self._paths[found.lastindex - 1]
        scope.update(path.matches(scope)[1])
        await path.handle(scope, receive, send)


class _Rate:
    """Requests of each token, so many a second."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._used: dict[str, float] = {}  # the time up to which the requests of a token fill it

    def take(self, name: str) -> None:
        """Count a request. Raises ``TooManyRequests``."""
        now = trio.current_time()
        if len(self._used) > _TOKENS:
            self._used = {one: until for one, until in self._used.items() if until > now - BURST}
        until = max(self._used.get(name, 0.0), now - BURST) + 1 / self._most
        if until > now:
            message = f"token `{name}` has sent more than {self._most:g} requests a second"
            raise TooManyRequests(message, hint="ask again later, or start the server with a higher --rate")
        self._used[name] = until


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
            response = problem(known_error(error))
        await response(scope, receive, send)


def known_error(error: Exception) -> RunnerError:
    """Return what a client is told of an error; one that nobody expected is printed for whoever runs the server."""
    known = first_leaf(error)
    if isinstance(known, RunnerError):
        return known
    traceback.print_exception(error, file=sys.stderr)
    return RunnerError("this is a bug in runner; it is not your fault")


def _check_head(headers: Iterable[tuple[bytes, bytes]], hosts: frozenset[str]) -> None:
    """Refuse names that are not the server's, as a page of another site has that a browser was led to.

    A request with two lengths is refused too: a proxy in front may have seen its end elsewhere.
    """
    host, lengths = "", set()
    origins: list[str] = []
    for name, value in headers:
        if name == b"host":  # more than one is not parsed
            host = value.decode("latin-1")
        elif name == b"origin":
            origins.append(value.decode("latin-1"))
        elif name in _OF_A_BODY:
            lengths.add(name)
    if _name(_HOST, host) not in hosts:
        hint = "name it when you start the server: --host NAME"
        raise BadOrigin(f"`{excerpt(host)}` is not a name of this server", hint=hint)
    for origin in origins:
        if _name(_ORIGIN, origin) not in hosts:
            raise BadOrigin(f"requests of pages from `{excerpt(origin)}` are not answered")
    if len(lengths) > 1:
        raise TwoLengths("the body has a length and an encoding that tells another", hint="send one of them")


def _name(form: re.Pattern[str], text: str) -> str:
    """Return the name in a host or an origin, in small letters; nothing for what is neither."""
    found = form.fullmatch(text)
    return found[1].strip("[]").lower() if found else ""


async def authorize(request: Request, server: Server) -> StoredToken:
    """Return the token of a request. Raises ``Unauthorized``."""
    given = request.headers.getlist("authorization")
    if len(given) > 1:  # a proxy may have judged another one than we would
        raise Unauthorized("there are several tokens", hint="send one `Authorization: Bearer TOKEN`")
    kind, _, text = "".join(given).partition(" ")
    if kind.lower() != "bearer" or not text:
        raise Unauthorized("there is no token", hint="send `Authorization: Bearer TOKEN`")
    if server.issuer is not None and text.count(".") == 2:
        return await evenly(server.issuer.find(text))
    return await stored_token(text, server)


async def stored_token(text: str, server: Server) -> StoredToken:
    """Return the token with this text. Raises ``Unauthorized``."""
    return await evenly(find_token(server.env.store, text))


async def evenly(look: Awaitable[T]) -> T:
    """Refuse on time: how long it took to look tells nothing of what there is, or how near a guess of a token was."""
    began = trio.current_time()
    try:
        return await look
    except RunnerError as error:
        if error.http_status in (Unauthorized.http_status, NoRoute.http_status):
            await trio.sleep_until(began + math.ceil((trio.current_time() - began) / EVEN) * EVEN)
        raise


async def read_limited(request: Request, media: str | None = "application/json", *, most: int = MAX_BODY) -> bytes:
    """Read a body of that media type, ``None`` for any, within its limits of size and time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media is not None and kind != media:
        raise NotJson(f"`{excerpt(kind)}` is not taken", hint=f"send `Content-Type: {media}`")
    body = bytearray()
    try:
        with trio.fail_after(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise BodyTooLarge(f"the body is larger than {size(most)}")
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
    content = reply.value if isinstance(reply.value, str | bytes) else encode(reply.value)
    return Response(content, reply.status, headers, reply.media or route.media)


def advice_of(finding: RunnerError) -> Advice:
    at = None if finding.at is None else str(finding.at)
    return Advice(code=finding.code, detail=finding.message, at=at, hint=finding.hint)


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
        value["errors"] = [advice_of(one) for one in findings]
    headers = dict(_HEADERS)
    if isinstance(error, NoMethod):
        headers["allow"] = error.allowed
    if error.http_status == Unauthorized.http_status:
        headers["www-authenticate"] = "Bearer"
    if error.http_status in (ServerBusy.http_status, ServerStopping.http_status):
        headers["retry-after"] = "5"
    if isinstance(error, BodyTooLarge | BodyTooSlow | TwoLengths):
        headers["connection"] = "close"
    return Response(encode(value), error.http_status, headers, "application/problem+json")
