"""Cost of a no-op step: its scheduling alone, a whole run without a journal, and doit running as many no-op tasks.

Run: python tests/benchmarks/bench_engine.py. Figures are CPU; compare rows of one run only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import trio

from runner.core.model import Fence
from runner.engine.execute import execute
from runner.engine.run import execute_run
from runner.engine.stopping import RunCancellation
from runner.events.events import Event, Recorded
from runner.plan.graph import Graph
from runner.plan.model import RunPlan
from runner.runtime.context import RunDependencies, RunPaths
from tests.benchmarks.measure import doit
from tests.benchmarks.sizes import amount
from tests.support.small_plans import small_run, small_step

Needs = dict[str, list[str]]


def chain(size: int) -> Needs:
    names = [str(n) for n in range(size)]
    return {names[0]: []} | {b: [a] for a, b in pairwise(names)}


def fan(size: int) -> Needs:
    return {"root": []} | {str(n): ["root"] for n in range(size - 1)}


async def noop(name: str) -> None:
    await trio.lowlevel.checkpoint()


def schedule(graph: Graph) -> float:
    """CPU microseconds a step."""
    began = time.process_time()
    trio.run(execute, graph, noop)
    return (time.process_time() - began) * 1e6 / len(graph)


def run_plan(needs: Needs) -> RunPlan:
    """A run whose steps find nothing to do: each tears down what was never made."""
    steps = (small_step(name, *wanted, kind="teardown", deadline_seconds=1e6) for name, wanted in needs.items())
    return small_run("bench", *steps, providers=(), deadline_seconds=1e6, stop_budget_seconds=30)


def whole(needs: Needs) -> float:
    """CPU microseconds a step of a run: events, record, deadlines and outcomes; appends keep nothing."""
    plan, number = run_plan(needs), count(1)

    async def append(run: str, events: Sequence[Event], fence: Fence | None) -> Sequence[Recorded]:
        return [Recorded(run, next(number), 0, event) for event in events]

    async def run() -> None:
        paths = RunPaths(Path("/nonexistent"), "bench")
        deps = cast(
            RunDependencies,
            SimpleNamespace(  # nothing is reached
                lease=None, gateway=SimpleNamespace(rehearsal=False), redact=SimpleNamespace(late=())
            ),
        )
        await execute_run(
            plan, "", id="bench", paths=paths, deps=deps, append=append, control=RunCancellation(stop_budget_seconds=30)
        )

    began = time.process_time()
    trio.run(run)
    return (time.process_time() - began) * 1e6 / len(needs)


def main() -> None:
    print(f"{'steps':>8} {'shape':<6} {'schedule us/step':>17} {'run us/step':>12} {'doit us/task':>13}")
    for size in map(amount, (1_000, 10_000, 100_000)):
        for shape, needs, dep in (
            ("chain", chain(size), "['n:%d' % (i - 1)] if i else []"),
            ("fan", fan(size), "['n:0'] if i else []"),
        ):
            ours = min(schedule(Graph(needs)) for _ in range(3))
            peer = f"{doit(size, dep) * 1e6 / size:13.0f}" if size <= 10_000 else f"{'-':>13}"
            print(f"{size:>8} {shape:<6} {ours:>17.1f} {whole(needs):>12.1f} {peer}")


if __name__ == "__main__":
    main()
