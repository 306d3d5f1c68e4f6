"""What a client can do to the real server by what it sends, and how slowly: others are served all the same."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress

import pytest

from runner.server.border import MOST_UNPROVED
from tests.support.server import Served
from tests.support.situations import until

NUMBERS = ('{"persistent": NaN}', '{"persistent": 1e999}', '{"persistent": true, "persistent": false}')


def send(served: Served, raw: bytes, stack: ExitStack) -> socket.socket:
    client = stack.enter_context(socket.socket(socket.AF_UNIX))
    client.settimeout(60)
    client.connect(str(served.socket))
    with suppress(BrokenPipeError, ConnectionResetError):  # it has been answered before all was sent
        client.sendall(raw)
    return client


def head(served: Served, *headers: str) -> bytes:
    """A request to write a file."""
    lines = ("POST /api/v1/workspaces HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers)
    return "\r\n".join((*lines, f"Authorization: Bearer {served.token}", "", "")).encode()


@pytest.mark.nightly
def test_what_is_too_much_is_refused_while_others_are_served(served: Served) -> None:
    with ExitStack() as stack:
        slow = [send(served, b"GET /healthz HTTP/1.1\r\nHost: loc", stack) for _ in range(300)]
        many = send(served, b"GET / HTTP/1.1\r\n" + b"X-A: b\r\n" * 100_000, stack)
        assert many.recv(100).startswith(b"HTTP/1.1 431 ")
        large = send(served, head(served, "Content-Length: 2147483648") + b" " * (17 << 20), stack)
        assert large.recv(100).startswith(b"HTTP/1.1 413 ")
        two = send(served, head(served, "Content-Length: 2", "Content-Length: 3") + b"{}", stack)
        assert two.recv(100).startswith(b"HTTP/1.1 400 ")
        assert served.get("/workspaces") == {"workspaces": [], "next": None}
        assert [client.recv(100) for client in slow] == [b""] * len(slow)


def test_bodies_that_are_not_what_they_say_are_refused(served: Served) -> None:
    path, form = "/workspaces", {"Content-Type": "application/x-www-form-urlencoded"}
    assert served.refused("POST", path, "a=b", headers=form) == (415, "server.media-type")
    for body in ("{", "[]", "[" * 100_000, '{"a": 1}', b"\xff", '{"tools": "bash"}', '{"persistent": 1}', *NUMBERS):
        assert served.refused("POST", path, body) == (400, "server.request")
    for page in ("?limit=x", "?limit=-1", "?limit=1e9"):
        assert served.refused("GET", f"{path}{page}") == (400, "server.request")
    for cursor in ("x", "..", "9" * 40, "%00"):
        assert served.get(f"{path}?cursor={cursor}")["workspaces"] == []


@pytest.mark.nightly
def test_a_body_that_does_not_arrive_is_given_up(served: Served) -> None:
    with ExitStack() as stack:
        slow = send(served, head(served, "Content-Length: 10") + b"{", stack)
        assert slow.recv(100).startswith(b"HTTP/1.1 408 ")


def test_of_messages_that_nobody_has_proved_not_many_are_in_memory(served: Served) -> None:
    lines = (
        "POST /api/v1/webhooks/x HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        "Content-Length: 9",
    )
    message = ("\r\n".join((*lines, "", "")) + "{").encode()
    with ExitStack() as stack:
        begun = [send(served, message, stack) for _ in range(MOST_UNPROVED)]
        until(lambda: send(served, message + b'"a": 1} ', stack).recv(12) == b"HTTP/1.1 429")
        assert served.get("/workspaces")["workspaces"] == []
        for client in begun:
            client.sendall(b'"a": 1} ')
        assert {client.recv(12) for client in begun} == {b"HTTP/1.1 401"}
        assert send(served, message + b'"a": 1} ', stack).recv(12) == b"HTTP/1.1 401"


def test_the_health_of_providers_is_told(served: Served) -> None:
    found = {one["name"]: one for one in served.get("/providers")["providers"]}

    assert {"local", "docker", "gvisor", "process"} <= set(found)
    assert (found["local"]["available"], found["local"]["isolation"]) == (True, "namespaces")
    assert found["process"]["isolation"] == "none"


def test_a_request_with_two_tokens_or_origins_is_refused(served: Served) -> None:
    token, ours = f"Authorization: Bearer {served.token}", "Origin: http://localhost"
    with ExitStack() as stack:
        for lines, status in (((token, token), b"401"), ((token, ours, "Origin: http://evil.test"), b"403")):
            raw = "\r\n".join(("GET /api/v1/workspaces HTTP/1.1", "Host: localhost", *lines, "", ""))
            assert send(served, raw.encode(), stack).recv(100).startswith(b"HTTP/1.1 " + status)
