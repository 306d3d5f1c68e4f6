"""A workspace whose commands are run by a guest: what all providers that have one share."""

from __future__ import annotations

import posixpath
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace

import trio

from runner.core.errors import WorkspaceLost
from runner.core.model import Exit, Isolation, IsolationClass, Limits, StopStage
from runner.guest.client import Command, Guest, open_guest
from runner.guest.framing import KEEP, Request, Shield
from runner.ports.provider import KILL_GRACE, Connection, ExecResult, Paths, Reader, Writer
from runner.sandbox import cgroup, child_process, readback
from runner.sandbox.volumes import Volume

NO_GUEST = "this installation was made without a compiler"
OOM_SCORE = 1000  # whatever a command is, it is the better victim: without the guest all statuses are lost


@dataclass(frozen=True)
class Surroundings:
    """What a guest cannot tell about its sandbox. ``uid`` is the host's, ``volume`` as for ``Outside``.

    ``user`` is there when commands run as another one than the guest, and is the sandbox's. The limits ``inside`` are
    those that the sandbox leaves to its commands: of processes by the guest, of memory when its kernel has its share.
    """

    provider: str
    isolation: IsolationClass
    uid: int
    paths: Paths
    tree: int
    env: Mapping[str, str]
    group: cgroup.Group
    grace: float
    user: int | None = None
    inside: Limits = field(default_factory=Limits)
    volume: Volume | None = None

    def limits(self) -> Limits:
        """What holds."""
        found, inside = self.group.limits(), self.inside
        if inside.memory_bytes is not None and found.memory_bytes is not None:
            found = replace(found, memory_bytes=min(found.memory_bytes, inside.memory_bytes))
        return found if inside.pids is None else replace(found, pids=inside.pids)

    def request(self, argv: Sequence[str], env: Mapping[str, str], place: str) -> Request:
        user = KEEP if self.user is None else self.user
        pids = self.inside.pids
        limits = {} if pids is None else {resource.RLIMIT_NPROC: (pids, pids)}
        return Request(argv, env, place, user, user, oom_score_adj=OOM_SCORE, limits=limits)


def open_workspace(
    stream: trio.abc.Stream, around: Surroundings, *, what: str, kill_sandbox: Callable[[], None]
) -> AbstractAsyncContextManager[GuestWorkspace]:
    """The workspace of a guest that was started with the other end of ``stream`` as its channel."""
    streams = [stream]

    async def connect() -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        if not streams:
            raise WorkspaceLost(f"the guest of {what} has ended")
        return streams.pop()

    return open_reached(connect, around, what=what, kill_sandbox=kill_sandbox)


@asynccontextmanager
async def open_reached(
    connect: Callable[[], Awaitable[trio.abc.Stream]],
    around: Surroundings,
    *,
    what: str,
    kill_sandbox: Callable[[], None],
    nonce: bytes | None = None,
) -> AsyncIterator[GuestWorkspace]:
    """The workspace of a guest whose connections ``connect`` gives, as for ``open_guest``."""
    async with open_guest(connect, what=what, kill_sandbox=kill_sandbox, nonce=nonce) as guest:
        workspace = GuestWorkspace(guest, around)
        try:
            yield workspace
        finally:
            with trio.CancelScope(shield=True):
                await workspace.kill()


class GuestWorkspace:
    """An open workspace with a guest in it."""

    def __init__(self, guest: Guest, around: Surroundings) -> None:
        self._guest = guest
        self._around = around
        self._stopping: set[Counted] = set()
        self.terminated = trio.Event()

    @property
    def paths(self) -> Paths:
        return self._around.paths

    @property
    def tree(self) -> int:
        return self._around.tree

    async def ping(self) -> None:
        """Hear from inside. Raises ``WorkspaceLost``."""
        await self._guest.ping()

    async def kill(self) -> None:
        """End the grace of commands that are being stopped, and wait until they are."""
        self._guest.hurry()
        with trio.move_on_after(KILL_GRACE):
            for command in tuple(self._stopping):
                await command.over.wait()

    def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        on_stop: Callable[[StopStage], None] | None = None,
    ) -> AbstractAsyncContextManager[Counted]:
        around = self._around
        place = posixpath.join(around.paths.workspace, cwd) if cwd else around.paths.workspace
        words = {**around.env, **(env or {}), "PWD": place}
        return self._exec(around.request(argv, words, place), on_stop)

    @asynccontextmanager
    async def _exec(self, request: Request, on_stop: Callable[[StopStage], None] | None) -> AsyncIterator[Counted]:
        counted = Counted(self._around.group)
        try:
            async with self._guest.exec(request, grace=self._around.grace, on_stop=on_stop) as counted.command:
                try:
                    yield counted
                finally:
                    self._stopping.add(counted)
        finally:
            self._stopping.discard(counted)
            counted.count()
            counted.over.set()

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        keep_bytes: int = 1 << 20,
    ) -> ExecResult:
        return await child_process.communicate(self.exec(argv, env=env, cwd=cwd), stdin=stdin, keep_bytes=keep_bytes)

    @asynccontextmanager
    async def listen(self, serve: Callable[[Connection], Awaitable[None]], *, port: int = 0) -> AsyncIterator[int]:
        async with self._guest.listen(port, serve) as listener:
            yield listener.port

    async def effective(self) -> Isolation:
        around = self._around
        async with self.exec(["/bin/sh", "-c", readback.SCRIPT]) as process:
            text = await readback.receive(process.stdout)
            await process.stdin.aclose()
            await process.wait()
        kernel = readback.kernel() if around.isolation >= IsolationClass.KERNEL else None
        closed = Shield.CALLS in self._guest.shield
        outside = readback.Outside(readback.namespaces(), around.uid, around.limits(), around.volume, kernel, closed)
        seen = readback.read_back(
            text, outside, provider=around.provider, isolation=around.isolation, paths=around.paths
        )
        return replace(seen, notes=(*seen.notes, *_weaknesses(self._guest.shield, around)))


class Counted:
    """A command, and what the kernel killed in its sandbox for want of memory since it began."""

    command: Command

    def __init__(self, group: cgroup.Group) -> None:
        self._group = group
        self._before = group.oom_kills()
        self.oom_kills = 0
        self.over = trio.Event()  # set when the block around the command has ended

    @property
    def stdin(self) -> Writer:
        return self.command.stdin

    @property
    def stdout(self) -> Reader:
        return self.command.stdout

    @property
    def stderr(self) -> Reader:
        return self.command.stderr

    async def wait(self) -> Exit:
        ended = await self.command.wait()
        self.count()
        killed = ended.signal == signal.SIGKILL or ended.code == 128 + signal.SIGKILL  # a shell's word for its child
        return replace(ended, oom=True) if self.oom_kills and killed else ended

    def count(self) -> None:
        self.oom_kills = self._group.oom_kills() - self._before


def _weaknesses(shield: Shield, around: Surroundings) -> tuple[str, ...]:
    notes = []
    if not shield & Shield.SIGNALS:
        reached = "each other and the guest" if around.user is None else "each other"
        notes.append(f"commands of one user can signal {reached}: no Landlock with signal scope here")
    if around.inside.memory_bytes is not None:
        notes.append("when its commands exceed the memory limit, the sandbox is killed whole")
    if not shield & Shield.INIT:
        notes.append("the guest can be killed from outside its workspace, which ends every command in it")
    return tuple(notes)
