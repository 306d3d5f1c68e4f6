"""Execute one command in a workspace, with the caller's streams and exit status."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

import trio
from msgspec import Struct

from runner.core.errors import KilledForMemory, ProviderFailed, WorkspaceLost
from runner.core.model import Exit
from runner.events.events import OomKilled
from runner.ops.workspaces.leases import EXEC
from runner.ops.workspaces.workspace_lease import WorkspaceEnv, hold, require_tree
from runner.ops.workspaces.workspaces import own_workspace, require_ready, use_of, validate
from runner.policy.protected import unite
from runner.ports.provider import Process, Reader, SandboxSpec, Workspace, Writer
from runner.ports.store import WorkspaceRow

OpenSandbox = Callable[[], AbstractAsyncContextManager[Workspace]]

CANCELLED = 130
CHUNK = 1 << 20  # bytes
_DRAIN = 2.0  # seconds for what is left in the pipes after the command has ended, if a descendant holds them


class CommandStreams(Struct, frozen=True):
    """The caller's ends of a command's streams: ``read`` returns input, ``b""`` at its end; the others get output.

    Nothing of them is kept here.
    """

    read: Callable[[], Awaitable[bytes]]
    write_out: Callable[[bytes], Awaitable[None]]
    write_err: Callable[[bytes], Awaitable[None]]


class CommandCancellation:
    """Stops a command that is being executed: the first call gives it its provider's grace, a second none."""

    def __init__(self) -> None:
        self.work = trio.CancelScope()
        self.closing = trio.Event()  # its sandbox, which it has its grace in

    def stop(self) -> None:
        if self.work.cancel_called:
            self.closing.set()
        self.work.cancel()


async def execute(
    env: WorkspaceEnv, text: str, argv: Sequence[str], streams: CommandStreams, control: CommandCancellation
) -> int:
    """Run a command in a workspace and return the exit code that says how it ended, 130 when ``control`` stopped it.

    Raises ``WorkspaceState`` unless the workspace is ready, ``ForbiddenFiles`` before anything is started,
    ``LeaseHeld``, and ``LeaseLost`` when the command was ended because somebody else may have the workspace.
    """
    row = await own_workspace(env, text)
    require_ready(row)
    require_tree(row)
    _, handle = await env.find(row)
    if handle is None:
        raise WorkspaceLost(f"nothing of workspace `{row.id}` is left", hint=f"runner workspace destroy {row.id}")
    await validate(env, row, handle)
    async with hold(env, row, EXEC) as held:
        require_ready(held.row)
        await held.write(use_of(env.settings))
        provider, handle = await held.handle()
        sandbox_spec = SandboxSpec(protected=await protected_paths(env, row))
        command = StreamedCommand(streams)
        ended = await _run_in_sandbox(command, argv, partial(provider.open, handle, sandbox_spec), control)
        killed = [OomKilled(EXEC, command.oom_kills)] if command.oom_kills else []
        await held.write(*killed, use_of(env.settings))
    if killed:
        what = "the command was" if ended is not None and ended.oom else _processes(command.oom_kills)
        hint = f"`runner workspace show {row.id}` shows the limit"
        env.advise(KilledForMemory(f"{what} killed: out of memory", hint=hint))
    return CANCELLED if ended is None else exit_code(ended)


async def protected_paths(env: WorkspaceEnv, row: WorkspaceRow) -> tuple[str, ...]:
    """Return the paths that commands cannot change; in an adopted directory also ``.git``, which its owner's git
    obeys.
    """
    own = (".git",) if row.path is not None else ()
    projects = {project.name: project for project in await env.store.projects()}
    project = projects.get(row.project)
    return unite((*own, *(project.protected_paths if project and project.workspace_isolation else ())))


def _processes(count: int) -> str:
    return f"{count} processes of the command were" if count > 1 else "a process of the command was"


def exit_code(ended: Exit) -> int:
    """Return the exit code as shells have it. Raises ``ProviderFailed`` for an end that is not known."""
    if ended.signal is not None:
        return 128 + ended.signal
    if ended.code is None:
        raise ProviderFailed("it is not known how the command ended")
    return ended.code


async def _run_in_sandbox(
    command: StreamedCommand, argv: Sequence[str], open_sandbox: OpenSandbox, control: CommandCancellation
) -> Exit | None:
    """Run the command in a sandbox of its own to its end; ``None`` when it was stopped. Nothing of it is left."""

    async def keep(task_status: trio.TaskStatus[Workspace]) -> None:
        async with open_sandbox() as workspace:
            task_status.started(workspace)
            await control.closing.wait()

    ended: Exit | None = None
    async with trio.open_nursery() as sandboxes:
        workspace: Workspace = await sandboxes.start(keep)
        with control.work:
            ended = await command.run(workspace, argv)
        control.closing.set()
    return ended


class StreamedCommand:
    """A command with the caller's streams.

    ``oom_kills`` is how many of its processes the kernel killed for lack of memory, once it has ended.
    """

    def __init__(self, streams: CommandStreams) -> None:
        self._streams = streams
        self.oom_kills = 0

    async def run(self, workspace: Workspace, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Exit:
        """Run the command to its end. Cancelling ends its tree within the grace periods; what it printed is copied."""
        async with trio.open_nursery() as nursery:
            copied = trio.Event()
            copying = trio.CancelScope(shield=True)
            process: Process | None = None
            try:
                async with workspace.exec(argv, env=env) as process:
                    nursery.start_soon(_feed, self._streams.read, process.stdin)
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
                readers.start_soon(_copy, process.stdout, self._streams.write_out)
                readers.start_soon(_copy, process.stderr, self._streams.write_err)
        copied.set()


async def _feed(read: Callable[[], Awaitable[bytes]], stdin: Writer) -> None:
    """Copy standard input. A command that does not read it is fine; input read but not taken is lost, as with a
    pipe.
    """
    try:
        while chunk := await read():
            await stdin.send_all(chunk)
        await stdin.aclose()
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass


async def _copy(stream: Reader, write: Callable[[bytes], Awaitable[None]]) -> None:
    while chunk := await stream.receive_some(CHUNK):
        await write(chunk)
