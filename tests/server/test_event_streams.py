"""A thousand clients that follow one run of the real server."""

from __future__ import annotations

import re
import resource
import selectors
import socket
import time
from pathlib import Path

import pytest

from tests.support.server import Served, serving
from tests.support.situations import Project

CLIENTS = 1_000
EACH = 96 << 10  # bytes that a client may cost


def memory(served: Served) -> int:
    """The bytes that the server has in memory."""
    found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{served.process.pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def follow(served: Served, run: str) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(60)
    client.connect(str(served.socket))
    head = f"GET /api/v1/runs/{run}/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {served.token}\r\n\r\n"
    client.sendall(head.encode())
    return client


def numbers(raw: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"^id: (\d+)\n", raw, re.MULTILINE)]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_thousand_clients_get_every_event_once_and_cost_little(project: Project) -> None:
    """One of them reads nothing at all, and holds nobody up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, CLIENTS + 500)), hard))
    project.script("echo 1 >file; sleep 600")
    options = ("--manifests", str(project.folder), "--rate", "10000")
    with serving(project, *options) as served, selectors.DefaultSelector() as ready:
        run = served.post("/runs", {"run": "work"})["runs"][0]["id"]
        follow(served, run).close()
        before = memory(served)
        silent = follow(served, run)
        received: dict[socket.socket, bytearray] = {}
        for _ in range(CLIENTS - 1):  # as many at once would be refused
            client = follow(served, run)
            received[client] = bytearray(client.recv(1 << 16))
        assert {bytes(got[:13]) for got in received.values()} == {b"HTTP/1.1 200 "}
        for client in received:
            client.setblocking(False)
            ready.register(client, selectors.EVENT_READ)
        grown = 0
        began = time.monotonic()
        while ready.get_map():
            for key, _ in ready.select(1):
                client = key.fileobj
                assert isinstance(client, socket.socket)
                if chunk := client.recv(1 << 16):
                    received[client] += chunk
                if not chunk or b"\r\n0\r\n\r\n" in received[client]:
                    ready.unregister(client)
            if not grown and all(b"StepStarted" in got for got in received.values()):
                grown = memory(served) - before
                assert served.ask("POST", f"/api/v1/runs/{run}/cancel", {}).status == 204
            assert time.monotonic() < began + 300

        counts = {tuple(numbers(bytes(got))) for got in received.values()}
        for client in (silent, *received):
            client.close()

    [seen] = counts
    assert list(seen) == list(range(1, len(seen) + 1))
    assert all(b"event: RunEnded" in got for got in received.values())
    print(f"{grown / CLIENTS:,.0f} bytes a client")
    assert 0 < grown < CLIENTS * EACH
