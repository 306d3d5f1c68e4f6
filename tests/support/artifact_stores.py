"""Stores of artifacts for tests: a folder, S3 as moto speaks it, and servers that fail in the middle."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count

from tests.support import dockerd
from tests.support.git_servers import free_port
from tests.support.http_servers import Handler, serving_http

KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "AWS_EC2_METADATA_DISABLED": "true",
}
PAGE = 3  # objects that moto lists at once
_SERVE = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()  # ends with whoever started it
from moto.server import main
"""
_numbers = count(1)


@cache
def moto() -> int:
    """The port of a server of this session, started by the first that asks."""
    port = free_port()
    words = ["-H", "127.0.0.1", "-p", str(port)]
    command = [sys.executable, "-W", "ignore", "-c", f"{_SERVE}main({words})"]
    env = {"PATH": os.defpath, "MOTO_S3_DEFAULT_MAX_KEYS": str(PAGE), "PYTHONDONTWRITEBYTECODE": "1"}
    silent = subprocess.DEVNULL
    dockerd.hold(subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=silent, stderr=silent))
    _wait_for(port, 120)
    return port


def _wait_for(port: int, seconds: float) -> None:
    give_up = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        assert time.monotonic() < give_up, "moto does not start"
        time.sleep(0.1)


def client(port: int | None = None) -> object:
    import botocore.session

    session = botocore.session.Session()
    session.set_credentials(KEYS["AWS_ACCESS_KEY_ID"], KEYS["AWS_SECRET_ACCESS_KEY"])
    url = f"http://127.0.0.1:{port or moto()}"
    return session.create_client("s3", region_name="us-east-1", endpoint_url=url)


def bucket(*, locked: bool = False) -> str:
    """A new bucket of moto's."""
    name = f"runs-{os.getpid()}-{next(_numbers)}"
    client().create_bucket(Bucket=name, ObjectLockEnabledForBucket=locked)  # type: ignore[attr-defined]
    return name


def s3_url(name: str, port: int | None = None, **options: str) -> str:
    more = "".join(f"&{key}={value}" for key, value in options.items())
    return f"s3://{name}/team/a?endpoint=http://127.0.0.1:{port or moto()}&region=us-east-1{more}"


class Between:
    """A proxy before moto that spoils what ``spoil`` says, by the bytes that pass from the client and the server."""

    def __init__(self, spoil: Callable[[Between, str, bytes], bytes | None]) -> None:
        self._spoil = spoil
        self.requests: list[bytes] = []
        self.spoilt = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]

    def __enter__(self) -> Between:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", moto()))
                threading.Thread(target=self._pass, args=(client, server, "request"), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, "answer"), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, kind: str) -> None:
        with suppress(OSError):
            while content := source.recv(1 << 16):
                if kind == "request" and content.startswith((b"DELETE ", b"GET ", b"POST ", b"PUT ")):
                    self.requests.append(content.split(b"\r\n")[0])
                passed = self._spoil(self, kind, content)
                if passed is None:  # the connection is lost here
                    self.spoilt += 1
                    break
                target.sendall(passed)
        for each in (source, target):
            with each, suppress(OSError):  # which says so when its other end has gone
                each.shutdown(socket.SHUT_RDWR)


@contextmanager
def answering(status: int, code: str, *, delay: float = 0.0) -> Iterator[int]:
    """The port of a server that gives every request one answer of S3's."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>said {code}</Message></Error>".encode()

    class Answer(Handler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            time.sleep(delay)
            self.heard()
            self.tell(body, status, content_type="application/xml")

        do_GET = do_PUT = do_POST = do_DELETE = _answer

    with serving_http(Answer) as port:
        yield port
