"""A workspace of ``process`` without a guest: every process carries a tag that its descendants inherit.

They keep it in new sessions and when their parent ends. The tag is a soft limit that nothing else uses. A process that
changes its tag on purpose lives until the workspace is closed, and forever if it clears its environment too and the
runner is not root.
"""

from __future__ import annotations

import os
import resource
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path

import trio

from runner.core.errors import Escaped, ProviderFailed
from runner.core.model import Exit, Isolation, IsolationClass, StopStage
from runner.ports.provider import KILL_GRACE, Connection, ExecResult
from runner.safefs import trees
from runner.sandbox import cgroup, child_process, processes, readback
from runner.sandbox.commands import RunningCommands
from runner.sandbox.guest_workspace import SandboxContext

_TAG_LIMIT = resource.RLIMIT_MSGQUEUE


@asynccontextmanager
async def open_host_workspace(context: SandboxContext) -> AsyncIterator[HostWorkspace]:
    workspace = HostWorkspace(context)
    try:
        yield workspace
    finally:
        with trio.CancelScope(shield=True):
            await workspace.kill()


class HostWorkspace:
    """An open workspace of ``process``, whose paths are this host's."""

    def __init__(self, context: SandboxContext) -> None:
        self._uid = context.uid if trees.can_chown() else None
        self._group = context.group
        self._running = RunningCommands(context.grace)
        self._env = context.env
        self.paths, self.tree, self.terminated = context.paths, context.tree, trio.Event()

    def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        on_stop: Callable[[StopStage], None] | None = None,
    ) -> AbstractAsyncContextManager[TaggedProcess]:
        where = os.path.join(self.paths.workspace, cwd) if cwd else self.paths.workspace
        return self._exec(argv, env or {}, where, on_stop or (lambda stage: None))

    @asynccontextmanager
    async def _exec(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, on_stop: Callable[[StopStage], None]
    ) -> AsyncIterator[TaggedProcess]:
        await trio.lowlevel.checkpoint_if_cancelled()
        with _tagging() as tag:
            child = self._spawn(argv, {**self._env, **env, "PWD": cwd}, cwd)
        process = TaggedProcess(child, tag, os.geteuid() if self._uid is None else self._uid, self._group, on_stop)
        async with self._running.track(process):
            await process.begin()
            yield process

    async def kill(self) -> None:
        """End the grace of commands that are being stopped."""
        await self._running.kill()

    def _spawn(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> child_process.Child:
        # The gate is a line on standard input: a shell's ``read`` takes no byte beyond it.
        gated = ["/bin/sh", "-c", 'read -r _ && exec "$@"', "sh", *argv]
        try:
            return child_process.start(gated if self._group.needed else argv, env=env, cwd=cwd, uid=self._uid)
        except (FileNotFoundError, PermissionError):
            pass
        try:  # the shell prints why, and exits with the usual status
            return child_process.start(["/bin/sh", "-c", 'exec "$@"', "sh", *argv], env=env, cwd=cwd, uid=self._uid)
        except OSError as error:
            raise ProviderFailed(f"`{argv[0]}` cannot be started in `{cwd}`: {error.strerror}") from error

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
            host = readback.HostView(readback.namespaces(), processes.user(process.pid), self._group.limits())
        return readback.read_back(text, host, provider="process", isolation=IsolationClass.NONE, paths=self.paths)


class TaggedProcess:
    """A command, and every process that carries its tag."""

    def __init__(
        self,
        child: child_process.Child,
        tag: int,
        uid: int,
        group: cgroup.ControlGroups,
        on_stop: Callable[[StopStage], None],
    ) -> None:
        self._child = child
        self._tag = tag
        self._uid = uid
        self._group = group
        self._on_stop = on_stop
        self._killed = False
        self._oom_kills_before = group.oom_kills()
        self._in_group = ""
        self.oom_kills = 0
        self.pid = child.pid
        self.stdin = child.stdin
        self.stdout = child.stdout
        self.stderr = child.stderr

    async def begin(self) -> None:
        if self._group.needed:
            self._group.join(self.pid)
            self._in_group = cgroup.describe_group(self.pid)
            await self.stdin.send_all(b"\n")

    async def wait(self) -> Exit:
        ended = await self._child.wait()
        killed = ended.signal == signal.SIGKILL or ended.code == 128 + signal.SIGKILL
        self._count()
        return Exit(ended.code, ended.signal, oom=killed and self.oom_kills > 0)

    async def end(self, grace: float) -> None:
        """Send TERM to tagged processes, wait ``grace`` seconds, and kill. Raises ``Escaped``."""
        if not self._child.ended and not self._killed:
            self._on_stop(StopStage.TERM)
            processes.signal_where(processes.processes(), signal.SIGTERM, self._belongs)
            with trio.move_on_after(grace):
                await self._child.wait()
        try:
            if not (self._child.ended and processes.newest() == self.pid):  # else nothing was started after it
                await processes.kill_all(self._is_to_be_killed, what=f"the command{self._in_group}")
            with trio.move_on_after(KILL_GRACE) as patience:
                await self._child.wait()
        finally:
            self._count()
            await self._child.aclose()
        if patience.cancelled_caught:
            raise Escaped(f"killed processes of the command{self._in_group} still live: {self.pid}")

    def kill(self) -> None:
        if not self._child.ended:
            self._begin_killing()
            self._child.kill()

    def _is_to_be_killed(self, pid: int) -> bool:
        found = self._belongs(pid) and _lives(pid)
        if found:
            self._begin_killing()
        return found

    def _begin_killing(self) -> None:
        if not self._killed:
            self._killed = True
            self._on_stop(StopStage.KILL)

    def _count(self) -> None:
        self.oom_kills = self._group.oom_kills() - self._oom_kills_before

    def _belongs(self, pid: int) -> bool:
        return processes.owner(pid) == self._uid and processes.soft_limit(pid, "Max msgqueue size") == self._tag


def _lives(pid: int) -> bool:
    """Whether a process is not a zombie. Raises as ``processes.parent``."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"


@contextmanager
def _tagging() -> Iterator[int]:
    """Tag the processes that are started in the block, and with them their descendants."""
    soft, hard = resource.getrlimit(_TAG_LIMIT)
    tag = 1 + secrets.randbelow((soft if soft > 0 else 1 << 32) - 1)
    resource.setrlimit(_TAG_LIMIT, (tag, hard))
    try:
        yield tag
    finally:
        resource.setrlimit(_TAG_LIMIT, (soft, hard))
