"""CPU of starting the command, beside a Python that imports what any command line in Python would.

Run: ``python tests/benchmarks/bench_cli.py``. Medians; asserts nothing. The target is a ratio of 3.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time

from tests.benchmarks.sizes import rounds

ROUNDS = rounds(21)
FLOOR = "python -c 'import argparse, json'"
COMMANDS = {
    FLOOR: ["-c", "import argparse, json"],
    "runner --version": ["-m", "runner", "--version"],
    "runner --help": ["-m", "runner", "--help"],
}


def cost(arguments: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    before, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def medians() -> dict[str, list[float]]:
    """Wall and CPU seconds of each command."""
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, arguments in COMMANDS.items():
            costs[name].append(cost(arguments))
    return {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in costs.items()}


def main() -> None:
    found = medians()
    for name, (wall, cpu) in found.items():
        print(f"{name:34} wall {wall * 1e3:5.0f} ms  cpu {cpu * 1e3:5.0f} ms  cpu ratio {cpu / found[FLOOR][1]:.2f}")


if __name__ == "__main__":
    main()
