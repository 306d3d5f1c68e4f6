"""Processes that race for the lease of one workspace in one store, round after round; a line for each try.

Every other round the owner keeps its lease and the clock goes past the end of it, so that the next is a race to take
over, in which the old owner is to be refused whatever it writes.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier

import trio

from runner.core.errors import LeaseHeld, LeaseLost
from runner.core.model import CommandHolder, Fence
from runner.events.events import Event, WarningIssued
from runner.lifecycle.lease import TTL
from runner.ports.store import Store
from runner.runtime.lease_holder import Emit, LeaseHolder
from runner.store import sqlite

WORKSPACE = "w"


async def race(url: str, rounds: int, start: Barrier, clock: Synchronized[int]) -> None:
    async with open_at(url, lambda: clock.value) as store:
        last: Fence | None = None
        for number in range(rounds):
            start.wait()
            lease_holder = LeaseHolder(WORKSPACE, CommandHolder("race", os.getpid()), store.lease)
            tell(number, await run(store, lease_holder, last))
            start.wait()
            last = lease_holder.fence
            if last is not None and number % 2:
                await lease_holder.release(emitting(store, last))
                last = None
            elif last is not None:
                clock.value += round(TTL * 1e6)


async def run(store: Store, lease_holder: LeaseHolder, last: Fence | None) -> str:
    try:
        await lease_holder.acquire(emitting(store, None))
        assert lease_holder.fence is not None
        await emitting(store, lease_holder.fence)(WarningIssued("x.owner", f"{lease_holder.fence.number}"))
        answer = "owner"
    except LeaseHeld:
        answer = "held"
    if last is not None:
        try:
            await emitting(store, last)(WarningIssued("x.late", f"{last.number}"))
        except LeaseLost:
            answer += " refused"
        else:
            answer += " late"
    return answer


def open_at(url: str, now: Callable[[], int]) -> AbstractAsyncContextManager[Store]:
    """A store with another clock than its own."""
    if url.startswith("sqlite:"):
        return sqlite.open_store(sqlite.place(url), now=now, entropy=os.urandom)
    from runner.store import postgresql

    return postgresql.open_store(postgresql.place(url), now=now, entropy=os.urandom)


def emitting(store: Store, fence: Fence | None) -> Emit:
    """What a holder writes with."""

    async def emit(*events: Event) -> None:
        await store.append_to_workspace(WORKSPACE, events, fence=fence)

    return emit


def tell(number: int, answer: str) -> None:
    os.write(1, f"{number} {answer}\n".encode())  # at once: shorter than what a pipe would tear


def main() -> None:
    url, rounds, processes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    context = multiprocessing.get_context("fork")
    start, clock = context.Barrier(processes, timeout=600), context.Value("q", 0)
    racers = [context.Process(target=lambda: trio.run(race, url, rounds, start, clock)) for _ in range(processes)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    sys.exit(max(abs(racer.exitcode or 0) for racer in racers))


if __name__ == "__main__":
    main()
