"""The way from a step's commands to the hosts that its plan allows; each connection becomes an event."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import trio
from msgspec.structs import asdict

from runner.core.errors import ProviderFailed
from runner.core.hosts import NetworkSpec
from runner.core.injection import Injection
from runner.events import events as ev
from runner.ports.network import Credential, EgressConnection, EgressSession, Trust
from runner.ports.provider import Workspace
from runner.runtime.context import RunContext
from runner.runtime.exec import emit_all

_NO_PROXY = "localhost,127.0.0.1,::1"
_BUNDLE = "/dev/shm/network/certificates.pem"  # in memory on every provider that has a guest
_STORE = "/dev/shm/network/certificates.p12"
_APT = "/dev/shm/network/apt.conf"  # apt reads no variable for certificates
SSH_PORT = 22
# Leads standard input and output through the proxy at port $1 to the host $2 and its port $3. bash and cat are where
# ssh is; programs that speak SOCKS5 or CONNECT are not.
_CONNECT = r"""exec 3<>"/dev/tcp/127.0.0.1/$1" && printf 'CONNECT %s:%s HTTP/1.0\r\n\r\n' "$2" "$3" >&3
IFS= read -r answer <&3
while IFS= read -r line <&3 && [ "${#line}" -gt 1 ]; do :; done
case $answer in *" 200 "*) ;; *) cat <&3 >&2; exit 1 ;; esac
cat <&3 & trap "kill $! 2>/dev/null" EXIT; trap exit HUP TERM
cat >&3"""
# What a workspace trusts has its place from each distribution's own package.
_WRITE = 'set -e; mkdir -p "${1%/*}"; rm -f "$1"; cat > "$1"'
_ADD_OWN = """
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
            async with open_way(run.deps.open_egress(allowed, tell, credentials), workspace, allowed) as variables:
                yield variables


@asynccontextmanager
async def open_way(
    egress: AbstractAsyncContextManager[EgressSession], workspace: Workspace, allowed: NetworkSpec
) -> AsyncIterator[Mapping[str, str]]:
    """Lead commands through a session to the allowed hosts for the length of the block; yield the variables for it."""
    async with egress as session, workspace.listen(session.serve) as port:
        yield await network_variables(workspace, session, port, allowed)


async def network_variables(
    workspace: Workspace, session: EgressSession, port: int, allowed: NetworkSpec
) -> dict[str, str]:
    """Return the variables that lead programs to the allowed hosts, through a session at a port of the workspace."""
    trusted, java = await _write_trust(workspace, session.trust)
    ssh = any(rule.port == SSH_PORT for rule in allowed.rules)
    return {**allowed.environment, **proxy_variables(port, ssh=ssh, java=java), **trusted}


def _injected(run: RunContext, step: str) -> tuple[Injection, ...]:
    return next((one.injected for one in run.plan.steps if one.id == step), ())


def proxy_variables(port: int, *, ssh: bool = False, java: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables by which programs find a proxy, in both spellings, since some know only one.

    ``NODE_USE_ENV_PROXY`` makes Node read them, from version 22.21 on; Java has options only, to which ``java`` adds.
    With ``ssh`` git's ssh is led through the proxy, by bash.
    """
    url = f"http://127.0.0.1:{port}"
    named = {"HTTP_PROXY": url, "HTTPS_PROXY": url, "ALL_PROXY": url, "NO_PROXY": _NO_PROXY}
    options = [f"-D{kind}.proxyHost=127.0.0.1 -D{kind}.proxyPort={port}" for kind in ("http", "https")]
    through = f"ssh -o ProxyCommand='bash -c \"$RUNNER_SSH_CONNECT\" - {port} %h %p'"
    return {
        **named,
        **{name.lower(): value for name, value in named.items()},
        "NODE_USE_ENV_PROXY": "1",
        "JAVA_TOOL_OPTIONS": " ".join((*options, *java)),
        **({"GIT_SSH_COMMAND": through, "RUNNER_SSH_CONNECT": _CONNECT} if ssh else {}),
    }


async def _write_trust(workspace: Workspace, trust: Trust | None) -> tuple[dict[str, str], list[str]]:
    """Write certificates inside, with those that the workspace has; return the variables and Java's options that lead
    there.
    """
    if trust is None:
        return {}, []
    apt = f'Acquire::https::CAInfo "{_BUNDLE}";\n'.encode()
    files = ((_BUNDLE, trust.certificates, _WRITE + _ADD_OWN), (_STORE, trust.java, _WRITE), (_APT, apt, _WRITE))
    for path, content, script in files:
        done = await workspace.run(["sh", "-c", script, "sh", path], stdin=content)
        if not done.exit.ok:
            raise ProviderFailed(f"certificates cannot be written inside: sh {done.exit}")
    variables, java = trust_variables(_BUNDLE, _STORE)
    return {**variables, "APT_CONFIG": _APT}, java


def trust_variables(bundle: str, store: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables and Java's options that lead to files of certificates."""
    java = ("trustStore=" + store, "trustStoreType=PKCS12", "trustStorePassword=changeit")
    return dict.fromkeys(_BUNDLE_VARIABLES, bundle), [f"-Djavax.net.ssl.{option}" for option in java]
