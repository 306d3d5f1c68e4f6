"""The egress proxy beside a direct connection to what is behind it: plain, and with TLS ended for a credential.

Run: ``python tests/benchmarks/bench_network.py``. Targets, over TCP: the first byte comes at most 2 ms later; a
download is at least 0.7 as fast, 0.5 where TLS is ended; 200 connections at once in bounded memory. Beside that, nginx
in the place of the proxy, and curl inside a workspace, whose bytes go through its guest as well.
"""

from __future__ import annotations

import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

import trio

from runner.core.hosts import Address, NetworkSpec, parse_rule
from runner.core.injection import Injection
from runner.core.redact import Secret
from runner.network.proxy import open_egress
from runner.ports.network import Credential
from runner.ports.provider import SandboxSpec, WorkspaceRequest
from runner.providers.local import LocalProvider
from tests.benchmarks.bench_gateway import rss
from tests.benchmarks.sizes import amount, rounds
from tests.support.certificates import make_certificate
from tests.support.git_servers import free_port
from tests.support.needs import ADMINISTRATORS_PATH
from tests.support.situations import until

ROUNDS = rounds(200)
CONNECTIONS = amount(200)
MIB = 1 << 20
SIZE = amount(256) * MIB
GET = b"GET /%d HTTP/1.1\r\nHost: a.test:%d\r\nConnection: close\r\n\r\n"


