"""Servers of git on this machine's loopback: https by git's own back end, ssh by sshd, and hostile ones."""

from __future__ import annotations

import getpass
import gzip
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.certificates import make_certificate
from tests.support.needs import ADMINISTRATORS_PATH

Answer = Callable[["Handler"], bool]


class Handler(BaseHTTPRequestHandler):
    """Hands a request to ``git http-backend``, unless the server's ``answer`` says that it has answered."""

    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.close_connection = True
        self.server.seen.append(self.path)
        if self.server.answer is not None and self.server.answer(self):
            return
        self._back_end()

    do_POST = do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None: ...

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            raw = b"".join(parts)
        else:
            raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(raw) if self.headers.get("Content-Encoding") == "gzip" else raw

    def start(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Connection": "close", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def _back_end(self) -> None:
        path, _, query = self.path.partition("?")
        env = {
            "PATH": os.environ["PATH"],
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_PROJECT_ROOT": str(self.server.root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", "") if self.server.version == 2 else "",
            "REQUEST_METHOD": self.command,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "REMOTE_ADDR": "127.0.0.1",
        }
        done = subprocess.run(["git", "http-backend"], env=env, input=self.body(), capture_output=True, check=False)
        head, _, body = done.stdout.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().splitlines())
        self.start(int(headers.pop("Status", "200").split()[0]), **headers)
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    root: Path
    answer: Answer | None = None
    version = 2
    seen: list[str]

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]  # sockets are what it serves
        with suppress(OSError, ValueError):
            request.settimeout(1)
            if isinstance(request, ssl.SSLSocket):
                request.unwrap()
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves is what is tested."""


@dataclass
class Https:
    """A server of the repositories in ``root``; ``env`` makes a client trust it."""

    server: Server
    url: str
    env: dict[str, str] = field(default_factory=dict)

    @property
    def asked(self) -> int:
        return len(self.server.seen)


def lfs_server(contents: Sequence[bytes]) -> Answer:
    """Answer as a server of LFS with these files; other requests are left to git."""
    known = {sha256(content).hexdigest(): content for content in contents}

    def answer(handler: Handler) -> bool:
        if handler.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(handler.body())["objects"]
            at = f"https://{handler.headers['Host']}/lfs/"
            for one in objects:
                one["actions"] = {"download": {"href": at + one["oid"]}}
            body = json.dumps({"transfer": "basic", "objects": objects}).encode()
            kind = "application/vnd.git-lfs+json"
        elif handler.path.startswith("/lfs/"):
            body, kind = known[handler.path.removeprefix("/lfs/")], "application/octet-stream"
        else:
            return False
        handler.start(200, Content_Type=kind, Content_Length=str(len(body)))
        handler.wfile.write(body)
        return True

    return answer


def lfs_pointer(content: bytes) -> bytes:
    text = (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256(content).hexdigest()}\nsize {len(content)}\n"
    )
    return text.encode()


@contextmanager
def https(root: Path, folder: Path) -> Iterator[Https]:
    certificate = make_certificate(folder / "server.pem", "DNS:localhost,IP:127.0.0.1")
    server = Server(("127.0.0.1", 0), Handler)
    server.root, server.seen = root, []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield Https(server, f"https://localhost:{server.server_address[1]}", {"SSL_CERT_FILE": str(certificate)})
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Sshd:
    """A server that a client of ``folder`` (to be first on PATH) knows and may enter."""

    folder: Path
    url: str
    config: Path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@contextmanager
def sshd(folder: Path) -> Iterator[Sshd]:
    program = shutil.which("sshd", path=ADMINISTRATORS_PATH)
    assert program is not None
    folder.mkdir()
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    port = free_port()
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
        "StrictModes no\nUsePAM no\nPidFile none\nPasswordAuthentication no\nPermitRootLogin yes\n"
    )
    known = (folder / "host.pub").read_text().split()
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {known[0]} {known[1]}\n")
    config = folder / "config"
    config.write_text(f"UserKnownHostsFile {folder}/known_hosts\nIdentityFile {folder}/user\nIdentitiesOnly yes\n")
    bin = folder / "bin"
    bin.mkdir()
    (bin / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config} "$@"\n')
    (bin / "ssh").chmod(0o755)
    with subprocess.Popen(
        [program, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    ) as process:
        wait_for_port(port)
        try:
            yield Sshd(bin, f"ssh://{getpass.getuser()}@127.0.0.1:{port}", config)
        finally:
            process.terminate()


def wait_for_port(port: int) -> None:
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)  # another process starts
        else:
            return
    raise AssertionError(f"nothing listens on port {port}")
