"""A run of bubblewrap: its process on the host, and below it the sandbox's own first process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from socket import socket, socketpair

import trio
from msgspec import Struct

from runner.core.errors import Escaped, ProviderFailed
from runner.ports.provider import KILL_GRACE
from runner.safefs.safe_open import open_linkless
from runner.sandbox import bwrap, cgroup, child_process, processes
from runner.sandbox.mounts import MountSource, MountStage


class Shell(Struct, frozen=True):
    """The path of bubblewrap for the user ``uid`` that commands run as; ``None`` is our own user.

    With a ``guard``, the guest's program, bubblewrap ends with this process from the first moment on; by itself it does
    so only once its namespaces are made.
    """

    bwrap: str
    uid: int | None
    guard: str


def open_shell(stage: MountStage, uid: int | None, guard: MountSource) -> Shell:
    folder, name = bwrap.binary()
    return Shell(f"{stage.add(open_linkless(folder)).path}/{name}", uid, guard.path)


class BwrapProcess:
    """A sandbox for one program. Call ``begin`` first and ``close`` last."""

    def __init__(
        self,
        child: child_process.Child,
        status: child_process.PipeReader,
        gate: int,
        join: Callable[[int], None],
        lifeline: socket,
    ) -> None:
        self.child = child
        self._lifeline = lifeline
        self.init: int | None = None  # on the host; what else lives inside is below it
        self._status = status
        self._gate = gate
        self._join = join
        self._said = b""
        self._init_pidfd: int | None = None

    async def begin(self) -> None:
        """Find the sandbox's first process, which waits at the gate, apply the limits to it, and open the gate."""
        try:
            while not self._said.endswith(b"\n") and (said := await self._status.receive_some(1024)):
                self._said += said
            self._said += self._status.receive_waiting()
            self.init = bwrap.first_process(self._said)
            if self.init is not None:
                self._init_pidfd = os.pidfd_open(self.init)
                self._join(self.init)
        except ProcessLookupError:
            pass  # set-up failed already, and ``complaint`` says why
        finally:
            os.close(self._gate)  # end of file opens it

    def complaint(self) -> str:
        """Return what bubblewrap has printed to its standard error."""
        self.child.stderr.look_ahead()
        return bwrap.complaint_in(self.child.stderr.head)

    def kill(self) -> None:
        if not self.child.ended:
            self._lifeline.close()

    async def close(self) -> None:
        """Wait until all its processes are gone, once it was killed or has ended. Raises ``Escaped``."""
        with trio.move_on_after(KILL_GRACE) as patience:
            await self.child.wait()
            if self._init_pidfd is not None:
                # The sandbox's first process is gone only when all others of its pid namespace are.
                await trio.lowlevel.wait_readable(self._init_pidfd)
        if self._init_pidfd is not None:
            os.close(self._init_pidfd)
        self._lifeline.close()
        await self.child.aclose()
        await self._status.aclose()
        if patience.cancelled_caught:
            living = [self.child.pid, *(processes.descendants(self.init) if self.init is not None else ())]
            raise Escaped(
                f"killed processes still live{cgroup.describe_group(living[-1])}: {', '.join(map(str, living))}"
            )


def start_guest_in_bwrap(
    shell: Shell, options: bwrap.BwrapOptions, group: cgroup.ControlGroups, program: str
) -> BwrapProcess:
    """Start a guest as the first process of a sandbox, with its channel. Raises ``ProviderFailed``."""
    with group.open_task_files() as lists:
        words = [program, *(("+", *map(str, lists)) if lists else ())]
        join = partial(group.join, itself=True)
        return _start(shell, options, join, words, inherited=lists)


def _start(
    shell: Shell,
    options: bwrap.BwrapOptions,
    join: Callable[[int], None],
    argv: Sequence[str],
    *,
    inherited: Sequence[int],
) -> BwrapProcess:
    """Start bubblewrap with ``inherited`` descriptors; the child's standard input is its channel."""
    status, their_status = os.pipe()
    their_gate, gate = os.pipe()
    arguments = os.memfd_create("arguments")
    words = options.arguments(status=their_status, gate=their_gate)
    os.write(arguments, words)
    os.lseek(arguments, 0, os.SEEK_SET)
    lifeline, their_lifeline = socketpair()
    guard = [shell.guard, "-", str(their_lifeline.fileno()), "-" if shell.uid is None else str(shell.uid)]
    theirs = [arguments, their_status, their_gate, their_lifeline.detach()]
    try:
        child = child_process.start(
            [*guard, shell.bwrap, "--args", str(arguments), "--as-pid-1", "--", *argv],
            env={},
            pass_fds=(*theirs, *options.descriptors, *inherited),
        )
    except OSError as error:
        os.close(status)
        os.close(gate)
        lifeline.close()
        raise ProviderFailed(f"bubblewrap cannot be started: {error}") from error
    finally:
        for fd in theirs:
            os.close(fd)
    return BwrapProcess(child=child, status=child_process.PipeReader(status), gate=gate, join=join, lifeline=lifeline)
