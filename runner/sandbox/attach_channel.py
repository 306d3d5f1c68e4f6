"""Channel to a guest through the docker daemon, attached to the guest's standard input and output.

For a runtime whose containers cannot reach Unix sockets of the host. There is one connection, made before the container
starts. When the daemon ends, the connection is lost and the workspace with it: the byte stream has no boundary at which
a new connection could resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import trio

from runner.core.errors import OutOfMemory, ProviderFailed, WorkspaceLost
from runner.core.model import Limits
from runner.sandbox.cgroup import ControlGroups, Counters
from runner.sandbox.container import ContainerMounts
from runner.sandbox.container_init import FirstProcess
from runner.sandbox.docker_api import Engine
from runner.sandbox.docker_mounts import DaemonStage

_ANY_MEMORY = Limits(memory_bytes=1)
_LINGER = 0.5  # seconds for the daemon to deliver the guest's last output
_STATUS_TIMEOUT = 3.0  # seconds for the daemon to say why a container has ended
_HEAD_BYTES = 1 << 14
_READ_BYTES = 1 << 18
_FRAME = 8  # bytes of the daemon's header: the stream, three zeros, the length of what follows


@contextmanager
def open_attach_channel(
    engine: Engine, stage: DaemonStage, mounts: ContainerMounts, what: str
) -> Iterator[AttachChannel]:
    channel = AttachChannel(engine, what)
    try:
        yield channel
    finally:
        channel.close()


class AttachChannel:
    """The channel of one container. ``what`` names the workspace in messages."""

    config: Mapping[str, Any] = {
        "Cmd": ["-"],
        "AttachStdin": True,
        "AttachStdout": True,
        "OpenStdin": True,
        "StdinOnce": True,  # so the guest ends when the connection does
    }

    def __init__(self, engine: Engine, what: str) -> None:
        self._engine = engine
        self._what = what
        self._container = ""
        self._memory: Counters = ControlGroups({})
        self._stream: trio.abc.Stream | None = None
        self._abort: Callable[[], None] = lambda: None

    async def prepare(self, container: str) -> None:
        self._container = container
        with trio.move_on_after(self._engine.timeout):
            try:
                self._stream, self._abort = await _attach(self._engine, container)
            except (OSError, trio.BrokenResourceError) as error:
                raise ProviderFailed(f"the docker daemon does not attach to {self._what}: {error}") from error
            return
        raise ProviderFailed(
            f"the docker daemon does not attach to {self._what}: no answer in {self._engine.timeout:.0f}s"
        )

    async def connect(self, init: FirstProcess) -> trio.abc.Stream:
        if self._stream is None:
            raise await self._why(init)
        stream, self._stream = self._stream, None
        self._memory = init.group(_ANY_MEMORY)
        return AttachStream(stream, init, self._memory)

    async def _why(self, init: FirstProcess) -> WorkspaceLost:
        """Find out why the connection was lost, killing the container, which cannot be reached any more."""
        init.kill()
        for_memory, why = (
            self._memory.oom_kills() > 0,
            f"the docker daemon has not said why within {_STATUS_TIMEOUT:.0f}s",
        )
        with trio.move_on_after(0 if for_memory else _STATUS_TIMEOUT):
            try:
                for_memory = await self._engine.was_killed_for_memory(self._container)
                why = "it was killed, or ended by itself"
            except ProviderFailed as error:
                why = error.message
        if for_memory:
            return OutOfMemory(f"{self._what} ran out of memory, and its sandbox was killed whole")
        return WorkspaceLost(f"the guest of {self._what} is lost: {why}")

    def close(self) -> None:
        if self._stream is not None:
            self._abort()


async def _attach(engine: Engine, container: str) -> tuple[trio.abc.Stream, Callable[[], None]]:
    """Connect to a container's standard input and output. Raises ``OSError`` when the daemon refuses."""
    stream, abort = await engine.dial()
    try:
        words = f"POST /containers/{container}/attach?stream=1&stdin=1&stdout=1 HTTP/1.1"
        await stream.send_all(f"{words}\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n".encode())
        await _expect_upgrade(stream)
    except BaseException:
        abort()
        raise
    return stream, abort


async def _expect_upgrade(stream: trio.abc.Stream) -> None:
    head = b""
    while not head.endswith(b"\r\n\r\n") and len(head) < _HEAD_BYTES:  # the guest has not begun: nothing follows it
        if not (byte := await stream.receive_some(1)):
            break
        head += byte
    status = head.partition(b"\r\n")[0].decode(errors="replace")
    if status.split()[1:2] != ["101"] or not head.endswith(b"\r\n\r\n"):
        raise ConnectionRefusedError(f"the answer is `{status}`")


class AttachStream(trio.abc.Stream):
    """Output and input of a container's first process. Ends with that process, whatever the daemon does."""

    def __init__(self, stream: trio.abc.Stream, init: FirstProcess, memory: Counters) -> None:
        self._stream = stream
        self._init = init
        self._memory = memory
        self._rest = b""  # of a header
        self._left = 0  # bytes of the frame that has begun

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        while chunk := await self._receive(max_bytes or _READ_BYTES):
            if payload := self._unwrap(chunk):
                return payload
        return b""

    async def _receive(self, max_bytes: int) -> bytes:
        chunk = b""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_at_end, nursery.cancel_scope)
            with suppress(trio.BrokenResourceError):
                chunk = bytes(await self._stream.receive_some(max_bytes))
            nursery.cancel_scope.cancel()
        return chunk

    async def _cancel_at_end(self, scope: trio.CancelScope) -> None:
        await self._init.wait_ended()
        self._memory.oom_kills()  # read now: the control group is removed soon, and the daemon reports late
        await trio.sleep(_LINGER)
        scope.cancel()

    def _unwrap(self, chunk: bytes) -> bytes:
        parts = []
        chunk, at = self._rest + chunk, 0
        while self._left or len(chunk) - at >= _FRAME:
            if not self._left:
                self._left = int.from_bytes(chunk[at + 4 : at + _FRAME])
                at += _FRAME
            part = chunk[at : at + self._left]
            if not part:
                break
            parts.append(part)
            at += len(part)
            self._left -= len(part)
        self._rest = chunk[at:]
        return b"".join(parts)

    async def aclose(self) -> None:
        await self._stream.aclose()
