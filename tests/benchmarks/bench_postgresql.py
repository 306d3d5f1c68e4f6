"""The PostgreSQL store beside raw psycopg: the same rows and batch sizes, every batch flushed; leases and a long list.

Run: ``python tests/benchmarks/bench_postgresql.py``. It starts a server of its own. Prints medians; asserts nothing.
"""

from __future__ import annotations

import time
from contextlib import closing
from statistics import median

import psycopg
import trio

from runner.core.model import CommandHolder
from runner.events.events import Event, LeaseAcquired, LeaseReleased, RunStarted, WarningIssued, encode
from runner.store import open_store
from tests.benchmarks.sizes import amount, rounds
from tests.support.postgres import Server, running

ROUNDS = rounds(5)
RUNS = amount(1_000_000)
STARTED = RunStarted(name="bench", plan="sha256:0", runner="0", steps={}, deadline_seconds=1.0)
EVENT = WarningIssued("bench.event", "x" * 280, "agent")  # about 343 bytes as JSON


def raw(url: str, batches: int, size: int) -> float:
    with closing(psycopg.connect(url, autocommit=True, prepare_threshold=None)) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS raw (run TEXT, seq BIGINT, at BIGINT, body TEXT)")
        connection.execute("TRUNCATE raw")
        connection.execute("CREATE UNIQUE INDEX IF NOT EXISTS raw_key ON raw (run, seq)")
        seq, before = 0, time.perf_counter()
        for _ in range(batches):
            rows = [("a", seq + each, 1, encode(EVENT)) for each in range(size)]
            seq += size
            with connection.transaction(), connection.cursor() as cursor:
                cursor.executemany("INSERT INTO raw VALUES (%s, %s, %s, %s)", rows)
        return (time.perf_counter() - before) / (batches * size)


async def ours(url: str, batches: int, size: int) -> float:
    async with open_store(url) as store:
        run = f"run-{time.monotonic_ns()}"
        await store.append(run, [STARTED])
        before = time.perf_counter()
        for _ in range(batches):
            await store.append(run, [EVENT] * size)
        return (time.perf_counter() - before) / (batches * size)


async def leases(url: str) -> float:
    """The median time to acquire a lease that was released."""
    taken = []
    async with open_store(url) as store:
        for fence in range(1, 101):  # the row goes with the release, for no workspace has it
            acquired: Event = LeaseAcquired(
                workspace="w", lease=f"w.{fence}", holder=CommandHolder("bench", 1), fence=1, ttl_seconds=60.0
            )
            before = time.perf_counter()
            await store.append_to_workspace("w", [acquired])
            taken.append(time.perf_counter() - before)
            await store.append_to_workspace("w", [LeaseReleased("w", f"w.{fence}")])
    return median(taken)


async def first_page(server: Server, url: str) -> float:
    """The median time to the newest 50 of a million runs."""
    columns = "id, name, status, exit_code, plan, created, ended, resumes"
    values = "md5(n::text), 'fix', 'succeeded', 0, 'sha256:1', n, n + 1, 0"
    async with open_store(url) as store:
        server.execute(f"INSERT INTO kb.runs ({columns}) SELECT {values} FROM generate_series(1, {RUNS}) AS n")
        taken = []
        for _ in range(21):
            before = time.perf_counter()
            assert len(await store.runs(limit=50)) == 50
            taken.append(time.perf_counter() - before)
    return median(taken)


def main() -> None:
    with running(durable=True) as server:
        url = server.url("postgres")
        for batches, size in ((200, 1), (100, 10), (50, 100)):
            both = [(raw(url, batches, size), trio.run(ours, url, batches, size)) for _ in range(ROUNDS)]
            theirs, mine = map(median, zip(*both, strict=True))
            print(f"batch {size:4}  us/event: raw {theirs * 1e6:7.1f}  ours {mine * 1e6:7.1f}  {theirs / mine:.2f}")
        print(f"lease acquired in {trio.run(leases, url) * 1e3:.1f} ms")
        print(f"first page of {RUNS:,} runs in {trio.run(first_page, server, url) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
