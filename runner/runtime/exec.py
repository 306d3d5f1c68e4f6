"""Run a command with its output kept in files: bounded, streams apart, the end never lost.

The stages of stopping it, and kills for memory, become events of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

import trio
from msgspec import Struct
from msgspec.structs import replace

from runner.core.errors import WorkspaceLost
from runner.core.model import Exit, StopReason, StopStage
from runner.core.redact import Redactor, Stream
from runner.events import events as ev
from runner.ports.provider import Process, Reader, Workspace, Writer
from runner.runtime.context import RunContext
from runner.runtime.lease_holder import Emit
from runner.runtime.secrets import variables as secret_variables

MAX_LOG = 64 << 20  # bytes of a stream that are kept from its beginning
TAIL = 64 << 10  # bytes that are kept from its end when it was cut
CHUNK = 1 << 20
_NOTHING = Redactor()
DRAIN = 2.0  # seconds for what is left in the pipes after the command has ended, if a descendant holds them


class Log(Protocol):
    """A destination of a command's output."""

    def write(self, chunk: bytes) -> None: ...


class LogFile:
    """One stream of a step on disk: its beginning, a marker saying how much was cut, and its end.

    ``file`` is what the path leads to, for one that was opened already, without a buffer.
    """

    def __init__(self, path: Path, limit: int = MAX_LOG, *, file: BinaryIO | None = None) -> None:
        self.path = path
        self._file: BinaryIO = path.open("ab", buffering=0) if file is None else file
        self._limit = limit
        self._room = limit - self._file.tell()
        self._tail = bytearray()
        self._cut = 0

    @property
    def written(self) -> int:
        """Return the number of bytes written, including those that were cut."""
        return self._limit - self._room + self._cut

    def write(self, chunk: bytes) -> None:
        if self._room >= len(chunk):
            self._put(chunk)
            self._room -= len(chunk)
            return
        kept, rest = chunk[: self._room], chunk[self._room :]
        self._put(kept)
        self._room = 0
        self._cut += len(rest)
        self._tail += rest[-TAIL:]
        del self._tail[:-TAIL]

    def close(self) -> None:
        with self._file:
            if dropped := self._cut - len(self._tail):
                self._put(b"\n[runner: %d bytes cut here]\n" % dropped)
            if self._tail:
                self._put(self._tail)

    def _put(self, data: bytes | bytearray) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            error.filename = str(self.path)  # a disk that is full does not say which
            raise


class Shared(Struct, frozen=True):
    """A log that copies every piece to several logs."""

    logs: tuple[Log, ...]

    def write(self, chunk: bytes) -> None:
        for log in self.logs:
            log.write(chunk)


class RedactedLog:
    """A log of several streams, from which together secrets are taken out: each may have shown a part of one."""

    def __init__(self, log: LogFile, redactor: Redactor) -> None:
        self._log, self._through = log, redactor.stream()

    def write(self, chunk: bytes) -> None:
        self._log.write(self._through.feed(chunk))

    def close(self) -> None:
        try:
            self._log.write(self._through.end())
        finally:
            self._log.close()


