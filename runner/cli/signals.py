"""Signals of a command: they cancel what it does, or stop its runs, which then finalize."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar, TypeVarTuple

import trio

from runner.core.errors import HostRefused
from runner.core.nurseries import open_services, unwrapping_groups

# What would end a program by default and can be caught; HUP ends nothing, since a lost terminal is no decision.
FATAL = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU)
_CANCEL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def run_cancellable(work: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
    """Run some work. SIGINT, SIGTERM and SIGHUP cancel it, so that no command in it outlives this process.

    Then it raises ``KeyboardInterrupt``. Signals that this process was started to ignore are ignored. An ``OSError``
    is raised as ``HostRefused``.
    """

    async def whole() -> T:
        caught = [number for number in _CANCEL if signal.getsignal(number) is not signal.SIG_IGN]
        with trio.CancelScope() as scope:
            async with _at_signals(caught, lambda _: scope.cancel()):
                return await work(*args)
        raise KeyboardInterrupt

    try:
        with unwrapping_groups():
            return trio.run(whole)
    except BrokenPipeError:
        raise  # a reader of ours has gone
    except OSError as error:
        raise HostRefused.of(error) from error


@asynccontextmanager
async def stop_at_signals(stop: Callable[[], None]) -> AsyncIterator[None]:
    """Call ``stop`` at each signal that would end this process while the block runs."""

    def tell(number: int) -> None:
        if number != signal.SIGHUP:
            stop()

    async with _at_signals((*FATAL, signal.SIGHUP), tell):
        yield


@asynccontextmanager
async def _at_signals(numbers: Iterable[int], tell: Callable[[int], None]) -> AsyncIterator[None]:
    with trio.open_signal_receiver(*numbers) as received:
        async with open_services() as services:
            services.start_soon(_pass_on, received, tell)
            yield


async def _pass_on(received: AsyncIterator[int], tell: Callable[[int], None]) -> None:
    async for number in received:
        tell(number)
