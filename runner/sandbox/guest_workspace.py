"""A workspace whose commands are run by a guest, as all providers have it."""

from __future__ import annotations

import posixpath
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import trio
from msgspec import Struct
from msgspec.structs import replace

from runner.core.errors import ProviderFailed, WorkspaceLost
from runner.core.model import Exit, Isolation, IsolationClass, Limits, StopStage
from runner.guest.client import Command, Guest, open_guest
from runner.guest.framing import KEEP, Request, Shield
from runner.ports.provider import KILL_GRACE, Connection, ExecResult, Paths, Reader, Writer
from runner.sandbox import child_process, readback
from runner.sandbox.cgroup import Counters
from runner.sandbox.volumes import Volume

OOM_SCORE = 1000  # commands are killed before the guest, with which all statuses would be lost


class SandboxContext(Struct, frozen=True, kw_only=True):
    """Facts of a sandbox that its guest cannot know. ``uid`` is the host's, ``volume`` as for ``HostView``.

    ``user`` is set when commands run as another user than the guest, and is the sandbox's. ``command_limits`` are what
    the sandbox leaves to its commands: processes limited by the guest, memory less the share of the sandbox's kernel.
    ``closed_interface`` is one of the network's that was proved to lead nowhere. ``notes`` are those of ``Isolation``.
    """

    provider: str
    isolation: IsolationClass
    uid: int
    paths: Paths
    tree: int
    env: Mapping[str, str]
    group: Counters
    grace: float
    user: int | None = None
    command_limits: Limits = Limits()
    volume: Volume | None = None
    closed_interface: str | None = None
    notes: tuple[str, ...] = ()
    refresh: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
    before_exec: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint

    def limits(self) -> Limits:
        """Return the limits in effect for commands."""
        found, inner = self.group.limits(), self.command_limits
        if inner.memory_bytes is not None and found.memory_bytes is not None:
            found = replace(found, memory_bytes=min(found.memory_bytes, inner.memory_bytes))
        return found if inner.pids is None else replace(found, pids=inner.pids)

    def request(self, argv: Sequence[str], env: Mapping[str, str], directory: str) -> Request:
        user = KEEP if self.user is None else self.user
        pids = self.command_limits.pids
        limits = {} if pids is None else {resource.RLIMIT_NPROC: (pids, pids)}
        return Request(argv=argv, env=env, cwd=directory, uid=user, gid=user, oom_score_adj=OOM_SCORE, limits=limits)


def open_workspace(
    stream: trio.SocketStream,
    context: SandboxContext,
    *,
    what: str,
    kill_sandbox: Callable[[], None],
    complaint: Callable[[], str] | None = None,
) -> AbstractAsyncContextManager[GuestWorkspace]:
    """Open the workspace of a guest of this kernel that has the other end of ``stream`` as its channel."""
    streams = [stream]

    async def connect() -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        if not streams:
            raise WorkspaceLost(f"the guest of {what} has ended")
        return streams.pop()

    return open_dialling_guest(
        connect, context, what=what, kill_sandbox=kill_sandbox, hands_over=True, complaint=complaint
    )


@asynccontextmanager
async def open_dialling_guest(
    connect: Callable[[], Awaitable[trio.abc.Stream]],
    context: SandboxContext,
    *,
    what: str,
    kill_sandbox: Callable[[], None],
    nonce: bytes | None = None,
    hands_over: bool = False,
    complaint: Callable[[], str] | None = None,
) -> AsyncIterator[GuestWorkspace]:
    """Open the workspace of a guest whose connections come from ``connect``, as for ``open_guest``.

    Raises ``ProviderFailed`` when no guest answers, with the ``complaint`` of what should have started it.
    """
    opened = open_guest(connect, what=what, kill_sandbox=kill_sandbox, nonce=nonce, hands_over=hands_over)
    async with AsyncExitStack() as stack:
        try:
            guest = await stack.enter_async_context(opened)
            await context.group.watch(guest)
        except WorkspaceLost as lost:
            why = complaint() if complaint else lost.message
            raise ProviderFailed(f"the guest of {what} does not start: {why}") from lost
        workspace = GuestWorkspace(guest, context)
        try:
            yield workspace
        finally:
            with trio.CancelScope(shield=True):
                await workspace.kill()


