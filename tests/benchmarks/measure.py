"""What benchmarks measure with: seconds of wall and CPU, actions that take turns, medians."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage

Cost = tuple[float, float]  # seconds of wall and of CPU, that of ended children included


def since(begun: Cost = (0, 0)) -> Cost:
    used = [getrusage(who) for who in (RUSAGE_SELF, RUSAGE_CHILDREN)]
    return time.perf_counter() - begun[0], sum(each.ru_utime + each.ru_stime for each in used) - begun[1]


def cost(action: Callable[[], object]) -> Cost:
    begun = since()
    action()
    return since(begun)


def compiled() -> dict[str, str]:
    """Return this environment, but for what keeps Python from writing modules as it has compiled them."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def python(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], env=compiled(), stdout=subprocess.DEVNULL, check=True)


def medians(costs: Mapping[str, list[Cost]]) -> dict[str, Cost]:
    found = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in costs.items()}
    return {name: (wall, cpu) for name, (wall, cpu) in found.items()}


def in_turns(rounds: int, actions: Mapping[str, Callable[[], object]]) -> dict[str, list[Cost]]:
    costs: dict[str, list[Cost]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            costs[name].append(cost(action))
    return costs


async def side_by_side(
    rounds: int, action: Callable[[], Awaitable[object]], other: Callable[[], object]
) -> tuple[float, float]:
    """Median wall seconds of each, in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        start = time.perf_counter()
        await action()
        middle = time.perf_counter()
        other()
        times[0].append(middle - start)
        times[1].append(time.perf_counter() - middle)
    return statistics.median(times[0]), statistics.median(times[1])


DODO = """
DOIT_CONFIG = {{"verbosity": 0}}
def noop(): pass
def task_n():
    for i in range({tasks}):
        yield {{"name": str(i), "actions": [noop], "task_dep": {needs}}}
"""


def doit(tasks: int, needs: str, *words: str) -> float:
    """CPU seconds that doit takes for tasks that do nothing, beyond those for one; ``needs`` are those of task `i`."""

    def of(tasks: int) -> float:
        command = [sys.executable, "-m", "doit", *words]
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "dodo.py").write_text(DODO.format(tasks=tasks, needs=needs))
            return cost(lambda: subprocess.run(command, cwd=folder, check=True, capture_output=True))[1]

    return of(tasks) - of(1)
