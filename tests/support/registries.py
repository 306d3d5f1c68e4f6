"""Registries of images on the loopback of a daemon: Debian's ``docker-registry``, and ones that lie or are slow."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.dockerd import Daemon, add_programs, libraries
from tests.support.needs import program

REGISTRY = program("docker-registry")
USER, PASSWORD = "person", "secret"
_PASSWORDS = f"{USER}:$2b$04$YB87YraCHSfQH6UN5INzCO.7Mx4xy2M14wl0dQz90eCSDG/SctOoW\n"
_PROGRAMS = ("sh", "bash", "cat", "ls")
_READY = 20.0  # seconds


class Served:
    """A registry at ``host``, as its daemon reaches it."""

    def __init__(self, daemon: Daemon, port: int) -> None:
        self._enter = ["nsenter", f"--net=/proc/{daemon.pids()[0]}/ns/net"]
        self.host = f"127.0.0.1:{port}"

    @contextmanager
    def running(self, words: Sequence[str], log: Path) -> Iterator[None]:
        subprocess.run([*self._enter, "ip", "link", "set", "lo", "up"], check=True)
        with log.open("wb") as out:
            process = subprocess.Popen([*self._enter, *words], stdout=out, stderr=out)
        try:
            self._wait(process, log)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()

    def _wait(self, process: subprocess.Popen[bytes], log: Path) -> None:
        host, _, port = self.host.partition(":")
        look = f"import socket; socket.create_connection(({host!r}, {port}), 1).close()"
        deadline = time.monotonic() + _READY
        while subprocess.run([*self._enter, sys.executable, "-Sc", look], check=False, capture_output=True).returncode:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the registry does not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)


@contextmanager
def registry(daemon: Daemon, port: int, *, closed: bool = False) -> Iterator[Served]:
    """A real one; a ``closed`` one asks for ``USER`` and ``PASSWORD``."""
    REGISTRY.require()
    folder = Path(tempfile.mkdtemp(prefix="runner-registry-"))
    served = Served(daemon, port)
    config = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}, "delete": {"enabled": True}},
        "http": {"addr": served.host},
    }
    if closed:
        (folder / "passwords").write_text(_PASSWORDS)
        config["auth"] = {"htpasswd": {"realm": "tests", "path": str(folder / "passwords")}}
    (folder / "config.yml").write_text(json.dumps(config))
    try:
        with served.running(["docker-registry", "serve", str(folder / "config.yml")], folder / "log"):
            yield served
    finally:
        shutil.rmtree(folder)


@contextmanager
def lying_registry(daemon: Daemon, port: int, behaviour: str) -> Iterator[Served]:
    """One that sends another manifest than the digest it names (``wrong``), or never ends a layer (``slow``)."""
    served = Served(daemon, port)
    with tempfile.NamedTemporaryFile() as log:
        words = [sys.executable, "-m", "tests.support.registries", served.host, behaviour]
        with served.running(words, Path(log.name)):
            yield served


def small_image(mark: str) -> bytes:
    """The archive of a root file system of a few of this host's programs; ``mark`` is in its file ``/mark``."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        found = [path for path in map(shutil.which, _PROGRAMS) if path]
        add_programs(tar, sorted({*found, *libraries(found)}))
        file = tarfile.TarInfo("mark")
        file.size = len(mark)
        tar.addfile(file, io.BytesIO(mark.encode()))
    return buffer.getvalue()


def push(daemon: Daemon, name: str, mark: str, login: dict[str, str] | None = None) -> None:
    """Make an image at a registry, and leave nothing of it at the daemon."""
    repository, _, tag = name.rpartition(":")
    with daemon.client() as client:
        client.import_image_from_data(small_image(mark), repository=repository, tag=tag)
        said = list(client.push(repository, tag=tag, stream=True, decode=True, auth_config=login or {"username": ""}))
        forget(daemon, name)
    assert not [one for one in said if "error" in one], said


def forget(daemon: Daemon, name: str) -> None:
    """Remove an image from a daemon, with all of its names."""
    from docker.errors import ImageNotFound

    with daemon.client() as client, suppress(ImageNotFound):
        client.remove_image(client.inspect_image(name)["Id"], force=True)


class _Lying(BaseHTTPRequestHandler):
    """A registry's API, as far as a pull asks."""

    protocol_version = "HTTP/1.1"
    behaviour = ""
    config = json.dumps({"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": []}}).encode()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.path == "/v2/":
            self._send(b"{}", "application/json")
        elif "/manifests/" in self.path:
            body = self._manifest()
            wanted = self.path.rpartition("/")[2]
            digest = wanted if wanted.startswith("sha256:") else _digest(b"another one")
            self._send(body, "application/vnd.docker.distribution.manifest.v2+json", digest)
        elif self.behaviour == "slow" and not self.path.endswith(_digest(self.config)):
            self.send_response(200)
            self.send_header("Content-Length", str(64 << 20))
            self.end_headers()
            with suppress(OSError):
                while True:
                    self.wfile.write(bytes(1 << 16))
                    time.sleep(0.1)
        else:
            self._send(self.config, "application/octet-stream")

    def _manifest(self) -> bytes:
        kind = "application/vnd.docker.container.image.v1+json"
        layer = "application/vnd.docker.image.rootfs.diff.tar.gzip"
        config = {"mediaType": kind, "size": len(self.config), "digest": _digest(self.config)}
        layers = [{"mediaType": layer, "size": 64 << 20, "digest": _digest(b"a layer")}]
        top = {"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json"}
        return json.dumps({**top, "config": config, "layers": layers}).encode()

    def _send(self, body: bytes, kind: str, digest: str = "") -> None:
        if self.behaviour == "slow" and "manifests" in self.path:
            digest = _digest(body)
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if digest:
            self.send_header("Docker-Content-Digest", digest)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def main(host: str, behaviour: str) -> None:
    address, _, port = host.partition(":")
    _Lying.behaviour = behaviour
    ThreadingHTTPServer((address, int(port)), _Lying).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
