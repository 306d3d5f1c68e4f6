"""Post one message to a host, whose addresses are judged as those of a plan's hosts. No redirect is followed."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

import h11

from runner.core.hosts import NetworkRule, NetworkSpec, canonical_host, host_port
from runner.core.model import NetworkRefusal
from runner.network.exchange import ENDED, Limits, Refused, Traffic, Wire
from runner.network.way import Way, resolve

_PORTS = {"http": 80, "https": 443}
_LIMITS = Limits(connections=1, session_bytes=1 << 20, idle_seconds=15.0, total_seconds=20.0)


async def post(url: str, headers: Mapping[str, str], body: bytes, *, private: bool, reach: Mapping[str, str]) -> int:
    """Post JSON and return the status of the answer, which is not read. Raises ``Refused``."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    name, port = canonical_host(f"[{host}]" if ":" in host else host), parts.port or _PORTS[parts.scheme]
    assert name is not None  # judged with the manifest
    way = Way(NetworkSpec((NetworkRule(name, port, private),)), reach, resolve)
    named = host_port(name, None if port == _PORTS[parts.scheme] else port)
    sent = {"host": named, "content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    request = h11.Request(method="POST", target=target, headers=[*(sent | dict(headers)).items()])
    traffic = Traffic(_LIMITS, [_LIMITS.session_bytes])
    with traffic.scope:
        try:
            if parts.scheme == "https":
                server = await way.dial_tls(name, port, traffic)
            else:
                server, request = await way.dial_http(name, port, request, traffic)
            async with server:
                wire = Wire(server, traffic, host=True)
                await wire.send(request, h11.Data(data=body), h11.EndOfMessage())
                while isinstance(answer := await wire.next_event(), h11.InformationalResponse):
                    pass
                if isinstance(answer, h11.Response):
                    return answer.status_code
        except (*ENDED, h11.ProtocolError):
            pass
        raise Refused(NetworkRefusal.UNREACHABLE, f"`{named}` hung up")
    raise Refused(NetworkRefusal.UNREACHABLE, f"`{named}` does not answer")
