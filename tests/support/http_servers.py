"""HTTP servers of this host for as long as a block lasts."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

EVERYWHERE = "0.0.0.0"  # all of 127.0.0.0/8


class Handler(BaseHTTPRequestHandler):
    """Answers by ``tell``, and prints nothing of its requests."""

    def tell(self, body: bytes = b"", status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        with suppress(OSError):  # the client has gone
            self.wfile.write(body)

    def heard(self) -> bytes:
        """Read the body of the request."""
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving_http(
    handler: type[BaseHTTPRequestHandler], host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> Iterator[int]:
    """The port of a server with this handler for each connection."""
    with ThreadingHTTPServer((host, 0), handler) as server:
        server.daemon_threads = True
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
