"""A server from its listener to its end: it drains at the first signal, and is cut off at the second."""

from __future__ import annotations

import os
import socket
import ssl
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

import trio
from hypercorn.config import Config
from msgspec import Struct
from starlette.routing import Route as StarlettePath

from runner.core.errors import ExposedListener, FewConnections, HostRefused, UsageError
from runner.core.nurseries import open_services
from runner.core.sanitize import excerpt
from runner.core.settings import Settings
from runner.ops.host.state import make_home
from runner.ops.planning.job_fitness import check_server
from runner.ops.runs.dependencies import Advise
from runner.ops.webhooks import read_hooks
from runner.server.border import App
from runner.server.connections import MOST, UNREAD_SECONDS, most_connections, serve_connections
from runner.server.mcp.endpoint import mcp_paths
from runner.server.oidc import Issuer, OidcOptions
from runner.server.openapi import document
from runner.server.page.app import pages
from runner.server.page.oidc_login import LoginOptions, OidcLogin
from runner.server.page.views import VIEWS
from runner.server.route import BASE, Call, Route
from runner.server.routes import (
    agent_types,
    health,
    mcp_servers,
    plans,
    pools,
    projects,
    providers,
    runs,
    sessions,
    tools,
    webhooks,
    workspaces,
)
from runner.server.state import open_server

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
RATE = 200.0  # requests of a token a second
DRAIN = 30.0  # seconds that requests get at the end
SYSTEMD = "systemd"
_FIRST_INHERITED = 3  # the number of its first socket
SOCKET = "server.sock"  # in the home
_UNIX = "unix:"
_LONGEST = 107  # bytes of a socket's path


class ServerOptions(Struct, frozen=True, kw_only=True):
    """Options of a server. ``listen`` is ``unix:PATH``, ``ADDRESS:PORT`` or ``systemd``.

    ``hosts`` are further names that it has, ``manifests`` is the file or folder of the runs that clients may start,
    ``mcp_servers`` that of the servers to host, and ``agent_types`` the folder of the agent types that are not in the
    store. With ``jobs`` runs are Jobs of the cluster that workspaces are made in.
    """

    listen: str
    hosts: tuple[str, ...] = ()
    certificate: Path | None = None
    key: Path | None = None
    behind_proxy: bool = False
    manifests: Path | None = None
    mcp_servers: Path | None = None
    agent_types: Path | None = None
    jobs: bool = False
    drain_seconds: float = DRAIN
    oidc: OidcOptions | None = None
    login: LoginOptions | None = None
    rate: float = RATE


async def serve(
    settings: Settings,
    options: ServerOptions,
    *,
    ready: Callable[[str], None],
    advise: Advise,
    stopping: trio.Event,
) -> None:
    """Answer requests until ``stopping`` is set, and then those that have begun. ``ready`` gets the server's URL.

    Raises ``ExposedListener``, ``UsageError`` and ``HostRefused`` before it listens, and ``Rejected`` for
    manifests with errors, with a webhook whose secret is missing, and for Jobs that nobody could follow.
    """
    make_home(settings)
    hooks = await read_hooks(options.manifests, settings) if options.manifests is not None else {}
    if options.jobs:
        check_server(settings)
    listener, url = open_listener(options, settings.variables)
    with listener:
        config = Config()
        config.certfile, config.keyfile = (str(path) if path else None for path in (options.certificate, options.key))
        config.alpn_protocols = ["http/1.1"]
        config.accesslog = config.errorlog = None
        config.include_server_header = False
        config.graceful_timeout = options.drain_seconds
        hosts = (LOOPBACK | {options.listen.rpartition(":")[0].strip("[]")} | {*options.hosts}) - {""}
        opening = open_server(
            settings,
            advise,
            manifests=options.manifests,
            hooks=hooks,
            hosts=hosts,
            issuer=None if options.oidc is None else Issuer(options.oidc),
            login=None if options.login is None else OidcLogin(options.login),
            stopping=stopping,
            hosting=True,
            mcp_servers=options.mcp_servers,
            agent_types=options.agent_types,
            jobs=options.jobs,
        )
        async with opening as server, open_services() as services:
            secure = options.certificate is not None or options.behind_proxy

            def paths(app: App) -> list[StarlettePath]:
                return [*pages(app, views=VIEWS, secure=secure), *mcp_paths(app, services, secure=secure)]

            app: Any = App(server, routes(), paths, rate=options.rate)
            async with trio.open_nursery() as nursery:
                await nursery.start(partial(serve_connections, app, config, listener, stopping=stopping))
                _tell_of_few(advise)
                ready(url)
                _notify(settings.variables, "READY=1")
                await stopping.wait()
                _notify(settings.variables, "STOPPING=1")
    if options.listen.startswith(_UNIX):
        os.unlink(url.removeprefix(_UNIX))


