"""Execute one command in a workspace, with the caller's standard streams and exit status."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

import trio

from runner.core.errors import KilledForMemory, ProviderFailed, WorkspaceLost
from runner.core.model import Exit
from runner.events.events import OomKilled
from runner.ops.signals import FATAL
from runner.ops.workspaces.leases import COMMAND
from runner.ops.workspaces.workspace_lease import WorkspaceEnv, hold, require_tree
from runner.ops.workspaces.workspaces import own_workspace, require_ready, use_of, validate
from runner.policy.protected import unite
from runner.ports.provider import Process, Reader, SandboxSpec, Workspace, Writer
from runner.ports.store import WorkspaceRow

OpenSandbox = Callable[[], AbstractAsyncContextManager[Workspace]]

CANCELLED = 130
_CHUNK = 1 << 20  # bytes
_DRAIN = 2.0  # seconds for what is left in the pipes after the command has ended, if a descendant holds them


async def execute(env: WorkspaceEnv, text: str, argv: Sequence[str], streams: tuple[int, int, int]) -> int:
    """Run a command in a workspace and return the exit code that says how it ended.

    The descriptors ``streams`` are its standard input, output and error; nothing of them is kept. The first signal that
    would end this process ends the command, with the grace that its provider gives, a second one at once; hanging up
    ends nothing. Raises ``WorkspaceState`` unless the workspace is ready, ``ForbiddenFiles`` before anything is
    started, ``LeaseHeld``, and ``LeaseLost`` when the command was ended because somebody else may have the workspace.
    """
    row = await own_workspace(env.store, text)
    require_ready(row)
    require_tree(row)
    _, handle = await env.find(row)
    if handle is None:
        raise WorkspaceLost(f"nothing of workspace `{row.id}` is left", hint=f"runner workspace destroy {row.id}")
    await validate(env, row, handle)
    async with hold(env, row, COMMAND) as held:
        require_ready(held.row)
        await held.write(use_of(env.settings))
        provider, handle = await held.handle()
        sandbox_spec = SandboxSpec(protected=await _protected(env, row))
        command = _Command(streams)
        ended = await command.run(partial(provider.open, handle, sandbox_spec), argv)
        killed = [OomKilled(COMMAND, command.oom_kills)] if command.oom_kills else []
        await held.write(*killed, use_of(env.settings))
    if killed:
        what = "the command was" if ended is not None and ended.oom else _processes(command.oom_kills)
        hint = f"`runner workspace show {row.id}` shows the limit"
        env.advise(KilledForMemory(f"{what} killed: out of memory", hint=hint))
    return CANCELLED if ended is None else _code(ended)


async def _protected(env: WorkspaceEnv, row: WorkspaceRow) -> tuple[str, ...]:
    """Return the paths that commands cannot change; in an adopted directory also ``.git``, which its owner's git
    obeys.
    """
    own = (".git",) if row.path is not None else ()
    projects = {project.name: project for project in await env.store.projects()}
    project = projects.get(row.project)
    return unite((*own, *(project.protected_paths if project and project.workspace_isolation else ())))


def _processes(count: int) -> str:
    return f"{count} processes of the command were" if count > 1 else "a process of the command was"


def _code(ended: Exit) -> int:
    if ended.signal is not None:
        return 128 + ended.signal
    if ended.code is None:
        raise ProviderFailed("it is not known how the command ended")
    return ended.code


class _Command:
    """A running command in a sandbox of its own, with the signals that stop it.

    ``oom_kills`` is how many of its processes the kernel killed for lack of memory, once it has ended.
    """

    def __init__(self, streams: tuple[int, int, int]) -> None:
        self._streams = streams
        self._work = trio.CancelScope()
        self._closing = trio.Event()
        self.oom_kills = 0

    async def run(self, open_sandbox: OpenSandbox, argv: Sequence[str]) -> Exit | None:
        """Run the command to its end; ``None`` when a signal stopped it. Nothing of it is left."""
        ended: Exit | None = None
        async with trio.open_nursery() as nursery:
            await nursery.start(self._watch)
            async with trio.open_nursery() as sandboxes:
                workspace: Workspace = await sandboxes.start(self._keep, open_sandbox)
                with self._work:
                    ended = await self._carry_out(workspace, argv)
                self._closing.set()
            nursery.cancel_scope.cancel()
        return ended

    async def _watch(self, task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(*FATAL, signal.SIGHUP) as received:
            task_status.started()
            async for number in received:
                if number != signal.SIGHUP:
                    if self._work.cancel_called:
                        self._closing.set()  # a command that is being stopped has its grace while its sandbox is open
                    self._work.cancel()

    async def _keep(self, open_sandbox: OpenSandbox, task_status: trio.TaskStatus[Workspace]) -> None:
        async with open_sandbox() as workspace:
            task_status.started(workspace)
            await self._closing.wait()

    async def _carry_out(self, workspace: Workspace, argv: Sequence[str]) -> Exit:
        async with trio.open_nursery() as nursery:
            copied = trio.Event()
            copying = trio.CancelScope(shield=True)
            process: Process | None = None
            try:
                async with workspace.exec(argv) as process:
                    nursery.start_soon(_feed, self._streams[0], process.stdin)
                    nursery.start_soon(self._copy_both, process, copying, copied)
                    ended = await process.wait()
                    with trio.move_on_after(_DRAIN):
                        await copied.wait()
            except BaseException:
                copying.deadline = trio.current_time() + _DRAIN  # nobody may be reading what it prints
                raise
            finally:
                self.oom_kills = process.oom_kills if process is not None else 0
            await copied.wait()
            nursery.cancel_scope.cancel()
        return ended

    async def _copy_both(self, process: Process, scope: trio.CancelScope, copied: trio.Event) -> None:
        """Copy both streams to their end; the command's block closes them."""
        with scope:
            async with trio.open_nursery() as readers:
                readers.start_soon(_copy, process.stdout, self._streams[1])
                readers.start_soon(_copy, process.stderr, self._streams[2])
        copied.set()


async def _feed(descriptor: int, stdin: Writer) -> None:
    """Copy standard input. A command that does not read it is fine; input read but not taken is lost, as with a
    pipe.
    """
    try:
        while chunk := await trio.to_thread.run_sync(os.read, descriptor, _CHUNK, abandon_on_cancel=True):
            await stdin.send_all(chunk)
        await stdin.aclose()
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass


async def _copy(stream: Reader, descriptor: int) -> None:
    while chunk := await stream.receive_some(_CHUNK):
        left = memoryview(chunk)
        while left:
            left = left[await trio.to_thread.run_sync(os.write, descriptor, left, abandon_on_cancel=True) :]
