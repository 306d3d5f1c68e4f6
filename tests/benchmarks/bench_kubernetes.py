"""Pods as workspaces on a real cluster, beside what ``kubectl`` does there: the first command, each further one, files.

``kubectl cp`` needs ``tar`` in the image of its pod, which has it here; the workspace's image has none. This side is a
file system in memory.

Run: ``python tests/benchmarks/bench_kubernetes.py``, as root; the cluster is the tests' own, of one node.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import trio

from runner.core.model import Mount
from runner.core.settings import Settings
from runner.ports.provider import SandboxSpec, Workspace, WorkspaceRequest
from tests.benchmarks.bench_volumes import FILL, fill, show
from tests.benchmarks.sizes import amount, rounds
from tests.support import dockerd
from tests.support.cluster import real_volumes
from tests.support.cluster.real import NAMESPACE, Cluster, running
from tests.support.providers import PodsOnTestImage, in_pods

ROUNDS, COMMANDS = rounds(3), rounds(20)
FILES = amount(10_000)
IMAGE, OTHER = "runner-tests-tar:1", "other"
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
        options = (f"--image={IMAGE}", "--image-pull-policy=Never", "--restart=Never")
        self("run", OTHER, "-n", NAMESPACE, *options, "--command", "--", "sleep", "1000")
        self("wait", "-n", NAMESPACE, f"pod/{OTHER}", "--for=condition=Ready", "--timeout=60s")
        self(*IN_IT, "true")

    def count(self, directory: str) -> int:
        words = ("sh", "-c", f"find {directory} -type f | wc -l")
        return int(self._of.kubectl(*IN_IT, *words))

    def delete(self) -> None:
        self("delete", "pod", "-n", NAMESPACE, OTHER, "--grace-period=1", "--wait")


async def commands(workspace: Workspace) -> float:
    found = []
    for _ in range(COMMANDS):
        begun = time.perf_counter()
        await workspace.run(["true"])
        found.append(time.perf_counter() - begun)
    return median(found)


async def files_in(workspace: Workspace, kubectl: Kubectl, sent: Path) -> None:
    """Send files to an open workspace, with the command before which that happens."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(ROUNDS):
        top = sent / f"in-{number}"
        subprocess.run(["python3", "-c", FILL.format(files=FILES, size=10_240, top=top)], check=True)
        begun = time.perf_counter()
        found = await workspace.run(["sh", "-c", f"find /sent/{top.name} -type f | wc -l"])
        times[0].append(time.perf_counter() - begun)
        assert int(found.stdout) == FILES
        times[1].append(seconds(partial(kubectl, "cp", str(top), f"{NAMESPACE}/{OTHER}:/tmp/{top.name}")))
        assert kubectl.count(f"/tmp/{top.name}") == FILES
        shutil.rmtree(top)
    show(f"{FILES:,} new files in", *(min(each) for each in times), beside="kubectl cp")


async def files_out(workspace: Workspace, kubectl: Kubectl, tree: Path) -> None:
    """Fetch files that commands have made."""
    times: tuple[list[float], list[float]] = ([], [])
    out = tree.parent / "theirs"
    kubectl(*IN_IT, "python3", "-c", FILL.format(files=FILES, size=10_240, top="/tmp/made"))
    for _ in range(ROUNDS):
        await fill(workspace, FILES, 10_240)
        begun = time.perf_counter()
        await workspace.refresh()
        times[0].append(time.perf_counter() - begun)
        times[1].append(seconds(lambda: kubectl("cp", f"{NAMESPACE}/{OTHER}:/tmp/made", str(out))))
        for top in (tree / "made", out):
            assert sum(path.is_file() for path in top.rglob("*")) == FILES
        shutil.rmtree(out)
        await workspace.run(["rm", "-r", "made"])
        await workspace.refresh()
    show(f"{FILES:,} new files out", *(min(each) for each in times), beside="kubectl cp")


async def toolchains(cluster: Cluster, home: Path, claim: str) -> None:
    """Open a workspace with a toolchain that is sent, and with one that a claim keeps."""
    top, env = home.with_name("toolchain"), {"RUNNER_KUBERNETES_CACHE_CLAIM": claim}
    subprocess.run(["python3", "-c", FILL.format(files=FILES, size=10_240, top=top)], check=True)
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(1 + ROUNDS):
        for own, more in zip(times, (env, {}), strict=True):
            provider = in_pods(home, cluster.kubeconfig, 0.4, **more)
            handle = await provider.create(WorkspaceRequest(id=f"tools-{number}", run="run", nonce="nonce"))
            begun = time.perf_counter()
            async with provider.open(handle, SandboxSpec(toolchains=(str(top),))) as workspace:
                await workspace.run(["true"])
                own.append(time.perf_counter() - begun)
            await provider.destroy(handle)
    show(f"opening with {FILES:,} files of a toolchain, kept", *(min(each[1:]) for each in times), beside="sent")


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
    sent = home.with_name("sent")
    sent.mkdir()
    async with provider.open(handle, SandboxSpec(mounts=(Mount(sent, "/sent"),))) as workspace:
        theirs = median(seconds(lambda: kubectl(*IN_IT, "true")) for _ in range(COMMANDS))
        show("`true` in an open workspace", await commands(workspace), theirs, beside="kubectl exec")
        await files_in(workspace, kubectl, sent)
        await files_out(workspace, kubectl, handle.tree)
    await provider.destroy(handle)
    kubectl.delete()


def main() -> None:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        with running() as cluster:
            with cluster.daemon.client() as client:
                repository, _, tag = IMAGE.partition(":")
                client.import_image_from_data(dockerd.root_file_system("tar"), repository=repository, tag=tag)
            trio.run(measure, cluster, folder / "home")
            with real_volumes.toolchain_claim(cluster, "1Gi") as claim:
                trio.run(toolchains, cluster, folder / "home", claim)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