def serve(certificate: str) -> None:
    """Answer each connection with as many bytes as its path says; with TLS on the second port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, Path(certificate).with_suffix(".key"))
    piece = bytes(MIB)

    def answer(end: socket.socket) -> None:
        with end:
            asked = end.recv(4096)
            left = int(asked.split()[1][1:])
            end.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % left)
            while left:
                end.sendall(piece[:left])
                left -= min(left, MIB)

    def greet(end: socket.socket, tls: bool) -> None:
        answer(context.wrap_socket(end, server_side=True) if tls else end)

    def accept(listener: socket.socket, tls: bool) -> None:
        while True:
            end, _ = listener.accept()
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as servers of the web do
            threading.Thread(target=greet, args=(end, tls), daemon=True).start()

    listeners = [socket.create_server(("127.0.0.1", 0), backlog=512) for _ in range(2)]
    print(*(one.getsockname()[1] for one in listeners), flush=True)
    threading.Thread(target=accept, args=(listeners[0], False), daemon=True).start()
    accept(listeners[1], True)


async def loopback(host: str) -> Sequence[Address]:
    return [ip_address("127.0.0.1")]


async def proxy(certificate: str, plain: str, secure: str) -> None:
    """Let commands through to both ports, and on another port of the proxy with a credential to the secure one."""

    rules = NetworkSpec(tuple(parse_rule(f"a.test:{port}", private=True) for port in (plain, secure)))
    injection = Injection(host="a.test", port=int(secure), secret="T", how="bearer")
    ended = [Credential(injection, Secret("T", b"t0ken-of-bench"))]
    reach = {"SSL_CERT_FILE": certificate}
    async with (
        open_egress(rules, lambda one: None, reach=reach, resolve=loopback) as tunnels,
        open_egress(rules, lambda one: None, ended, reach=reach, resolve=loopback) as ends,
        trio.open_nursery() as nursery,
    ):
        ports = []
        for session in (tunnels, ends):
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=512)
            ports.append(listeners[0].socket.getsockname()[1])
            nursery.start_soon(trio.serve_listeners, session.serve, listeners)
        Path(certificate).with_suffix(".trust").write_bytes(ends.trust.certificates)
        print(*ports, flush=True)


@contextmanager
def role(*words: str) -> Iterator[tuple[list[int], int]]:
    """One of the roles above in a process of its own: its ports, and its pid."""
    with subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield [int(word) for word in process.stdout.readline().split()], process.pid
        finally:
            process.kill()


def fetch(port: int, through: int | None, trust: ssl.SSLContext | None, size: int) -> tuple[float, float]:
    """Seconds to the first byte and to the last of a download."""
    start = time.perf_counter()
    with socket.create_connection(("127.0.0.1", through or port)) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as curl and others do
        if through is not None:
            end.sendall(b"CONNECT a.test:%d HTTP/1.1\r\nHost: a\r\n\r\n" % port)
            assert end.recv(4096).startswith(b"HTTP/1.1 200")
        stream = trust.wrap_socket(end, server_hostname="a.test") if trust is not None else end
        stream.sendall(GET % (size, port))
        first, got, buffer = 0.0, 0, memoryview(bytearray(MIB))
        while count := stream.recv_into(buffer):
            first = first or time.perf_counter() - start
            got += count
        assert got >= size, got
    return first, time.perf_counter() - start


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = make_certificate(Path(folder) / "server.pem", "DNS:a.test")
        with (
            role("serve", str(file)) as ((plain, secure), _),
            role("proxy", str(file), str(plain), str(secure)) as ((tunnel, ended), pid),
        ):
            trust = ssl.create_default_context(cafile=file)
            ours = ssl.create_default_context(cafile=file.with_suffix(".trust"))
            measure("plain", (plain, None, None), (plain, tunnel, None))
            measure("TLS through a tunnel", (secure, None, trust), (secure, tunnel, trust))
            measure("TLS ended", (secure, None, trust), (secure, ended, ours))
            with nginx(Path(folder), file, plain, secure) as (peer, peer_secure):
                measure("nginx, plain", (plain, None, None), (peer, None, None))
                measure("nginx, TLS ended", (secure, None, trust), (peer_secure, None, trust))
            trio.run(inside, Path(folder), plain)
            for name, way in (("", (plain, tunnel, None)), (", TLS ended", (secure, ended, ours))):
                before = rss(pid)
                crowd(*way)
                print(f"{CONNECTIONS} connections at once{name}: {rss(pid) - before:.1f} MiB more than {before:.0f}")


NGINX = """daemon off; worker_processes 1; pid {folder}/pid; error_log stderr; events {{}}
http {{
    access_log off; proxy_max_temp_file_size 0; proxy_buffers 16 128k; proxy_buffer_size 128k;
    proxy_busy_buffers_size 256k; {temporary}
    server {{ listen 127.0.0.1:{ours}; location / {{ proxy_pass http://127.0.0.1:{plain}; }} }}
    server {{
        listen 127.0.0.1:{ours_secure} ssl; ssl_certificate {certificate}; ssl_certificate_key {key};
        location / {{
            proxy_pass https://127.0.0.1:{secure}; proxy_ssl_verify on; proxy_ssl_name a.test;
            proxy_ssl_trusted_certificate {certificate};
        }}
    }}
}}
"""


@contextmanager
def nginx(folder: Path, certificate: Path, plain: int, secure: int) -> Iterator[tuple[int, int]]:
    """Serve what is behind both ports through nginx; TLS is ended and begun again."""
    ours, ours_secure = free_port(), free_port()
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    (folder / "nginx.conf").write_text(
        NGINX.format(
            folder=folder,
            temporary=" ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds),
            ours=ours,
            ours_secure=ours_secure,
            plain=plain,
            secure=secure,
            certificate=certificate,
            key=certificate.with_suffix(".key"),
        )
    )
    words = ["nginx", "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]
    path = f"{os.environ['PATH']}:{ADMINISTRATORS_PATH}"
    with subprocess.Popen(words, env={**os.environ, "PATH": path}) as process:
        try:
            until(lambda: answers(ours))
            yield ours, ours_secure
        finally:
            process.terminate()


def answers(port: int) -> bool:
    with socket.socket() as end:
        return not end.connect_ex(("127.0.0.1", port))


Way = tuple[int, int | None, ssl.SSLContext | None]


def measure(name: str, direct: Way, through: Way) -> None:
    firsts: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for way, found in zip((direct, through), firsts, strict=True):
            found.append(fetch(*way, 1)[0])
    one, other = (statistics.median(found) for found in firsts)
    print(f"{name}: first byte {one * 1e3:.2f} ms direct, {(other - one) * 1e3:.2f} ms more")
    speeds: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds(5)):
        for way, found in zip((direct, through), speeds, strict=True):
            found.append(SIZE / fetch(*way, SIZE)[1] / MIB)
    one, other = (statistics.median(found) for found in speeds)
    print(f"{name}: {one:.0f} MiB/s direct, {other / one:.2f} of it")


async def inside(folder: Path, port: int) -> None:
    """Download with curl on this host, and in a workspace of `local` by both ways of asking for plain HTTP."""
    speed = ["curl", "-sS", "-o", "/dev/null", "-w", "%{speed_download}"]
    provider = LocalProvider(folder)
    handle = await provider.create(WorkspaceRequest(id="bench", run="run", nonce="nonce"))
    rules = NetworkSpec((parse_rule(f"a.test:{port}", private=True),))
    egress = open_egress(rules, lambda one: None, reach={}, resolve=loopback)
    async with (
        provider.open(handle, SandboxSpec()) as workspace,
        egress as session,
        workspace.listen(session.serve) as ours,
    ):
        through = ["--proxy", f"http://127.0.0.1:{ours}", f"http://a.test:{port}/{SIZE}"]
        found: list[list[float]] = []
        for _ in range(rounds(5)):
            direct = await trio.run_process([*speed, f"http://127.0.0.1:{port}/{SIZE}"], capture_stdout=True)
            asked = [await workspace.run([*speed, *more, *through]) for more in ([], ["--proxytunnel"])]
            found.append([float(text) for text in (direct.stdout, *(one.stdout for one in asked))])
    await provider.destroy(handle)
    host, url, tunnel = (statistics.median(rates) for rates in zip(*found, strict=True))
    print(f"curl inside a workspace: {url / host:.2f} and, by CONNECT, {tunnel / host:.2f} of {host / MIB:.0f} MiB/s")


def crowd(port: int, through: int, trust: ssl.SSLContext | None) -> None:
    """Download a little on many connections that are all open at once."""
    ends = []
    for _ in range(CONNECTIONS):
        end = socket.create_connection(("127.0.0.1", through))
        end.sendall(b"CONNECT a.test:%d HTTP/1.1\r\nHost: a\r\n\r\n" % port)
        assert end.recv(4096).startswith(b"HTTP/1.1 200")
        ends.append(trust.wrap_socket(end, server_hostname="a.test") if trust is not None else end)
    for end in ends:
        end.sendall(GET % (4 * MIB, port))
    for end in ends:
        while end.recv(65536):
            pass
        end.close()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", certificate]:
            serve(certificate)
        case ["proxy", certificate, plain, secure]:
            trio.run(proxy, certificate, plain, secure)
        case _:
            main()