@contextmanager
def open_logs(directory: Path, step: str, limit: int = MAX_LOG) -> Iterator[tuple[LogFile, LogFile]]:
    """Open the two log files of a step for appending; each keeps ``limit`` bytes and a tail."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = (directory / f"{step}.{stream}" for stream in ("stdout", "stderr"))
    out, err = (LogFile(path, limit) for path in paths)
    with closing(out), closing(err):
        yield out, err


def written(logs: tuple[LogFile, LogFile]) -> tuple[int, int]:
    return logs[0].written, logs[1].written


def blame(run: RunContext, step: str, logs: tuple[LogFile, LogFile], since: tuple[int, int]) -> None:
    """Record where the output of a failed command lies, which started at ``written`` bytes."""
    out, err = zip(since, written(logs), strict=True)
    run.events.pending.append(ev.CommandFailed(step, out, err))


async def run_command(
    run: RunContext,
    workspace: Workspace,
    argv: Sequence[str],
    logs: tuple[Log, Log],
    *,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    seconds: float = math.inf,
) -> Exit:
    """Run a command of the current step by ``run_logged``.

    Every stop stage is an event by the time this call ends, but stopping does not wait for the journal. Raises
    ``trio.TooSlowError`` when the command was stopped after ``seconds``.
    """
    current_step = run.step
    deadline = trio.current_time() + seconds
    send, receive = trio.open_memory_channel[ev.Event](math.inf)

    def on_stop(stage: StopStage, ended: bool) -> None:
        reached = current_step.explain(stage, deadline)
        send.send_nowait(replace(reached, reason=StopReason.LEFT_RUNNING) if ended else reached)
        if stage is StopStage.SANDBOX:
            run.sandboxes.begin_close()

    def on_oom(count: int) -> None:
        send.send_nowait(ev.OomKilled(current_step.step, count))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(emit_all, receive, run.emit)
        with send, trio.move_on_at(deadline):
            try:
                return await run_logged(
                    workspace,
                    argv,
                    logs,
                    env={**(env or {}), **await secret_variables(run, workspace)},
                    stdin=stdin,
                    on_stop=on_stop,
                    on_oom=on_oom,
                    redactor=run.deps.redact,
                )
            except* WorkspaceLost:
                current_step.end_unknown = True
                run.sandboxes.begin_close()
                raise
    raise trio.TooSlowError


async def emit_all(events: trio.MemoryReceiveChannel[ev.Event], emit: Emit) -> None:
    """Emit events in order, all of them even if cancelled, until the other end of the channel is closed."""
    with trio.CancelScope(shield=True):
        async for event in events:
            await emit(event)


async def run_logged(
    workspace: Workspace,
    argv: Sequence[str],
    logs: tuple[Log, Log],
    *,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    on_stop: Callable[[StopStage, bool], None] = lambda stage, ended: None,
    on_oom: Callable[[int], None] = lambda count: None,
    redactor: Redactor = _NOTHING,
) -> Exit:
    """Run a command to its end. Cancelling stops its whole tree and keeps what it prints, also while it is stopped.

    ``on_stop`` is told each stage of ending it, and whether the command itself had ended by then; ``on_oom`` at the end
    how many processes the kernel killed for want of memory, if any. The logs get what ``redactor`` lets pass. Raises
    ``WorkspaceLost`` in a group.
    """
    exit: Exit | None = None
    process: Process | None = None
    try:
        async with trio.open_nursery() as nursery:
            copied = trio.Event(), trio.Event()
            async with workspace.exec(argv, env=env, on_stop=lambda stage: on_stop(stage, exit is not None)) as process:
                nursery.start_soon(_copy, process.stdout, logs[0], redactor.stream(), copied[0])
                nursery.start_soon(_copy, process.stderr, logs[1], redactor.stream(), copied[1])
                if stdin:
                    nursery.start_soon(_feed, process.stdin, stdin)
                else:
                    await _feed(process.stdin, stdin)
                exit = await process.wait()
                with trio.move_on_after(DRAIN):
                    for each in copied:
                        if not each.is_set():
                            await each.wait()
    finally:
        if process is not None and process.oom_kills:
            on_oom(process.oom_kills)
    return exit


async def _feed(stdin: Writer, content: bytes) -> None:
    """Write a command's input; a command that does not read it is no error."""
    try:
        if content:
            await stdin.send_all(content)
        await stdin.aclose()
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass


async def _copy(stream: Reader, log: Log, through: Stream, copied: trio.Event) -> None:
    """Ends at the latest when the block around the command has ended, for then there is end of file."""
    with trio.CancelScope(shield=True):
        try:
            while chunk := await stream.receive_some(CHUNK):
                log.write(through.feed(chunk))
        finally:
            if last := through.end():
                log.write(last)
    copied.set()
