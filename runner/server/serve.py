"""A server from its listener to its end: it drains at the first signal, and is cut off at the second."""

from __future__ import annotations

import os
import socket
import ssl
import stat
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import trio
from hypercorn.config import Config
from hypercorn.trio import serve as serve_asgi
from msgspec import Struct

from runner.core.errors import ExposedListener, HostRefused, RunnerError, UsageError
from runner.core.nurseries import open_services
from runner.core.sanitize import excerpt
from runner.core.settings import Settings
from runner.ops.host.state import make_home
from runner.ops.runs.dependencies import Advise
from runner.ops.workspaces.maintenance import reap_and_tell
from runner.ops.workspaces.tools import KeptWorkspaces
from runner.ops.workspaces.workspace_lease import WorkspaceEnv, open_workspace_env
from runner.server.border import App
from runner.server.openapi import document
from runner.server.provider_health import ProviderHealth
from runner.server.route import BASE, Call, Route, Server
from runner.server.routes import agent_types, health, providers, runs, tools, workspaces
from runner.server.running import Running

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
REAP_SECONDS = 60.0  # between looks for expired workspaces
DRAIN = 30.0  # seconds that requests get at the end
BACKLOG = 1024  # connections that wait to be accepted
SOCKET = "server.sock"  # in the home
_UNIX = "unix:"
_LONGEST = 107  # bytes of a socket's path


class ServerOptions(Struct, frozen=True, kw_only=True):
    """Options of a server. ``listen`` is ``unix:PATH`` or ``ADDRESS:PORT``; ``hosts`` are further names that it has.

    ``manifests`` is the file or folder of the runs that clients may start.
    """

    listen: str
    hosts: tuple[str, ...] = ()
    certificate: Path | None = None
    key: Path | None = None
    behind_proxy: bool = False
    manifests: Path | None = None
    drain_seconds: float = DRAIN


async def serve(
    settings: Settings,
    options: ServerOptions,
    *,
    ready: Callable[[str], None],
    advise: Advise,
    stopping: trio.Event,
) -> None:
    """Answer requests until ``stopping`` is set, and then those that have begun. ``ready`` gets the server's URL.

    Raises ``ExposedListener``, ``UsageError`` and ``HostRefused`` before it listens.
    """
    make_home(settings)
    listener, url = open_listener(options)
    with listener:
        config = Config()
        config.bind = [f"fd://{listener.detach()}"]
        config.certfile, config.keyfile = (str(path) if path else None for path in (options.certificate, options.key))
        config.alpn_protocols = ["http/1.1"]
        config.accesslog = config.errorlog = None
        config.include_server_header = False
        config.backlog = BACKLOG
        config.graceful_timeout = options.drain_seconds
        async with open_workspace_env(settings, advise) as env:
            hosts = LOOPBACK | {options.listen.rpartition(":")[0].strip("[]")} | {*options.hosts}
            async with open_services() as services:
                services.start_soon(_maintain, env)
                server = Server(
                    env=env,
                    kept=KeptWorkspaces(env, services),
                    running=Running(env, services),
                    health=ProviderHealth(settings),
                    manifests=options.manifests,
                    hosts=hosts,
                    stopping=stopping,
                )
                app: Any = App(server, routes())
                async with trio.open_nursery() as nursery:
                    await nursery.start(partial(serve_asgi, app, config, shutdown_trigger=stopping.wait, mode="asgi"))
                    ready(url)
    if url.startswith(_UNIX):
        os.unlink(url.removeprefix(_UNIX))


async def _maintain(env: WorkspaceEnv) -> None:
    """Remove expired workspaces for as long as the server runs."""
    while True:
        try:
            await reap_and_tell(env)
        except RunnerError as error:  # the next look may succeed
            env.advise(error)
        await trio.sleep(REAP_SECONDS)


def routes() -> tuple[Route, ...]:
    """Return every route of a server."""
    found = (*health.ROUTES, *workspaces.ROUTES, *tools.ROUTES, *runs.ROUTES, *agent_types.ROUTES, *providers.ROUTES)

    async def _document(call: Call) -> dict[str, Any]:
        return described

    path = f"{BASE}/openapi.json"
    own = Route(method="GET", path=path, summary="Describe these routes", handle=_document, answer=dict[str, Any])
    described = document((*found, own))
    return (*found, own)


def open_listener(options: ServerOptions) -> tuple[socket.socket, str]:
    """Open the socket of a server, which nobody but its user can reach unless it is protected. Returns its URL too.

    Raises ``ExposedListener``, ``UsageError`` and ``HostRefused``.
    """
    if (options.certificate is None) != (options.key is None):
        raise UsageError("TLS takes a certificate and a key", hint="--certificate FILE --key FILE")
    if options.certificate is not None and options.key is not None:
        _check_certificate(options.certificate, options.key)
    try:
        if options.listen.startswith(_UNIX):
            return _unix(options.listen.removeprefix(_UNIX)), options.listen
        return _tcp(options)
    except OSError as error:
        raise HostRefused(f"`{excerpt(options.listen)}` cannot be listened on: {error.strerror}") from error


def _check_certificate(certificate: Path, key: Path) -> None:
    """Raise ``UsageError`` for files that TLS cannot be served with; nobody is asked for a password."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        names = f"`{excerpt(str(certificate))}` and `{excerpt(str(key))}`"
        hint = "name a certificate and its key without a password, both in PEM"
        raise UsageError(f"{names} cannot be used for TLS", hint=hint) from error


def _unix(path: str) -> socket.socket:
    if len(os.fsencode(path)) > _LONGEST:
        raise UsageError(f"the path of a socket is longer than {_LONGEST} bytes", hint="--listen unix:/run/runner.sock")
    listener = socket.socket(socket.AF_UNIX)
    if os.path.exists(path):
        if not stat.S_ISSOCK(os.stat(path).st_mode) or listener.connect_ex(path) == 0:
            listener.close()
            raise UsageError(f"`{excerpt(path)}` is in use", hint="end the server that listens there")
        os.unlink(path)
        listener.close()
        listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(before)
    return listener


def _tcp(options: ServerOptions) -> tuple[socket.socket, str]:
    host, _, port = options.listen.rpartition(":")
    try:
        address = ip_address(host.strip("[]"))
        number = int(port)
    except ValueError as error:
        hint = "--listen 127.0.0.1:8700, or unix:PATH"
        raise UsageError(f"`{excerpt(options.listen)}` is not an address with a port", hint=hint) from error
    if not address.is_loopback and options.certificate is None and not options.behind_proxy:
        raise ExposedListener(
            f"`{excerpt(options.listen)}` can be reached from other machines, and tokens would be sent in clear text",
            hint="--certificate FILE --key FILE; or --behind-proxy, if a proxy before it ends TLS",
        )
    listener = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((str(address), number))
    scheme = "http" if options.certificate is None else "https"
    shown = f"[{address}]" if address.version == 6 else str(address)
    return listener, f"{scheme}://{shown}:{listener.getsockname()[1]}"
