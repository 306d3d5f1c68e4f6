"""Cost of a no-op step: the engine alone, in this process, and doit running as many no-op tasks.

Run: python tests/benchmarks/bench_engine.py. Figures are CPU; compare rows of one run only.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import trio

from runner.engine.execute import execute
from runner.plan.graph import Graph

DODO = """
DOIT_CONFIG = {{"verbosity": 0}}
def noop(): pass
def task_n():
    for i in range({count}):
        yield {{"name": str(i), "actions": [noop], "task_dep": {dep}}}
"""


def chain(count: int) -> Graph:
    names = [str(n) for n in range(count)]
    return Graph({names[0]: []} | {b: [a] for a, b in pairwise(names)})


def fan(count: int) -> Graph:
    return Graph({"root": []} | {str(n): ["root"] for n in range(count - 1)})


async def noop(name: str) -> None:
    await trio.lowlevel.checkpoint()


def engine(graph: Graph) -> float:
    """CPU microseconds a step."""
    began = time.process_time()
    trio.run(execute, graph, noop)
    return (time.process_time() - began) * 1e6 / len(graph)


def doit(count: int, dep: str) -> float:
    """CPU microseconds a task, the start of doit itself taken off."""

    def cost(tasks: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "dodo.py").write_text(DODO.format(count=tasks, dep=dep))
            before = getrusage(RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-m", "doit"], cwd=folder, check=True, capture_output=True)
            after = getrusage(RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return (cost(count) - cost(1)) * 1e6 / count


def main() -> None:
    print(f"{'steps':>8} {'shape':<6} {'engine us/step':>15} {'doit us/task':>13}")
    for count in (1_000, 10_000, 100_000):
        for shape, graph, dep in (
            ("chain", chain(count), "['n:%d' % (i - 1)] if i else []"),
            ("fan", fan(count), "['n:0'] if i else []"),
        ):
            ours = min(engine(graph) for _ in range(3))
            peer = f"{doit(count, dep):13.0f}" if count <= 10_000 else f"{'-':>13}"
            print(f"{count:>8} {shape:<6} {ours:>15.1f} {peer}")


if __name__ == "__main__":
    main()