def routes() -> tuple[Route, ...]:
    """Return every route of a server."""
    rooms = (health, workspaces, sessions, pools, tools, runs, plans, projects, webhooks, agent_types, providers)
    found = tuple(route for room in (*rooms, mcp_servers) for route in room.ROUTES)

    async def _document(call: Call) -> dict[str, Any]:
        return described

    path = f"{BASE}/openapi.json"
    own = Route(method="GET", path=path, summary="Describe these routes", handle=_document, answer=dict[str, Any])
    described = document((*found, own))
    return (*found, own)


def _tell_of_few(advise: Advise) -> None:
    most, files = most_connections()
    if most < MOST:
        message = f"the server answers at most {most} connections at once: it may open {files} files"
        hint = f"allow {2 * MOST}: `LimitNOFILE=` of its unit, or `ulimit -Hn`"
        advise(FewConnections(message, hint=hint))


def _notify(variables: Mapping[str, str], state: str) -> None:
    """Tell systemd how the server is, if it has asked for that."""
    if place := variables.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel, suppress(OSError):
            channel.sendto(state.encode(), f"\0{place[1:]}" if place.startswith("@") else place)


def open_listener(options: ServerOptions, variables: Mapping[str, str]) -> tuple[socket.socket, str]:
    """Open the socket of a server, which nobody but its user can reach unless it is protected. Returns its URL too.

    Raises ``ExposedListener``, ``UsageError`` and ``HostRefused``.
    """
    if (options.certificate is None) != (options.key is None):
        raise UsageError("TLS takes a certificate and a key", hint="--certificate FILE --key FILE")
    if options.certificate is not None and options.key is not None:
        _check_certificate(options.certificate, options.key)
    try:
        if options.listen == SYSTEMD:
            return _inherited(options, variables)
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


def _inherited(options: ServerOptions, variables: Mapping[str, str]) -> tuple[socket.socket, str]:
    """Return the socket that systemd has opened."""
    if (variables.get("LISTEN_PID"), variables.get("LISTEN_FDS")) != (str(os.getpid()), "1"):
        hint = "start it by a .socket unit with one ListenStream="
        raise UsageError("systemd has given this process no socket, or several", hint=hint)
    listener = socket.socket(fileno=_FIRST_INHERITED)
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return listener, f"{_UNIX}{name}"
    _refuse_exposed(options, ip_address(name[0]))
    return listener, _url(options, listener)


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
    _refuse_exposed(options, address)
    listener = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    unacknowledged = int(UNREAD_SECONDS * 1000)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unacknowledged)  # connections inherit it
    listener.bind((str(address), number))
    return listener, _url(options, listener)


def _refuse_exposed(options: ServerOptions, address: IPv4Address | IPv6Address) -> None:
    if not address.is_loopback and options.certificate is None and not options.behind_proxy:
        raise ExposedListener(
            f"`{excerpt(options.listen)}` can be reached from other machines, and tokens would be sent in clear text",
            hint="--certificate FILE --key FILE; or --behind-proxy, if a proxy before it ends TLS",
        )


def _url(options: ServerOptions, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "http" if options.certificate is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
