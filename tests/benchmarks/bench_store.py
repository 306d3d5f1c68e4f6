"""Our journal beside bare ``sqlite3``: the same rows, pragmas and batch sizes, every batch flushed.

Run: ``python tests/benchmarks/bench_store.py [FOLDER]`` on the disk that matters. Prints medians; asserts
nothing. Bare means one connection on the main thread, rows encoded beforehand or on the way.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import trio

from runner.events.events import RunStarted, StepStarted, WarningIssued, encode
from runner.store.sqlite import open_store, scripts
from tests.benchmarks.measure import Cost, cost, medians, since
from tests.benchmarks.sizes import rounds

ROUNDS = rounds(5)
STARTED = RunStarted(name="bench", plan="sha256:0", runner="0", steps={}, deadline_seconds=1.0)
EVENT = WarningIssued("bench.event", "x" * 280, "agent")  # about 343 bytes as JSON


def bare(folder: Path, batches: int, size: int, *, encoding: bool) -> Callable[[], None]:
    connection = sqlite3.connect(folder / "bare.db", isolation_level=None)
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "busy_timeout = 5000", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}")
    for statement in scripts()[0].split(";\n"):
        connection.execute(statement)
    connection.execute("INSERT INTO runs (id, name, status, plan, created) VALUES ('a', 'n', 'running', 'p', 1)")
    encoded = encode(EVENT)

    def run() -> None:
        with closing(connection):
            seq = 0
            for _ in range(batches):
                rows = []
                for _ in range(size):
                    seq += 1
                    rows.append(("a", seq, 1, encode(EVENT) if encoding else encoded))
                connection.execute("BEGIN IMMEDIATE")
                connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?)", rows)
                connection.execute("COMMIT")

    return run


def compare(parent: str | None, batches: int, size: int) -> None:
    columns: dict[str, list[Cost]] = {"bare": [], "bare+encode": [], "ours": []}
    for _ in range(ROUNDS):
        for name, samples in columns.items():
            with tempfile.TemporaryDirectory(dir=parent) as folder:
                if name == "ours":
                    samples.append(trio.run(_ours, Path(folder), batches, size))
                else:
                    action = bare(Path(folder), batches, size, encoding=name == "bare+encode")
                    samples.append(cost(action))
    found = medians(columns)
    per = 1e6 / (batches * size)
    shown = "  ".join(f"{name} {wall * per:7.1f} {cpu * per:6.1f}" for name, (wall, cpu) in found.items())
    wall, cpu = (mine / theirs for mine, theirs in zip(found["ours"], found["bare+encode"], strict=True))
    print(f"batch {size:4}  us/event (wall cpu): {shown}  ratio to bare+encode: wall {wall:.2f} cpu {cpu:.2f}")


async def _ours(folder: Path, batches: int, size: int) -> Cost:
    async with open_store(folder / "ours.db", now=lambda: 1, entropy=os.urandom) as store:
        await store.append("a", [STARTED])
        before = since()
        for _ in range(batches):
            await store.append("a", [EVENT] * size)
        return since(before)


async def _producers(folder: Path, producers: int, each: int) -> float:
    async with open_store(folder / "ours.db", now=lambda: 1, entropy=os.urandom) as store:
        await store.append("a", [STARTED])

        async def produce() -> None:
            for _ in range(each):
                await store.append("a", [StepStarted("agent")])

        before = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(producers):
                nursery.start_soon(produce)
        return producers * each / (time.perf_counter() - before)


def main() -> None:
    parent = sys.argv[1] if len(sys.argv) > 1 else None
    for batches, size in ((200, 1), (100, 10), (50, 100)):
        compare(parent, batches, size)
    for producers in (1, 16, 64):
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            print(
                f"{producers:3} producers of single events: {trio.run(_producers, Path(folder), producers, 50):8.0f}/s"
            )


if __name__ == "__main__":
    main()