class GuestWorkspace:
    """An open workspace with a guest in it."""

    def __init__(self, guest: Guest, context: SandboxContext) -> None:
        self.guest = guest
        self._context = context
        self._stopping: set[GuestProcess] = set()
        self.terminated = trio.Event()

    @property
    def paths(self) -> Paths:
        return self._context.paths

    @property
    def tree(self) -> int:
        return self._context.tree

    async def refresh(self) -> None:
        await self._context.refresh()

    async def ping(self) -> None:
        """Check that the guest answers. Raises ``WorkspaceLost``."""
        await self.guest.ping()

    async def kill(self) -> None:
        """End the grace of commands that are being stopped, and wait for them."""
        self.guest.hurry()
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
        grace: float | None = None,
    ) -> AbstractAsyncContextManager[GuestProcess]:
        context = self._context
        directory = posixpath.join(context.paths.workspace, cwd) if cwd else context.paths.workspace
        whole = {**context.env, **(env or {}), "PWD": directory}
        patience = context.grace if grace is None else grace
        return self._exec(context.request(argv, whole, directory), on_stop, patience)

    @asynccontextmanager
    async def _exec(
        self, request: Request, on_stop: Callable[[StopStage], None] | None, grace: float
    ) -> AsyncIterator[GuestProcess]:
        await self._context.before_exec()
        process = GuestProcess(self._context.group)
        try:
            async with self.guest.exec(request, grace=grace, on_stop=on_stop) as process.command:
                try:
                    yield process
                finally:
                    self._stopping.add(process)
        finally:
            self._stopping.discard(process)
            with trio.CancelScope(shield=True):
                await process.count()
            process.over.set()

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
        async with self.guest.listen(port, serve) as listener:
            yield listener.port

    async def effective(self) -> Isolation:
        context = self._context
        async with self.exec(["/bin/sh", "-c", readback.SCRIPT]) as process:
            text = await readback.receive(process.stdout)
            await process.stdin.aclose()
            await process.wait()
        kernel = readback.kernel() if context.isolation >= IsolationClass.KERNEL else None
        filtered = Shield.CALLS in self.guest.shield
        host = readback.HostView(
            namespaces=readback.namespaces(),
            uid=context.uid,
            limits=context.limits(),
            volume=context.volume,
            kernel=kernel,
            filtered=filtered,
        )
        seen = readback.read_back(
            text, host, provider=context.provider, isolation=context.isolation, paths=context.paths
        )
        seen = replace(seen, notes=(*seen.notes, *context.notes, *_weaknesses(self.guest.shield, context)))
        return seen if context.closed_interface is None else _without_closed(seen, context.closed_interface)


def _without_closed(seen: Isolation, interface: str) -> Isolation:
    if interface not in (seen.interfaces or ()):
        return seen
    note = f"interface {interface} is closed by the cluster: nothing answered a look from inside"
    return replace(
        seen, interfaces=tuple(name for name in seen.interfaces or () if name != interface), notes=(*seen.notes, note)
    )


class GuestProcess:
    """A command, with a count of the processes that the kernel killed in its sandbox for lack of memory."""

    command: Command

    def __init__(self, group: Counters) -> None:
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
        await self.count()
        killed = ended.signal == signal.SIGKILL or ended.code == 128 + signal.SIGKILL  # as a shell reports its child
        return replace(ended, oom=True) if self.oom_kills and killed else ended

    async def count(self) -> None:
        await self._group.update()
        self.oom_kills = self._group.oom_kills() - self._before


def _weaknesses(shield: Shield, context: SandboxContext) -> tuple[str, ...]:
    notes = []
    if not shield & Shield.SIGNALS:
        reached = "each other and the guest" if context.user is None else "each other"
        notes.append(f"commands of one user can signal {reached}: no Landlock with signal scope here")
    if context.command_limits.memory_bytes is not None:
        notes.append("when its commands exceed the memory limit, the sandbox is killed whole")
    if not shield & Shield.INIT:
        notes.append("the guest can be killed from outside its workspace, which ends every command in it")
    return tuple(notes)
