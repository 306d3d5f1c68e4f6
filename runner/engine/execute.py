"""Running a graph: each node as soon as what it needs has ended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from runner.plan.graph import Graph

RunStep = Callable[[str], Awaitable[None]]


async def execute(graph: Graph, run_step: RunStep) -> None:
    """Run every node once all that it needs has ended, each edge looked at once.

    Cancelling this call cancels the running nodes. A node that raises is an infrastructure error: it
    cancels the others and propagates. Skipping by the outcomes of needs is ``run_step``'s decision.
    """
    waiting = graph.indegrees  # needs that have not ended
    followers = graph.followers

    async with trio.open_nursery() as nursery:

        async def run(name: str) -> None:
            while True:  # the first follower goes on in this task: a chain costs no task a step
                await run_step(name)
                ready = []
                for follower in followers[name]:
                    waiting[follower] -= 1
                    if not waiting[follower]:
                        ready.append(follower)
                for follower in ready[1:]:
                    nursery.start_soon(run, follower)
                if not ready:
                    return
                name = ready[0]

        for root in [name for name, count in waiting.items() if not count]:
            nursery.start_soon(run, root)
