"""A fake provider: real directories and scripted commands, for tests of failures and of timing.

A script says how each command ends, what it prints, and after how many seconds of the trio clock, so
that a test's hours cost nothing. Nothing is executed and nothing is isolated, and ``probe`` says so.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path

import trio
from msgspec import Struct, field

from runner.core.errors import Escaped, ProviderFailed, RunnerError, WorkspaceLost
from runner.core.model import Exit, Feature, Handle, Isolation, IsolationClass, Limits, StopStage
from runner.core.nurseries import open_services
from runner.ports.provider import (
    KILL_GRACE,
    STOP_GRACE,
    Connection,
    ExecResult,
    Paths,
    Probe,
    SandboxHandoff,
    SandboxSpec,
    WorkspaceRequest,
)
from runner.sandbox.directories import WorkspaceDirectories
from runner.sandbox.mounts import open_stage
from runner.sandbox.prepared_mounts import paths_on_host, prepare_mounts

_PORTS = count(40_000)


class Scripted(Struct, frozen=True):
    """How a command goes.

    ``yields_to`` is the stage that ends it; nothing ends one with ``None``, which escapes. ``leaves`` processes behind
    that have to be killed. ``fault`` is raised by ``wait`` when its time has passed.
    """

    exit: Exit = field(default_factory=lambda: Exit(code=0))
    stdout: bytes = b""
    stderr: bytes = b""
    seconds: float = 0.0
    yields_to: StopStage | None = StopStage.TERM
    leaves: bool = False
    oom_kills: int = 0
    fault: RunnerError | None = None


Script = Callable[[Sequence[str]], Scripted]


class FakeProvider:
    """``faults`` maps a method of the provider to what it raises; ``asked`` lists the commands in order.

    ``started`` lists the places of the sandboxes that were started, and ``running`` has those that were not ended.
    """

    name = "fake"

    def __init__(
        self,
        home: Path,
        script: Script = lambda argv: Scripted(),
        *,
        faults: Mapping[str, RunnerError] | None = None,
        grace: float = STOP_GRACE,
    ) -> None:
        self._directories = WorkspaceDirectories(home, self.name)
        self._script = script
        self._faults = {} if faults is None else faults
        self._grace = grace
        self._received: set[str] = set()
        self.asked: list[tuple[str, ...]] = []
        self.listening: dict[int, Callable[[trio.SocketStream], None]] = {}
        self.started: list[str] = []
        self.running: set[str] = set()

    async def probe(self) -> Probe:
        await self._reach("probe")
        missing = dict.fromkeys(set(Feature) - {Feature.WARM_POOL}, "a fake enforces nothing")
        return Probe(provider=self.name, available=True, isolation=IsolationClass.NONE, missing=missing)

    async def create(self, request: WorkspaceRequest) -> Handle:
        await self._reach("create")
        if request.limits.disk_bytes is not None:
            raise ProviderFailed("`fake` cannot limit a disk")
        return self._directories.create(request)

    @asynccontextmanager
    async def open(self, handle: Handle, spec: SandboxSpec) -> AsyncIterator[FakeWorkspace]:
        await self._reach("open")
        async with prepare_mounts(handle, spec, open_stage(None)) as prepared:
            if handle.id in self._received:
                self._received.remove(handle.id)
            else:
                self._start(handle)
            stage = FakeWorkspace(paths_on_host(prepared, spec), prepared.tree_fd, self)
            try:
                yield stage
            finally:
                with trio.CancelScope(shield=True):
                    await stage.kill()
                self.running.discard(handle.private.name)

    def _start(self, handle: Handle) -> None:
        self.started.append(handle.private.name)
        self.running.add(handle.private.name)

    @asynccontextmanager
    async def open_slot(
        self, handle: Handle, toolchains: Sequence[str], protected: Sequence[str]
    ) -> AsyncIterator[FakeSlot]:
        await self._reach("open_slot")
        self._start(handle)
        idle = FakeSlot(partial(self._reach, "ping"))
        try:
            yield idle
        finally:
            if not idle.detached:
                self.running.discard(handle.private.name)

    async def assign(self, handle: Handle, request: WorkspaceRequest) -> Handle:
        await self._reach("assign")
        return self._directories.assign(handle, request)

    def receive(self, handle: Handle, handoff: SandboxHandoff) -> None:
        self._received.add(handle.id)

    async def chown_to_workspace_user(self, handle: Handle) -> None:
        await self._reach("chown")
        self._directories.chown_to_workspace_user(handle)

    async def retrieve(self, handle: Handle) -> None:
        await trio.lowlevel.checkpoint()  # they are here

    async def list_owned(self, nonce: str) -> list[Handle]:
        await self._reach("list_owned")
        return self._directories.list_owned(nonce)

    async def evict(self, handle: Handle) -> None:
        await self._reach("evict")
        self.running.discard(handle.private.name)

    async def destroy(self, handle: Handle) -> None:
        await self._reach("destroy")
        self.running.discard(handle.private.name)
        self._directories.destroy(handle)

    def dial(self, port: int) -> trio.SocketStream:
        """Connect to a port that an open workspace listens on. Raises ``ConnectionRefusedError``."""
        if port not in self.listening:
            raise ConnectionRefusedError
        near, far = trio.socket.socketpair()
        self.listening[port](trio.SocketStream(far))
        return trio.SocketStream(near)

    def play(self, argv: Sequence[str], on_stop: Callable[[StopStage], None]) -> FakeProcess:
        self.asked.append(tuple(argv))
        return FakeProcess(self._script(argv), self._grace, on_stop)

    async def _reach(self, method: str) -> None:
        await trio.lowlevel.checkpoint()
        if fault := self._faults.get(method):
            raise fault


class FakeSlot:
    """A slot: a sandbox without commands."""

    def __init__(self, ping: Callable[[], Awaitable[None]]) -> None:
        self.ping = ping
        self.detached = False

    async def wait_ended(self) -> None:
        await trio.sleep_forever()

    def detach(self) -> SandboxHandoff:
        self.detached = True
        return SandboxHandoff({})


class FakeWorkspace:
    """An open workspace of ``fake``."""

    def __init__(self, paths: Paths, tree: int, provider: FakeProvider) -> None:
        self._provider = provider
        self._lost = False
        self._running: set[FakeProcess] = set()
        self.paths, self.tree, self.terminated = paths, tree, trio.Event()

    async def refresh(self) -> None:
        await trio.lowlevel.checkpoint()

    def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        on_stop: Callable[[StopStage], None] | None = None,
    ) -> AbstractAsyncContextManager[FakeProcess]:
        return self._exec(argv, on_stop or (lambda stage: None))

    @asynccontextmanager
    async def _exec(self, argv: Sequence[str], on_stop: Callable[[StopStage], None]) -> AsyncIterator[FakeProcess]:
        if self._lost:
            raise WorkspaceLost("the fake's sandbox was killed")
        process = self._provider.play(argv, on_stop)
        self._running.add(process)
        try:
            yield process
        finally:
            with trio.CancelScope(shield=True):
                try:
                    if await process.end() is StopStage.SANDBOX:
                        self._lost = True
                finally:
                    self._running.remove(process)
                    process.over.set()

    async def kill(self) -> None:
        """End the grace of commands that are being stopped."""
        for process in self._running:
            process.hurried.set()
        with trio.move_on_after(KILL_GRACE):
            for process in tuple(self._running):
                await process.over.wait()

    @asynccontextmanager
    async def listen(self, serve: Callable[[Connection], Awaitable[None]], *, port: int = 0) -> AsyncIterator[int]:
        async with open_services() as services:
            number = port or next(_PORTS)
            self._provider.listening[number] = lambda stream: services.start_soon(_serve, serve, stream)
            try:
                yield number
            finally:
                del self._provider.listening[number]

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


async def _serve(serve: Callable[[Connection], Awaitable[None]], stream: trio.SocketStream) -> None:
    async with stream:
        with suppress(trio.BrokenResourceError):
            await serve(stream)


class FakeProcess:
    """A scripted command. Prints all its output at once; ends when its time has passed."""

    def __init__(self, scripted: Scripted, grace: float, on_stop: Callable[[StopStage], None]) -> None:
        self.scripted = scripted
        self.stdin = Sunk()
        self.stdout = Printed(scripted.stdout)
        self.stderr = Printed(scripted.stderr)
        self.oom_kills = scripted.oom_kills
        self.hurried = trio.Event()  # set when the sandbox closes
        self.over = trio.Event()  # set when the block around the command has ended
        self._on_stop = on_stop
        self._waits = {StopStage.TERM: grace, StopStage.KILL: KILL_GRACE, StopStage.SANDBOX: KILL_GRACE}
        self._ends = trio.current_time() + scripted.seconds
        self._killed: Exit | None = None

    async def wait(self) -> Exit:
        await trio.sleep_until(self._ends)
        if self.scripted.fault is not None:
            raise self.scripted.fault
        return self._killed or self.scripted.exit

    async def end(self) -> StopStage | None:
        """Go up the ladder to the stage that the script yields to, and return that. Raises ``Escaped``."""
        if self._ends <= trio.current_time():
            if self.scripted.leaves:
                self._on_stop(StopStage.KILL)
            return None
        for stage, seconds in self._waits.items():
            if stage is StopStage.TERM and self.hurried.is_set():
                continue
            self._on_stop(stage)
            if stage is self.scripted.yields_to:
                self._killed = Exit(signal=15 if stage is StopStage.TERM else 9)
                self._ends = trio.current_time()
                return stage
            with trio.move_on_after(min(seconds, self._ends - trio.current_time())):
                await (self.hurried if stage is StopStage.TERM else trio.Event()).wait()
            if self._ends <= trio.current_time():
                return stage
        raise Escaped("killed processes of the command still live in cgroup `/fake`: 4711")


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
