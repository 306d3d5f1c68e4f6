"""The proxy in front of this host, as the environment of the runner names it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address, ip_network
from typing import Literal
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from runner.core.errors import UsageError
from runner.core.hosts import host_port
from runner.core.settings import is_url

_PORTS = {"http": 80, "https": 443}


class HostProxy(Struct, frozen=True, kw_only=True):
    """A proxy that speaks HTTP, over TLS if ``secure``. ``user`` and ``password`` are for it alone."""

    host: str
    port: int
    secure: bool
    user: str = ""
    password: str = ""

    def __str__(self) -> str:
        return host_port(self.host, self.port)

    def __repr__(self) -> str:
        return f"HostProxy({self})"

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the header that lets us in, if the proxy wants one."""
        if not self.user:
            return []
        return [(b"proxy-authorization", b"Basic " + b64encode(f"{self.user}:{self.password}".encode()))]


def find_proxy(scheme: Literal["http", "https"], place: str, reach: Mapping[str, str]) -> HostProxy | None:
    """Return the proxy for a host, or HOST:PORT, with the network ``reach`` of the settings.

    Raises ``UsageError`` when the one that is named cannot be used.
    """
    variables = (f"{scheme.upper()}_PROXY", f"{scheme}_proxy", "ALL_PROXY", "all_proxy")
    name = next((name for name in variables if reach.get(name)), None)
    if name is None or _bypassed(place, reach.get("NO_PROXY") or reach.get("no_proxy") or ""):
        return None
    text = reach[name] if "://" in reach[name] else f"http://{reach[name]}"
    if not is_url(text, "http", "https"):
        raise UsageError(f"`{name}` is not a proxy that speaks HTTP", hint="write http://HOST:PORT")
    parts = urlsplit(text)
    return HostProxy(
        host=parts.hostname or "",
        port=parts.port or _PORTS[parts.scheme],
        secure=parts.scheme == "https",
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
    )


def check_proxies(reach: Mapping[str, str]) -> None:
    """Raise ``UsageError`` when a proxy that is named cannot be used."""
    find_proxy("http", "", reach)
    find_proxy("https", "", reach)


def _bypassed(place: str, bypassed: str) -> bool:
    from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]  # typeshed lacks it

    if proxy_bypass_environment(place, {"no": bypassed}):
        return True
    return _in_network(urlsplit(f"//{place}").hostname or "", bypassed)


def _in_network(host: str, networks: str) -> bool:
    """Tell whether an address lies in one of the networks of a list like ``localhost,10.0.0.0/8``, as Go reads it."""
    try:
        address = ip_address(host)
    except ValueError:
        return False
    for text in networks.split(","):
        with suppress(ValueError):
            if "/" in text and address in ip_network(text.strip(), strict=False):
                return True
    return False
