"""Streams of a command that are descriptors of this process, such as its terminal."""

from __future__ import annotations

import os
from functools import partial

import trio

from runner.ops.workspaces.exec import CHUNK, CommandStreams


def descriptor_streams(stdin: int, stdout: int, stderr: int) -> CommandStreams:
    """Copy from and to these descriptors, in threads: files and terminals can be blocking ones."""
    return CommandStreams(partial(_read, stdin), partial(_write, stdout), partial(_write, stderr))


async def _read(descriptor: int) -> bytes:
    return await trio.to_thread.run_sync(os.read, descriptor, CHUNK, abandon_on_cancel=True)


async def _write(descriptor: int, chunk: bytes) -> None:
    left = memoryview(chunk)
    while left:
        left = left[await trio.to_thread.run_sync(os.write, descriptor, left, abandon_on_cancel=True) :]
