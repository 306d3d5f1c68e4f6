"""Provider ``fake``: real directories and scripted commands, for tests of what goes wrong and how long things take.

A script says how each command ends, what it prints, and after how many seconds of the trio clock, so
that a test's hours cost nothing. Nothing is executed and nothing is isolated, and ``probe`` says so.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from runner.errors import RunnerError
from runner.model import Exit, Feature, Handle, Isolation, IsolationClass, Limits
from runner.ports.provider import STOP_GRACE, ExecResult, Opening, Paths, Probe, WorkspaceRequest
from runner.providers._directories import Directories
from runner.providers._opening import Room, open_room
from runner.settings import Settings


@dataclass(frozen=True)
class Scripted:
    """How a command goes. One with ``obeys`` false ignores TERM, and is killed after the grace."""

    exit: Exit = field(default_factory=lambda: Exit(code=0))
    stdout: bytes = b""
    stderr: bytes = b""
    seconds: float = 0.0
    obeys: bool = True


Script = Callable[[Sequence[str]], Scripted]


def provider(settings: Settings) -> Fake:
    return Fake(settings.home)


class Fake:
    """``faults`` maps a method of the provider to what it raises; ``asked`` lists the commands in order."""

    name = "fake"

    def __init__(
        self,
        home: Path,
        script: Script = lambda argv: Scripted(),
        *,
        faults: Mapping[str, RunnerError] | None = None,
        grace: float = STOP_GRACE,
    ) -> None:
        self._directories = Directories(home, self.name)
        self._script = script
        self._faults = faults or {}
        self._grace = grace
        self.asked: list[tuple[str, ...]] = []

    async def probe(self) -> Probe:
        await self._reach("probe")
        return Probe(self.name, True, IsolationClass.NONE, dict.fromkeys(Feature, "a fake enforces nothing"))

    async def create(self, request: WorkspaceRequest) -> Handle:
        await self._reach("create")
        return self._directories.create(request)

    @asynccontextmanager
    async def open(self, handle: Handle, opening: Opening) -> AsyncIterator[Stage]:
        await self._reach("open")
        async with open_room(handle, opening, staged=False) as room:
            yield Stage(room, self)

    async def give(self, handle: Handle) -> None:
        await self._reach("give")
        self._directories.give(handle)

    async def list_owned(self, nonce: str) -> list[Handle]:
        await self._reach("list_owned")
        return self._directories.owned(nonce)

    async def destroy(self, handle: Handle) -> None:
        await self._reach("destroy")
        self._directories.destroy(handle)

    def play(self, argv: Sequence[str]) -> Played:
        self.asked.append(tuple(argv))
        return Played(self._script(argv), self._grace)

    async def _reach(self, method: str) -> None:
        await trio.lowlevel.checkpoint()
        if fault := self._faults.get(method):
            raise fault


class Stage:
    """An open workspace of ``fake``."""

    def __init__(self, room: Room, provider: Fake) -> None:
        self._provider = provider
        self.paths = Paths(room.tree.path, room.output.path, "/incident", room.runner.path, room.home.path)

    def exec(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> AbstractAsyncContextManager[Played]:
        return self._exec(argv)

    @asynccontextmanager
    async def _exec(self, argv: Sequence[str]) -> AsyncIterator[Played]:
        process = self._provider.play(argv)
        try:
            yield process
        finally:
            with trio.CancelScope(shield=True):
                await process.end()

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        keep_bytes: int = 1 << 20,
    ) -> ExecResult:
        async with self.exec(argv) as process:
            ended = await process.wait()
            out, err = process.scripted.stdout, process.scripted.stderr
        return ExecResult(ended, out[:keep_bytes], err[:keep_bytes], cut=max(len(out), len(err)) > keep_bytes)

    async def effective(self) -> Isolation:
        return Isolation(
            isolation=IsolationClass.NONE,
            provider="fake",
            uid=0,
            capabilities="unknown",
            no_new_privileges=False,
            shared_namespaces=(),
            interfaces=None,
            read_only=(),
            limits=Limits(),
            notes=("scripted",),
        )


class Played:
    """A scripted command. Its output is there at once; it ends when its time has passed."""

    def __init__(self, scripted: Scripted, grace: float) -> None:
        self.scripted = scripted
        self.stdin = Sunk()
        self.stdout = Printed(scripted.stdout)
        self.stderr = Printed(scripted.stderr)
        self._grace = grace
        self._ends = trio.current_time() + scripted.seconds
        self._killed: Exit | None = None

    async def wait(self) -> Exit:
        await trio.sleep_until(self._ends)
        return self._killed or self.scripted.exit

    async def end(self) -> None:
        left = self._ends - trio.current_time()
        if left <= 0:
            return
        if self.scripted.obeys:
            self._killed = Exit(signal=15)
        else:
            await trio.sleep(min(left, self._grace))
            self._killed = Exit(signal=9) if left > self._grace else None
        self._ends = trio.current_time()


class Printed:
    def __init__(self, text: bytes) -> None:
        self._text = text

    async def receive_some(self, max_bytes: int) -> bytes:
        await trio.lowlevel.checkpoint()
        chunk, self._text = self._text[:max_bytes], self._text[max_bytes:]
        return chunk


class Sunk:
    async def send_all(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()
