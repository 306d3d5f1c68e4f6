"""Connections to what is outside, when whoever asked is cancelled."""

from __future__ import annotations

import socket

import trio

from runner.network.upstream import open_remote


async def test_a_handshake_that_is_cancelled_leaves_no_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        async with open_remote(f"https://127.0.0.1:{listening.getsockname()[1]}", {}) as upstream:
            with trio.move_on_after(0.5):
                async with upstream.send("GET", "/", [], b""):
                    raise AssertionError("nobody answers")
            other, _ = listening.accept()
            with other:
                other.settimeout(10)
                assert other.recv(1 << 16)[0] == 22  # it said hello
                assert other.recv(1) == b""
