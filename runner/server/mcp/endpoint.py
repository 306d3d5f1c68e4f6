"""MCP over HTTP, at ``/mcp``: a request has passed the border, as every other one, before the SDK gets it.

The SDK takes a second to import, so it is loaded for the first request that has a token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import trio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as StarlettePath

from runner.core.errors import RunnerError, ServerMissing, Unauthorized
from runner.core.nurseries import open_services
from runner.ops.host.tokens import SCOPES, StoredToken
from runner.server.border import App, Receive, Scope, Send, authorize, known_error, problem, read_limited

PATH = "/mcp"
_METADATA = "/.well-known/oauth-protected-resource"
_SDK = "runner.server.mcp.http"
Handle = Callable[[StoredToken, Scope, Receive, Send], Awaitable[None]]


def mcp_paths(app: App, services: trio.Nursery, *, secure: bool) -> list[StarlettePath]:
    """Return the paths of MCP; its sessions end with ``services``."""
    endpoint = _Endpoint(app, services, secure=secure)
    documents = [StarlettePath(f"{_METADATA}{end}", endpoint.describe) for end in ("", PATH)]
    return [StarlettePath(PATH, endpoint), *documents]


class _Endpoint:
    def __init__(self, app: App, services: trio.Nursery, *, secure: bool) -> None:
        self._app, self._services, self._secure = app, services, secure
        self._turn = trio.Lock()
        self._handle: Handle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            await self._pass_on(request, send)
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001  # the border: what is nobody's fault but ours, one request's only
            await self._refusal(request, known_error(error))(scope, receive, send)

    async def _pass_on(self, request: Request, send: Send) -> None:
        token = await authorize(request, self._app.server)
        self._app.admit(token)
        body = await read_limited(request) if request.method == "POST" else None
        handle = await self._open()
        if body is not None:
            await handle(token, request.scope, _again(body, request.receive), send)
            return
        async with open_services() as services:  # a stream that nothing may come on for hours

            async def stop() -> None:
                await self._app.server.stopping.wait()
                services.cancel_scope.cancel()

            services.start_soon(stop)
            await handle(token, request.scope, request.receive, send)

    async def _open(self) -> Handle:
        async with self._turn:
            if self._handle is None:
                if find_spec("mcp") is None:
                    raise ServerMissing("MCP is not installed", hint="pip install 'plan-runner[mcp]'")
                sdk = await trio.to_thread.run_sync(import_module, _SDK)
                self._handle = await self._services.start(sdk.run, self._app.server)
        return self._handle

    async def describe(self, request: Request) -> Response:
        """Return what RFC 9728 has clients look for: which tokens are taken, and who issues them."""
        issuer = self._app.server.issuer
        found: dict[str, Any] = {
            "resource": f"{self._base(request)}{PATH}",
            "resource_name": "runner",
            "bearer_methods_supported": ["header"],
            "scopes_supported": SCOPES,
        }
        if issuer is not None:
            found["authorization_servers"] = [issuer.url]
        return JSONResponse(found, headers={"cache-control": "no-store"})

    def _refusal(self, request: Request, error: RunnerError) -> Response:
        response = problem(error)
        if isinstance(error, Unauthorized):
            where = f"{self._base(request)}{_METADATA}{PATH}"
            response.headers["www-authenticate"] = f'Bearer resource_metadata="{where}"'
        return response

    def _base(self, request: Request) -> str:
        """Return the URL of this server by the name that the client has for it, which the border has checked."""
        parts = urlsplit(f"//{request.headers['host']}")
        host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname
        return f"http{'s' * self._secure}://{host}{f':{parts.port}' if parts.port else ''}"


def _again(body: bytes, receive: Receive) -> Receive:
    """Return what receives a body that was read already, and then what comes after it."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def get() -> MutableMapping[str, Any]:
        return messages.pop() if messages else await receive()

    return get
