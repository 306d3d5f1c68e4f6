"""Running a command with its output kept in files: bounded, streams apart, the end never lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import trio

from runner.model import Exit
from runner.ports.provider import Process, Reader, Workspace, Writer

MAX_LOG = 64 << 20  # bytes of a stream that are kept from its beginning
TAIL = 64 << 10  # bytes that are kept from its end when it was cut
CHUNK = 1 << 20
DRAIN = 2.0  # seconds for what is left in the pipes after the command has ended, if a descendant holds them


class LogFile:
    """One stream of a step on disk: its beginning, a marker saying how much was cut, and its end."""

    def __init__(self, path: Path, limit: int = MAX_LOG) -> None:
        self.path = path
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._room = limit - self._file.tell()
        self._tail = bytearray()
        self._cut = 0

    def write(self, chunk: bytes) -> None:
        if self._room >= len(chunk):
            self._file.write(chunk)
            self._room -= len(chunk)
            return
        kept, rest = chunk[: self._room], chunk[self._room :]
        self._file.write(kept)
        self._room = 0
        self._cut += len(rest)
        self._tail += rest[-TAIL:]
        del self._tail[:-TAIL]

    def close(self) -> None:
        if dropped := self._cut - len(self._tail):
            self._file.write(b"\n[runner: %d bytes cut here]\n" % dropped)
        self._file.write(self._tail)
        self._file.close()


@contextmanager
def open_logs(directory: Path, step: str) -> Iterator[tuple[LogFile, LogFile]]:
    """The two log files of a step, appended to when it has several commands."""
    directory.mkdir(parents=True, exist_ok=True)
    out, err = LogFile(directory / f"{step}.stdout"), LogFile(directory / f"{step}.stderr")
    try:
        yield out, err
    finally:
        out.close()
        err.close()


async def run_logged(
    workspace: Workspace,
    argv: Sequence[str],
    logs: tuple[LogFile, LogFile],
    *,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
) -> Exit:
    """Run a command to its end. Cancelling stops its whole tree and keeps what it prints, also while it is stopped."""
    async with trio.open_nursery() as nursery:
        copied = trio.Event()
        async with workspace.exec(argv, env=env) as process:
            nursery.start_soon(_feed, process.stdin, stdin)
            nursery.start_soon(_copy_both, process, logs, copied)
            exit = await process.wait()
            with trio.move_on_after(DRAIN):
                await copied.wait()
    return exit


async def _copy_both(process: Process, logs: tuple[LogFile, LogFile], copied: trio.Event) -> None:
    """Ends at the latest when the block around the command has ended, for then there is end of file."""
    async with trio.open_nursery() as readers:
        readers.cancel_scope.shield = True
        readers.start_soon(_copy, process.stdout, logs[0])
        readers.start_soon(_copy, process.stderr, logs[1])
    copied.set()


async def _feed(stdin: Writer, content: bytes) -> None:
    """A command that does not read its input is no error."""
    try:
        if content:
            await stdin.send_all(content)
        await stdin.aclose()
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass


async def _copy(stream: Reader, log: LogFile) -> None:
    while chunk := await stream.receive_some(CHUNK):
        log.write(chunk)
