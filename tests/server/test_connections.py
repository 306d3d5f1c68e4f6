"""Connections whose clients read nothing of what they are sent, on the kinds of sockets that a server has."""

from __future__ import annotations

import socket
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from hypercorn.config import Config

from runner.server import connections
from runner.server.connections import serve_connections


class Endless:
    """An application that streams until its client is gone."""

    def __init__(self) -> None:
        self.gone = trio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

        async def leave() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.gone.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave)
            while not self.gone.is_set():
                await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
                await trio.lowlevel.checkpoint()


def listen(kind: str, tmp_path: Path) -> socket.socket:
    if kind == "unix":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "s"))
        return listener
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    return listener


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("ends", [False, True], ids=["while the server runs", "when the server ends"])
async def test_a_client_that_never_reads_is_cut_off(
    kind: str, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, stopping, app = Config(), trio.Event(), Endless()
    config.graceful_timeout = 0.1
    monkeypatch.setattr(connections, "UNREAD_SECONDS", 3600.0 if ends else 0.1)
    listener = listen(kind, tmp_path)
    with closing(listener), trio.fail_after(60), closing(socket.socket(listener.family)) as client:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve_connections, app, config, listener, stopping=stopping))
            client.connect(listener.getsockname())
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            if ends:
                await trio.lowlevel.wait_readable(client)
            else:
                await app.gone.wait()
            stopping.set()
