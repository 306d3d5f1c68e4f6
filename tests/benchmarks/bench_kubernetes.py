"""Pods as workspaces on a real cluster, beside what ``kubectl`` does there: the first command, and each further one.

Run: ``python tests/benchmarks/bench_kubernetes.py``, as root; the cluster is the tests' own, of one node.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import trio

from runner.core.settings import Settings
from runner.ports.provider import SandboxSpec, Workspace, WorkspaceRequest
from tests.benchmarks.bench_volumes import show
from tests.benchmarks.sizes import rounds
from tests.support import dockerd
from tests.support.cluster.real import NAMESPACE, Cluster, running
from tests.support.providers import PodsOnTestImage

ROUNDS, COMMANDS = rounds(3), rounds(20)
OTHER = "other"
IN_IT = ("exec", "-n", NAMESPACE, OTHER, "--")


def seconds(what: Callable[[], object]) -> float:
    begun = time.perf_counter()
    what()
    return time.perf_counter() - begun


class Kubectl:
    """A pod that kubectl makes and uses."""

    def __init__(self, of: Cluster) -> None:
        self._of = of

    def __call__(self, *words: str) -> None:
        self._of.kubectl(*words)

    def first_command(self) -> None:
        options = (f"--image={dockerd.IMAGE}", "--image-pull-policy=Never", "--restart=Never")
        self("run", OTHER, "-n", NAMESPACE, *options, "--command", "--", "sleep", "1000")
        self("wait", "-n", NAMESPACE, f"pod/{OTHER}", "--for=condition=Ready", "--timeout=60s")
        self(*IN_IT, "true")

    def delete(self) -> None:
        self("delete", "pod", "-n", NAMESPACE, OTHER, "--grace-period=1", "--wait")


async def commands(workspace: Workspace) -> float:
    found = []
    for _ in range(COMMANDS):
        begun = time.perf_counter()
        await workspace.run(["true"])
        found.append(time.perf_counter() - begun)
    return median(found)


async def measure(cluster: Cluster, home: Path) -> None:
    env = {"RUNNER_HOME": str(home), "KUBECONFIG": str(cluster.kubeconfig), "RUNNER_KUBERNETES_NAMESPACE": NAMESPACE}
    provider, kubectl = PodsOnTestImage(Settings.from_env(env)), Kubectl(cluster)
    firsts: tuple[list[float], list[float]] = ([], [])
    for number in range(ROUNDS):
        begun = time.perf_counter()
        handle = await provider.create(WorkspaceRequest(id=f"bench-{number}", run="run", nonce="nonce"))
        async with provider.open(handle, SandboxSpec()) as workspace:
            await workspace.run(["true"])
            firsts[0].append(time.perf_counter() - begun)
        await provider.destroy(handle)
        firsts[1].append(seconds(kubectl.first_command))
        if number + 1 < ROUNDS:
            kubectl.delete()
    show("from nothing to the end of the first command", *map(median, firsts), beside="kubectl run, wait and exec")

    handle = await provider.create(WorkspaceRequest(id="bench", run="run", nonce="nonce"))
    async with provider.open(handle, SandboxSpec()) as workspace:
        theirs = median(seconds(lambda: kubectl(*IN_IT, "true")) for _ in range(COMMANDS))
        show("`true` in an open workspace", await commands(workspace), theirs, beside="kubectl exec")
    await provider.destroy(handle)
    kubectl.delete()


def main() -> None:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        with running() as cluster:
            trio.run(measure, cluster, folder / "home")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
