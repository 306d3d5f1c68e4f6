"""The way from a step's commands to the hosts that its plan allows; each connection becomes an event."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import trio
from msgspec.structs import asdict

from runner.core.errors import ProviderFailed
from runner.core.hosts import NetworkSpec
from runner.core.injection import Injection
from runner.events import events as ev
from runner.ports.network import Credential, EgressConnection
from runner.ports.provider import Workspace
from runner.runtime.context import RunContext
from runner.runtime.exec import emit_all

_NO_PROXY = "localhost,127.0.0.1,::1"
_BUNDLE = "/dev/shm/network/certificates.pem"  # in memory on every provider that has a guest
# What a workspace trusts has its place from each distribution's own package.
_WRITE = """set -e; mkdir -p "${1%/*}"; rm -f "$1"; cat > "$1"
for known in /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/cert.pem; do
    if [ -r "$known" ]; then cat "$known" >> "$1"; break; fi
done"""
# Each takes the place of what the program trusts, but for Node's, which adds to it.
_BUNDLE_VARIABLES = (
    "SSL_CERT_FILE",
    "CURL_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE",
    "PIP_CERT",
    "GIT_SSL_CAINFO",
    "CARGO_HTTP_CAINFO",
    "AWS_CA_BUNDLE",
    "DENO_CERT",
    "npm_config_cafile",
    "NODE_EXTRA_CA_CERTS",
)


@asynccontextmanager
async def open_network(
    run: RunContext, workspace: Workspace, step: str, allowed: NetworkSpec
) -> AsyncIterator[Mapping[str, str]]:
    """Let commands reach the allowed hosts for the length of the block; yield the variables that lead there."""
    if not allowed:
        yield {}
        return
    send, receive = trio.open_memory_channel[ev.Event](math.inf)

    def tell(one: EgressConnection) -> None:
        send.send_nowait(ev.ConnectionEnded(step=step, **asdict(one)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(emit_all, receive, run.emit)
        with send:
            credentials = [Credential(one, run.secrets[one.secret]) for one in _injected(run, step)]
            egress = run.deps.open_egress(allowed, tell, credentials)
            async with egress as session, workspace.listen(session.serve) as port:
                yield {**allowed.environment, **proxy_variables(port), **await _trust(workspace, session.trust)}


def _injected(run: RunContext, step: str) -> tuple[Injection, ...]:
    return next((one.injected for one in run.plan.steps if one.id == step), ())


def proxy_variables(port: int) -> dict[str, str]:
    """Return the variables by which programs find a proxy, in both spellings, since some know only one.

    ``NODE_USE_ENV_PROXY`` makes Node read them, from version 22.21 on; Java has options only. git's ssh is led through
    the proxy by bash, which is where git and ssh are.
    """
    url = f"http://127.0.0.1:{port}"
    named = {"HTTP_PROXY": url, "HTTPS_PROXY": url, "ALL_PROXY": url, "NO_PROXY": _NO_PROXY}
    java = " ".join(f"-D{kind}.proxyHost=127.0.0.1 -D{kind}.proxyPort={port}" for kind in ("http", "https"))
    return {
        **named,
        **{name.lower(): value for name, value in named.items()},
        "NODE_USE_ENV_PROXY": "1",
        "JAVA_TOOL_OPTIONS": java,
    }


async def _trust(workspace: Workspace, certificates: bytes) -> dict[str, str]:
    """Write certificates inside, with those that the workspace has, and return the variables that lead there."""
    if not certificates:
        return {}
    done = await workspace.run(["sh", "-c", _WRITE, "sh", _BUNDLE], stdin=certificates)
    if not done.exit.ok:
        raise ProviderFailed(f"certificates cannot be written inside: sh {done.exit}")
    return dict.fromkeys(_BUNDLE_VARIABLES, _BUNDLE)
