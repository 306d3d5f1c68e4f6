"""A cluster's API as its clients see it: TLS, credentials, objects, watches, logs, and secrets that nobody may get."""

from __future__ import annotations

import gzip
import json
import ssl
import subprocess
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.skills.api_server import Cluster, respond
from tests.skills.clusters import CLUSTERS
from tests.skills.objects import metrics
from tests.support import components, needs

CONTEXT, NAMESPACE = "prod-eu", "payments"
TOKEN = "eyJhbGciOi.0123456789abcdef-cluster-token"
SECRET = "c2VjcmV0LW9mLXRoZS1jbHVzdGVy"
POD = "checkout-7c9d64bf5b-00001"

_OOM = CLUSTERS["oom-killed"]
OOM = replace(
    _OOM, objects=(*_OOM.objects, metrics(POD, NAMESPACE, cpu="250m")), logs={POD: "starting\nout of memory\n"}
)

KUBECTL = components.KUBECTL


@pytest.fixture(scope="session")
def kubectl() -> Path:
    """A toolchain with the real kubectl."""
    needs.KUBECTL.require()
    return KUBECTL


@dataclass(frozen=True)
class Asked:
    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return urlsplit(self.target).path


@dataclass
class Api:
    """What the double answers, and what it was asked. ``go_on`` ends watches and logs that are followed."""

    folder: Path
    cluster: Cluster
    tokens: set[str] = field(default_factory=lambda: {TOKEN})
    rights: frozenset[str] = frozenset(
        {"pods", "pods/log", "events", "deployments", "services", "configmaps", "secrets"}
    )
    asked: list[Asked] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)
    refused: Callable[[], object] = lambda: None  # called when a credential is
    flooded: int = 0  # bytes of an endless log
    port: int = 0

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def paths(self, method: str = "GET") -> list[str]:
        return [asked.path for asked in self.asked if asked.method == method]

    def kubeconfig(self, user: Mapping[str, Any] | None = None, **cluster: Any) -> dict[str, Any]:
        """A kubeconfig's document; ``cluster`` adds to what it says of the server."""
        authority = b64encode((self.folder / "ca.pem").read_bytes()).decode()
        of_server = {"server": self.server, "certificate-authority-data": authority, **cluster}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": CONTEXT,
            "contexts": [{"name": CONTEXT, "context": {"cluster": "eu", "user": "me", "namespace": NAMESPACE}}],
            "clusters": [{"name": "eu", "cluster": {k.replace("_", "-"): v for k, v in of_server.items()}}],
            "users": [{"name": "me", "user": {"token": TOKEN} if user is None else dict(user)}],
        }

    def write(self, path: Path, user: Mapping[str, Any] | None = None, **cluster: Any) -> Path:
        path.write_text(json.dumps(self.kubeconfig(user, **cluster)))
        path.chmod(0o600)
        return path


def certificates(folder: Path, address: str = "127.0.0.1") -> Path:
    """An authority, and of it a server's certificate for an address and ``kube.test``, and a client's."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=folder)

    openssl("req", "-x509", *key, "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem")
    for name, extension in (
        ("server", f"subjectAltName=IP:{address},DNS:kube.test"),
        ("client", "subjectAltName=DNS:me"),
    ):
        (folder / f"{name}.ext").write_text(extension)
        openssl("req", *key[:-2], "-subj", f"/CN={name}/O=triage", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", "2", "-extfile", f"{name}.ext", "-out", f"{name}.pem"),
        )
    return folder


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates(tmp_path_factory.mktemp("authority"))


@contextmanager
def serving(folder: Path, cluster: Cluster = OOM) -> Iterator[Api]:
    """A cluster behind TLS for as long as the block lasts."""
    api = Api(folder, cluster)

    class Answer(_Answer):
        of = api

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    context.load_verify_locations(folder / "ca.pem")
    context.verify_mode = ssl.CERT_OPTIONAL
    server = _Server(("127.0.0.1", 0), Answer)
    server.context = context
    api.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield api
    finally:
        api.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    context: ssl.SSLContext

    def finish_request(self, request: Any, client_address: Any) -> None:
        with suppress(OSError), self.context.wrap_socket(request, server_side=True) as secured:
            super().finish_request(secured, client_address)  # unless the client has gone, or trusts nobody here


class _Answer(BaseHTTPRequestHandler):
    of: Api
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: ``asked`` says it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):
            return self._do
        raise AttributeError(name)

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.of.asked.append(Asked(self.command, self.path, headers, body))
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        known = headers.get("authorization", "").removeprefix("Bearer ") in self.of.tokens
        if not known and not self.connection.getpeercert():  # type: ignore[attr-defined]  # it is a TLS socket
            self.of.refused()
            self._say(401, {"kind": "Status", "status": "Failure", "reason": "Unauthorized", "code": 401})
        elif self.command == "POST":
            self._review(url.path, body)
        elif self.command not in ("GET", "HEAD"):
            self._say(200, {"kind": "Status", "status": "Success"})
        elif "secrets" in url.path.split("/"):
            self._say(200, {"kind": "SecretList", "apiVersion": "v1", "items": [{"data": {"key": SECRET}}]})
        elif url.path == "/version":
            self._say(200, {"major": "1", "minor": "31", "gitVersion": "v1.31.2"})
        elif query.get("follow") == "true":
            lines = (f"line {number}\n".encode() for number in range(3))
            self._stream(self._flood() if query.get("tailLines") == "0" else lines)
        elif query.get("watch") in ("1", "true"):
            _, found = respond(self.of.cluster, url.path, query)
            events = [json.dumps({"type": "ADDED", "object": one}).encode() + b"\n" for one in found["items"]]
            self._stream(iter(events))
        elif url.path == f"/api/v1/namespaces/{NAMESPACE}":
            self._say(200, {"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": NAMESPACE}})
        elif url.path == "/api/v1":
            code, found = respond(self.of.cluster, url.path, query)
            more = [("secrets", "Secret"), ("configmaps", "ConfigMap")]
            verbs = ["get", "list", "create", "delete"]
            others = [{"name": name, "kind": kind, "namespaced": True, "verbs": verbs} for name, kind in more]
            self._say(code, {**found, "resources": [*found["resources"], *others]})
        else:
            self._say(*respond(self.of.cluster, url.path, query))

    def _review(self, path: str, body: bytes) -> None:
        review = json.loads(body)
        wanted = review.get("spec", {}).get("resourceAttributes", {})
        what = "/".join(filter(None, (wanted.get("resource", ""), wanted.get("subresource", ""))))
        self._say(201, {**review, "status": {"allowed": what in self.of.rights}})

    def _say(self, code: int, body: Any) -> None:
        raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        coded = "gzip" in self.headers.get("Accept-Encoding", "") and len(raw) > 1024
        raw = gzip.compress(raw) if coded else raw
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if isinstance(body, str) else "application/json")
        self.send_header("Content-Length", str(len(raw)))
        if coded:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def _flood(self) -> Iterator[bytes]:
        for _ in range(1 << 12):  # 256 MiB
            self.of.flooded += 1 << 16
            yield bytes(1 << 16)

    def _stream(self, pieces: Iterator[bytes]) -> None:
        """Pieces at once, and the end once it may go on."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in pieces:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()
        self.of.go_on.wait(30)
        self.wfile.write(b"0\r\n\r\n")
