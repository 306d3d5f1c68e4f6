"""A workspace of ``local`` without a guest: each command runs in a bubblewrap of its own."""

from __future__ import annotations

import posixpath
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import trio

from runner.core.errors import ProviderFailed
from runner.core.model import Exit, Isolation, IsolationClass, StopStage
from runner.ports.provider import KILL_GRACE, Connection, ExecResult, Paths
from runner.sandbox import bwrap, cgroup, child_process, processes, readback
from runner.sandbox.bwrap_process import BwrapProcess, Shell, start_bwrap
from runner.sandbox.commands import RunningCommands
from runner.sandbox.volumes import Volume


class BwrapWorkspace:
    """An open workspace: the options, limits and directories that all runs of bubblewrap share."""

    def __init__(
        self,
        options: bwrap.BwrapOptions,
        shell: Shell,
        group: cgroup.ControlGroups,
        grace: float,
        paths: Paths,
        *,
        tree: int,
        volume: Volume | None = None,
    ) -> None:
        self.paths, self.tree, self.terminated = paths, tree, trio.Event()
        self._volume = volume
        self._recipe = options
        self._shell = shell
        self._group = group
        self._running = RunningCommands(grace)

    def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        on_stop: Callable[[StopStage], None] | None = None,
    ) -> AbstractAsyncContextManager[BwrapCommand]:
        where = posixpath.join(self.paths.workspace, cwd) if cwd else self.paths.workspace
        return self._exec(argv, env or {}, where, on_stop or (lambda stage: None))

    @asynccontextmanager
    async def _exec(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, on_stop: Callable[[StopStage], None]
    ) -> AsyncIterator[BwrapCommand]:
        await trio.lowlevel.checkpoint_if_cancelled()
        sandbox = start_bwrap(self._shell, self._recipe, self._group, argv, env=env, cwd=cwd)
        process = BwrapCommand(sandbox, self._group, on_stop)
        async with self._running.track(process):
            with trio.move_on_after(KILL_GRACE, shield=True):  # milliseconds, unless the host hangs
                await sandbox.begin()
            yield process

    async def kill(self) -> None:
        """End the grace of commands that are being stopped."""
        await self._running.kill()

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

    def listen(
        self, serve: Callable[[Connection], Awaitable[None]], *, port: int = 0
    ) -> AbstractAsyncContextManager[int]:
        raise ProviderFailed("a workspace without a guest cannot listen")

    async def effective(self) -> Isolation:
        async with self.exec(["/bin/sh", "-c", readback.SCRIPT]) as process:
            text = await readback.receive(process.stdout)
            host = readback.HostView(readback.namespaces(), process.uid, self._group.limits(), self._volume)
        return readback.read_back(text, host, provider="local", isolation=IsolationClass.NAMESPACES, paths=self.paths)


class BwrapCommand:
    """A command in a bubblewrap of its own."""

    def __init__(
        self, sandbox: BwrapProcess, group: cgroup.ControlGroups, on_stop: Callable[[StopStage], None]
    ) -> None:
        self._sandbox = sandbox
        self._group = group
        self._on_stop = on_stop
        self._oom_kills_before = group.oom_kills()
        self.oom_kills = 0
        self._exit: Exit | None = None
        self.stdin = sandbox.child.stdin
        self.stdout = sandbox.child.stdout
        self.stderr = sandbox.child.stderr

    @property
    def uid(self) -> int:
        """The host's user that the command runs as. Raises ``ProviderFailed`` when it has ended."""
        init = self._sandbox.init
        for pid in processes.descendants(init) if init is not None else ():
            return processes.user(pid)
        raise ProviderFailed("the command has ended")

    async def wait(self) -> Exit:
        ended = await self._sandbox.child.wait()
        if self._exit is None:
            self._exit = self._exit_of(ended)
        return self._exit

    def _exit_of(self, ended: Exit) -> Exit:
        code = self._sandbox.report().code
        self._count()
        starved = self.oom_kills > 0
        if code is not None:
            return Exit(code=code, oom=starved and code == 128 + signal.SIGKILL)
        if self._sandbox.killed or starved:
            return Exit(signal=signal.SIGKILL, oom=starved)
        complaint = self._sandbox.complaint()
        if (code := bwrap.command_not_started(self.stderr.head)) is not None:
            return Exit(code=code)
        raise ProviderFailed(f"bubblewrap {ended}: {complaint}")

    async def end(self, grace: float) -> None:
        """Send TERM to every process inside, wait ``grace`` seconds, and kill. Raises ``Escaped`` for survivors."""
        sandbox = self._sandbox
        if not sandbox.child.ended and sandbox.init is not None and not sandbox.killed:
            self._on_stop(StopStage.TERM)
            self._terminate(sandbox.init)
            with trio.move_on_after(grace):
                await sandbox.child.wait()
        self.kill()
        await sandbox.close()
        self._count()

    def kill(self) -> None:
        if not self._sandbox.child.ended and not self._sandbox.killed:
            self._on_stop(StopStage.KILL)
            self._sandbox.kill()

    def _count(self) -> None:
        self.oom_kills = self._group.oom_kills() - self._oom_kills_before

    def _terminate(self, init: int) -> None:
        inside = list(processes.descendants(init))
        tree = {init, *inside}
        processes.signal_where(inside, signal.SIGTERM, lambda pid: processes.parent(pid) in tree)
