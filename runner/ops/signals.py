"""Signals that stop work: of runs, which finalize at the first one, and of commands that can simply be cancelled."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import trio

from runner.core.errors import HostRefused, first_leaf

if TYPE_CHECKING:
    from runner.engine.run import RunCancellation

# What would end a program by default and can be caught; HUP ends nothing, since a lost terminal is no decision.
FATAL = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU)
_CANCEL = (signal.SIGINT, signal.SIGTERM)

T = TypeVar("T")


async def stop_at_signals(controls: Sequence[RunCancellation], task_status: trio.TaskStatus[None]) -> None:
    with trio.open_signal_receiver(*FATAL, signal.SIGHUP) as received:
        task_status.started()
        async for number in received:
            if number != signal.SIGHUP:
                for control in controls:
                    control.stop()


def run_cancellable(work: Callable[[], Awaitable[T]]) -> T:
    """Run some work. SIGINT and SIGTERM cancel it, and then it raises ``KeyboardInterrupt``.

    An ``OSError`` is raised as ``HostRefused``.
    """

    async def watched() -> T:
        async with trio.open_nursery() as nursery:
            await nursery.start(_watch, nursery.cancel_scope)
            result = await work()
            nursery.cancel_scope.cancel()
            return result
        raise KeyboardInterrupt

    try:
        return trio.run(watched)
    except BaseExceptionGroup as group:
        error = first_leaf(group)
        raise (HostRefused.of(error) if isinstance(error, OSError) else error) from group


async def _watch(scope: trio.CancelScope, task_status: trio.TaskStatus[None]) -> None:
    with trio.open_signal_receiver(*_CANCEL) as received:
        task_status.started()
        async for _ in received:
            scope.cancel()
