"""The sandboxes of a run, of which one is open at a time, with services that live as long as the run."""

from __future__ import annotations

from functools import partial

import trio
from msgspec import Struct, field

from runner.core.errors import PlatformError, WorkspaceLost
from runner.core.model import Handle
from runner.events import events as ev
from runner.ports.provider import Provider, SandboxSpec, Workspace
from runner.runtime.lease_holder import Emit
from runner.runtime.mount_plan import MountPlan


class _Sandbox(Struct, kw_only=True):
    workspace: Workspace
    mount_plan: MountPlan | None
    closing: trio.Event = field(default_factory=trio.Event)
    closed: trio.Event = field(default_factory=trio.Event)
    failure: PlatformError | None = None


class SandboxSession(Struct):
    """Opens sandboxes on a workspace and ends them.

    ``services`` outlives work, so that finalize finds its sandboxes' services alive.
    """

    services: trio.Nursery
    emit: Emit
    sandbox: _Sandbox | None = None

    @property
    def mount_plan(self) -> MountPlan | None:
        """Return that of the sandbox which was opened last, unless it was closed."""
        return self.sandbox.mount_plan if self.sandbox is not None else None

    def opened(self, mount_plan: MountPlan) -> Workspace | None:
        """Return the open sandbox if it has this mount plan."""
        if self.sandbox is None or self.sandbox.mount_plan != mount_plan or self.sandbox.closing.is_set():
            return None
        return self.sandbox.workspace

    async def start(
        self, provider: Provider, handle: Handle, spec: SandboxSpec, mount_plan: MountPlan | None
    ) -> Workspace:
        """Start a sandbox, once the last one was closed. Raises what the provider raises."""
        keep = partial(self._keep, provider, handle, spec, mount_plan)
        self.sandbox = sandbox = await self.services.start(keep)
        workspace: Workspace = sandbox.workspace
        return workspace

    async def _keep(
        self,
        provider: Provider,
        handle: Handle,
        spec: SandboxSpec,
        mount_plan: MountPlan | None,
        task_status: trio.TaskStatus[_Sandbox],
    ) -> None:
        sandbox: _Sandbox | None = None
        try:
            async with provider.open(handle, spec) as workspace:
                sandbox = _Sandbox(workspace=workspace, mount_plan=mount_plan)
                task_status.started(sandbox)
                await sandbox.closing.wait()
        except PlatformError as error:
            if sandbox is None:
                raise  # out of ``start``
            sandbox.failure = error  # a lost sandbox must not take finalize down; whoever closes it hears of it
        finally:
            if sandbox is not None:
                sandbox.closed.set()

    def begin_close(self) -> None:
        """Begin to end the open sandbox, if there is one: no further command runs in it."""
        if self.sandbox is not None:
            self.sandbox.closing.set()

    async def end_processes(self) -> None:
        """End every process in the open sandbox, without waiting for the rest of its removal: ``close`` does that."""
        if (sandbox := self.sandbox) is None:
            return
        sandbox.closing.set()
        async with trio.open_nursery() as nursery:

            async def hear(event: trio.Event) -> None:
                await event.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(hear, sandbox.workspace.terminated)
            nursery.start_soon(hear, sandbox.closed)
        if sandbox.closed.is_set():
            await self.close()

    async def close(self) -> None:
        """End the open sandbox and every process in it. Raises any failure of it since it was opened.

        A lost sandbox is only a warning: the command that it took along has raised already.
        """
        if self.sandbox is None:
            return
        sandbox = self.sandbox
        sandbox.closing.set()
        await sandbox.closed.wait()
        self.sandbox = None
        if isinstance(sandbox.failure, WorkspaceLost):
            await self.emit(ev.WarningIssued(sandbox.failure.code, sandbox.failure.message))
        elif sandbox.failure is not None:
            raise sandbox.failure
