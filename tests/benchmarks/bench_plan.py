"""Cost of a plan: specs compiled, written as canonical JSON, digest and longest path; and doit's list beside it.

Run: python tests/benchmarks/bench_plan.py. Figures are CPU beyond start, of plans the least and the median; compare
rows of one run only.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import trio
from msgspec.structs import replace

from runner.compiler import compile_plan
from runner.core.codec import digest
from runner.core.settings import Settings
from runner.manifest.load import defaults, load
from runner.ops.planning.make_plan import make_plan
from runner.plan.graph import Graph
from runner.plan.model import Step
from runner.spec.model import Facts, RunSpec
from runner.spec.resolve import resolve
from runner.spec.select import select
from tests.benchmarks.measure import doit
from tests.benchmarks.sizes import amount, rounds

ROUNDS = rounds(5)
NEEDS = "['n:%d' % (i - 1)] if i else []"
MANIFESTS = """
apiVersion: runner/v1
kind: AgentType
metadata: {name: worker}
spec:
  agent: script
  script: {files: [{path: run.sh, content: "true\\n"}]}
  workspace: {enabled: true, providers: [process], setup_commands: [make deps, make tools]}
  post_hooks: [[make, clean]]
---
apiVersion: runner/v1
kind: IncidentRun
metadata: {name: work}
spec:
  agent_type: worker
  prompt: Fix it.
  verify: {files: {required: [README]}, commands: [{run: [make, check]}]}
"""


def one_spec(folder: Path) -> tuple[RunSpec, Facts]:
    """The spec of one run of nine steps, and its Facts."""
    (folder / "bench.runner.yaml").write_text(MANIFESTS)
    settings = Settings.from_env({"RUNNER_HOME": str(folder / "home")})
    planned = trio.run(make_plan, folder, settings)
    documents, _ = load(folder)
    (selected,), _ = select(documents, defaults())
    spec, findings = resolve(selected, settings, planned.facts, {})
    assert not findings
    return spec, planned.facts


def compiled(spec: RunSpec, facts: Facts, steps: int) -> tuple[float, int]:
    """CPU seconds to plan about so many steps, as many runs, each needing the one before; and their number."""
    runs = max(1, steps // 9)
    names = [f"run{n}" for n in range(runs)]
    specs = [replace(spec, name=name, group=name, needs=(names[n - 1],) if n else ()) for n, name in enumerate(names)]
    began = time.process_time()
    plan, findings = compile_plan(specs, facts, documents={}, settings={})
    assert not findings
    digest(plan.runs)
    plan.worst_case()
    return time.process_time() - began, sum(len(run.steps) for run in plan.runs)


def graph(steps: int) -> float:
    """CPU seconds to order a mesh of so many steps, and to find its longest path."""
    nodes = [
        Step(
            id=str(n),
            kind="x",
            what="x",
            phase="work",
            needs=tuple(str(n - k) for k in (1, 7, 100) if n >= k),
            deadline_seconds=1.0,
            origin="a:1",
        )
        for n in range(steps)
    ]
    began = time.process_time()
    made = Graph({node.id: node.needs for node in nodes})
    made.order()
    made.longest({node.id: node.deadline_seconds for node in nodes})
    return time.process_time() - began


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        spec, facts = one_spec(Path(folder))
    print(f"{'steps':>8} {'plan ms':>9} {'median':>9} {'graph ms':>9} {'peak MiB':>9} {'doit list ms':>13}")
    for count in map(amount, (1_000, 10_000, 100_000)):
        measured = [compiled(spec, facts, count) for _ in range(ROUNDS)]
        (least, steps), median = min(measured), statistics.median(took for took, _ in measured)
        peak = getrusage(RUSAGE_SELF).ru_maxrss / 1024
        theirs = doit(count, NEEDS, "list", "--all", "--quiet")
        row = (least * 1e3, median * 1e3, graph(count) * 1e3, peak)
        print(f"{steps:>8}", *(f"{figure:>9.0f}" for figure in row), f"{theirs * 1e3:>13.0f}")


if __name__ == "__main__":
    main()
