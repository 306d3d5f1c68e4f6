"""Child processes with pipes, on which every provider's ``Process`` is built; only this module starts processes.

Children are started on the loop's own thread, never by a worker: ``bwrap --die-with-parent`` follows the starting
*thread*, and trio ends an idle worker after ten seconds. Waiting uses a pidfd, so a recycled pid is never waited for.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess  # noqa: TID251  # the one place
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from pathlib import Path

import trio

from runner.core.errors import RunnerError
from runner.core.model import Exit
from runner.ports import provider as ports
from runner.ports.provider import ExecResult, Process, Writer

_PIPE_BYTES = 1 << 20  # so that a briefly busy reader does not stop a command that prints much
_READ_BYTES = 1 << 18
_HEAD_BYTES = 1 << 12


class PipeReader:
    """The reading end of an output pipe. ``head`` holds the first bytes that came through it.

    Bytes that are in the pipe when it is closed can still be received.
    """

    def __init__(self, fd: int) -> None:
        self._stream = trio.lowlevel.FdStream(fd)
        self._ahead = b""
        self.head = b""

    async def receive_some(self, max_bytes: int) -> bytes:
        if self._ahead:
            await trio.lowlevel.checkpoint()
        else:
            with suppress(trio.ClosedResourceError):
                received = self._note(bytes(await self._stream.receive_some(max_bytes)))
                self._ahead += received  # after what look_ahead has taken meanwhile
        chunk, self._ahead = self._ahead[:max_bytes], self._ahead[max_bytes:]
        return chunk

    def receive_waiting(self) -> bytes:
        """Return what is in the pipe; never waits for more."""
        self.look_ahead()
        chunk, self._ahead = self._ahead, b""
        return chunk

    def look_ahead(self) -> None:
        """Fill ``head`` from the pipe, and leave the bytes to be received."""
        with suppress(BlockingIOError):
            # Bounded by the pipe's size: a process at the other end may write forever.
            while len(self._ahead) < _PIPE_BYTES and (chunk := os.read(self._stream.fileno(), _READ_BYTES)):
                self._ahead += self._note(chunk)

    def _note(self, chunk: bytes) -> bytes:
        if len(self.head) < _HEAD_BYTES:
            self.head += chunk[: _HEAD_BYTES - len(self.head)]
        return chunk

    async def aclose(self) -> None:
        self.look_ahead()
        await self._stream.aclose()


class Child:
    """A child process with pipes for its three streams. Call ``aclose`` once it has ended."""

    def __init__(self, popen: subprocess.Popen[bytes], stdin: trio.SocketStream, stdout: int, stderr: int) -> None:
        self._popen = popen
        self._pidfd = os.pidfd_open(popen.pid)
        self._waiting = trio.Lock()
        self.pid = popen.pid
        self.stdin = stdin
        self.stdout = PipeReader(stdout)
        self.stderr = PipeReader(stderr)

    @property
    def ended(self) -> bool:
        return self._popen.poll() is not None

    async def wait(self) -> Exit:
        async with self._waiting:
            if not self.ended:
                await trio.lowlevel.wait_readable(self._pidfd)
        code = self._popen.wait()
        return Exit(signal=-code) if code < 0 else Exit(code=code)

    def kill(self) -> None:
        self._popen.kill()

    async def aclose(self) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            await stream.aclose()
        os.close(self._pidfd)


def start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | None = None,
    uid: int | None = None,
    pass_fds: Collection[int] = (),
) -> Child:
    """Start a command in a session of its own, with exactly this environment.

    ``uid`` is also its only group; ``None`` keeps the runner's. Its standard input is a socket, on which it can answer.
    Raises ``OSError`` when it cannot be started.
    """
    channel, their_channel = socket.socketpair()
    pipes = os.pipe(), os.pipe()
    ours = [channel.detach(), pipes[0][0], pipes[1][0]]
    theirs = [their_channel.detach(), pipes[0][1], pipes[1][1]]
    for fd in ours[1:]:
        with suppress(PermissionError):  # beyond an ordinary user's limit for pipes
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    try:
        popen = subprocess.Popen(
            argv,
            stdin=theirs[0],
            stdout=theirs[1],
            stderr=theirs[2],
            env=env,
            cwd=cwd,
            user=uid,
            group=uid,
            extra_groups=None if uid is None else [],
            pass_fds=tuple(pass_fds),
            start_new_session=True,
            umask=0o022,
        )
    except OSError:
        _close(ours)
        raise
    finally:
        _close(theirs)
    stdin = trio.SocketStream(trio.socket.from_stdlib_socket(socket.socket(fileno=ours[0])))
    return Child(popen, stdin, *ours[1:])


def start_on_socket(
    argv: Sequence[str], *, env: Mapping[str, str], stderr: int
) -> tuple[socket.socket, Callable[[], None]]:
    """Start a command whose input and output are a socket, in a session of its own; return its other end.

    The second value ends the command. Raises ``OSError`` when it cannot be started.
    """
    ours, theirs = socket.socketpair()
    try:
        end_of_theirs = theirs.fileno()
        popen = subprocess.Popen(
            argv, stdin=end_of_theirs, stdout=end_of_theirs, stderr=stderr, env=env, start_new_session=True
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()

    def end() -> None:
        popen.kill()
        popen.wait()

    return ours, end


@contextmanager
def user_namespace(users: tuple[int, int], groups: tuple[int, int]) -> Iterator[int]:
    """Open a user namespace with one user and one group, each as ``(inside, outside)``. Raises ``OSError``."""
    # No ``preexec_fn``: what libraries do after a fork, as OpenTelemetry starts threads, would run before it. The
    # program ends with its input, when the block ends or this process dies.
    words = ("unshare", "--user", "sh", "-c", "echo; exec cat")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        end = theirs.fileno()
        keeper = subprocess.Popen(words, stdin=end, stdout=end, stderr=end, env={"PATH": os.defpath})
        theirs.close()
        with keeper, ours, ours.makefile("rb") as told:
            if (said := told.readline(_HEAD_BYTES)) != b"\n":
                why = said.decode(errors="replace").strip()
                raise OSError(errno.EPERM, f"this host makes no user namespace ({why})", "unshare")
            for kind, (inside, outside) in (("uid", users), ("gid", groups)):
                Path(f"/proc/{keeper.pid}/{kind}_map").write_text(f"{inside} {outside} 1\n")
            namespace = os.open(f"/proc/{keeper.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
            try:
                yield namespace
            finally:
                os.close(namespace)


async def communicate(starting: AbstractAsyncContextManager[Process], *, stdin: bytes, keep_bytes: int) -> ExecResult:
    """Implement ``Workspace.run`` over what ``Workspace.exec`` returned."""
    kept = _Head(keep_bytes), _Head(keep_bytes)
    ended, failure = Exit(), None
    async with trio.open_nursery() as nursery:
        try:
            async with starting as process:
                nursery.start_soon(_feed, process.stdin, stdin)
                nursery.start_soon(_read, process.stdout, kept[0])
                nursery.start_soon(_read, process.stderr, kept[1])
                ended = await process.wait()
        except RunnerError as error:
            failure = error  # raised below, outside the nursery, which would wrap it
    if failure is not None:
        raise failure
    return ExecResult(ended, kept[0].value, kept[1].value, cut=kept[0].cut or kept[1].cut)


class _Head:
    """The first ``limit`` bytes of a stream."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._chunks: list[bytes] = []
        self._size = 0

    def add(self, chunk: bytes) -> None:
        if self._size < self._limit:
            self._chunks.append(chunk[: self._limit - self._size])
        self._size += len(chunk)

    @property
    def value(self) -> bytes:
        return b"".join(self._chunks)

    @property
    def cut(self) -> bool:
        return self._size > self._limit


async def _feed(writer: Writer, stdin: bytes) -> None:
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):  # it closed its input, which is no error
        await writer.send_all(stdin)
        await writer.aclose()


async def _read(reader: ports.Reader, keep: _Head) -> None:
    while chunk := await reader.receive_some(_READ_BYTES):
        keep.add(chunk)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
