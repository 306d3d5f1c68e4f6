"""Execute a graph: each node as soon as everything that it needs has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable

import trio

from runner.plan.graph import Graph

RunStep = Callable[[str], Awaitable[None]]


async def execute(graph: Graph, run_step: RunStep) -> None:
    """Run every node once all of its needs have ended, in one pass over the edges.

    Nodes that are ready together start in the graph's order. Cancelling this call cancels the running nodes. A node
    that raises is an infrastructure error: it cancels the others and propagates. ``run_step`` decides whether a node is
    skipped because of its needs.
    """
    waiting = graph.indegrees  # needs that have not ended
    followers = graph.followers
    ready = deque(name for name, count in waiting.items() if not count)  # as many as tasks that are about to take one

    async with trio.open_nursery() as nursery:

        async def run() -> None:
            """Run the first ready node, not a given one: trio starts tasks in any order."""
            while True:  # one follower goes on in this task: a chain costs no task a step
                name = ready.popleft()
                await run_step(name)
                before = len(ready)
                for follower in followers[name]:
                    waiting[follower] -= 1
                    if not waiting[follower]:
                        ready.append(follower)
                more = len(ready) - before
                if not more:
                    return
                for _ in range(more - 1):
                    nursery.start_soon(run)

        for _ in range(len(ready)):
            nursery.start_soon(run)
