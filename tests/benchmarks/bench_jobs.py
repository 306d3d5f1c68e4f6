"""Runs as Jobs of a cluster of 1,000 nodes, followed as a server does: what each costs does not grow with their number.

The cluster is simulated, on a clock that jumps, and so is the store: of both the requests and the rows are counted.
Memory is that of the process, with the cluster and the store in it.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import trio
from msgspec.structs import replace
from trio.testing import MockClock

from runner.core.model import Outcome, Status
from runner.core.settings import Settings
from runner.events.events import RunEnded, RunStarted
from runner.lifecycle.liveness import BEAT
from runner.ops.planning.make_plan import PlanResult, make_plan
from runner.ops.runs.job_table import JobTable
from runner.ops.runs.jobs import submit_to
from runner.ports.store import RunnerRow
from runner.store.memory import MemoryStore
from tests.benchmarks.measure import since
from tests.benchmarks.sizes import amount
from tests.support.cluster.simulated import SimulatedCluster
from tests.support.folder_contents import folder

RUN_SECONDS = (20.0, 40.0)
RUNS = (1_000, 10_000, 100_000)
MEMBERS = 1_000  # runs of a plan
WORKERS_ROWS = 2  # of a worker that does nothing: the others are the same, wherever a run is carried out
SHARED = {
    "RUNNER_ARTIFACTS": "s3://artifacts/team-a",
    "RUNNER_DATABASE_URL": "postgres://store.example/runner",
    "RUNNER_KUBERNETES_NAMESPACE": "agents",
    "RUNNER_WORKER_IMAGE": "registry.example/worker:1",
}
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "https://cluster.example"}}]
users: [{name: u, user: {token: t}}]
"""
MANIFESTS = """
apiVersion: runner/v1
kind: AgentType
metadata: {name: quick}
spec: {agent: script, script: {path: work.sh}, workspace: {enabled: true, providers: [process]}}
---
apiVersion: runner/v1
kind: IncidentRun
metadata: {name: work}
spec: {agent_type: quick}
"""


@dataclass
class Size:
    """Of a cluster: its nodes, the pods that each has room for, and the quota of Jobs."""

    nodes: int
    pods: int
    jobs: int


LARGE = Size(nodes=1_000, pods=4, jobs=6_000)


@dataclass
class Found:
    """Of all runs; ``seconds`` are those of the clock that jumps."""

    requests: int
    rows: int
    seconds: float
    cpu: float
    rss: int  # KiB, at most


async def planned(home: Path, settings: Settings) -> PlanResult:
    """The plan of one run."""
    manifests = folder(home / "manifests")
    (manifests / "work.sh").write_text("true\n")
    (manifests / "work.runner.yaml").write_text(MANIFESTS)
    return await make_plan(manifests, settings)


def members(one: PlanResult, first: int, count: int) -> PlanResult:
    [run] = one.plan.runs
    names = [f"work.{number}" for number in range(first, first + count)]
    runs = tuple(replace(run, name=name, providers=("kubernetes",)) for name in names)
    wanted = dict.fromkeys(names, one.wanted["work"])
    return replace(one, plan=replace(one.plan, runs=runs), wanted=wanted)


async def simulate(settings: Settings, one: PlanResult, runs: int, size: Size) -> Found:
    worker = RunnerRow(id="worker", host="elsewhere", boot="1", home="", pid=1, ticks=1)
    store = MemoryStore(lambda: round(trio.current_time() * 1e6), runner=worker)
    begun, luck = since(), random.Random(1)

    async def beat() -> None:
        while True:
            await store.beat()
            await trio.sleep(BEAT)

    async def work(run: str) -> None:
        await store.append(run, [RunStarted(name="work", plan="", runner="", steps={}, deadline_seconds=1e6)])
        await trio.sleep(luck.uniform(*RUN_SECONDS))
        await store.append(run, [RunEnded(Outcome(status=Status.SUCCEEDED), 0)])

    async def follow(table: JobTable, plan: PlanResult) -> None:
        async with submit_to(table, plan, settings, store, shown=False) as submitted:
            await submitted.wait()
        assert not submitted.errors, submitted.errors[0].message

    async with trio.open_nursery() as nursery:
        cluster = SimulatedCluster(nursery, work, **asdict(size))
        table = JobTable(cluster)
        nursery.start_soon(table.keep_looking)
        nursery.start_soon(beat)
        async with trio.open_nursery() as plans:
            for first in range(0, runs, MEMBERS):
                plans.start_soon(follow, table, members(one, first, min(MEMBERS, runs - first)))
        nursery.cancel_scope.cancel()
    assert {row.status for row in await store.runs()} == {"succeeded"}
    rows = sum((await store.counts()).values()) - WORKERS_ROWS * runs
    rss = getrusage(RUSAGE_SELF).ru_maxrss
    return Found(cluster.requests, rows, trio.current_time(), since(begun)[1], rss)


def measure(runs: int, size: Size = LARGE) -> Found:
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        (home / "kubeconfig").write_text(KUBECONFIG)
        given = {"RUNNER_HOME": str(home / "home"), "KUBECONFIG": str(home / "kubeconfig")}
        settings = Settings.from_env({**SHARED, **given})
        one = trio.run(planned, home, settings)
        clock = MockClock(autojump_threshold=0)
        return trio.run(simulate, settings, one, runs, size, clock=clock)


def show(runs: int) -> None:
    found = measure(runs)
    print(
        f"{runs:7,} runs: {found.requests / runs:5.2f} requests and {found.rows / runs:.2f} rows a run,"
        f" {found.cpu / runs * 1e3:.2f} ms of CPU a run, {found.rss / 1024:.0f} MiB, {found.seconds:.0f} s long"
    )


def main() -> None:
    for runs in RUNS:  # each in a process of its own, for the memory that it takes
        subprocess.run([sys.executable, __file__, str(amount(runs))], check=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        show(int(sys.argv[1]))
    else:
        main()
