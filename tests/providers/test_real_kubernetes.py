"""Pods as workspaces on a real cluster: whole runs, and what happens to a cluster while commands run."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from runner.core.errors import VolumeFailed, WorkspaceLost
from runner.core.model import Limits
from runner.core.settings import Settings
from runner.ports.provider import Provider, SandboxSpec, WorkspaceRequest
from runner.providers import _pod_cache
from tests.providers.test_pod_cache import said
from tests.providers.test_warm_pods import claim_at_once
from tests.support import cluster, dockerd
from tests.support.cluster import real_volumes
from tests.support.cluster.real import CLUSTER, NAMESPACE, Cluster
from tests.support.folder_contents import folder, put
from tests.support.providers import REAL_PODS, PodsOnTestImage, count_through, in_pods, make
from tests.support.situations import REPO, Project, commit, step, until, write_files

pytestmark = [CLUSTER.mark, pytest.mark.nightly]

REQUEST = WorkspaceRequest(id="w-1", run="run-1", nonce="nonce")


def pods(of: Cluster) -> list[str]:
    return of.kubectl("get", "pods", "-n", NAMESPACE, "--output=name").split()


@pytest.fixture
def real() -> Iterator[Cluster]:
    found = cluster.real_cluster()
    yield found
    until(lambda: pods(found) == [], 90)


@pytest.fixture
def provider(real: Cluster, tmp_path: Path) -> Provider:
    return make(REAL_PODS, tmp_path, 0.4)


@pytest.fixture
def project(project: Project, real: Cluster) -> Project:
    """A project whose agent is a script in a pod of the cluster."""
    project.env |= {"KUBECONFIG": str(real.kubeconfig), "RUNNER_KUBERNETES_NAMESPACE": NAMESPACE}
    write_files(project.folder / "repo", {"a/kept": "kept", "gone": "gone"})
    commit(project.folder / "repo")
    return project


def plays(project: Project, script: str, **more: str) -> None:
    workspace = f"{REPO}\nbase_image: {dockerd.IMAGE}\nprotected_paths: [secret/]\n" + more.pop("workspace", "")
    project.script(script, provider="kubernetes", workspace=workspace, **more)


def test_a_whole_run_works_there_as_anywhere(project: Project) -> None:
    verify = "verify: {files: {required: [b/new]}, commands: [{run: [sh, -c, 'test ! -e gone'], timeout: 60s}]}"
    plays(
        project,
        "cat made-by-setup; rm gone; mkdir b; echo new > b/new; echo more >> a/kept; mkdir secret || echo closed",
        workspace='setup_commands: ["echo setup > made-by-setup"]',
        run=f"snapshot: {{message: work}}\n{verify}",
    )

    record = project.succeed()

    assert project.logs("agent").splitlines()[0] == "setup"
    assert "closed" in project.logs("agent")
    assert step(record, "verify")["status"] == "succeeded"


def test_the_cluster_is_found_fit(project: Project) -> None:
    done = project.runner("cluster", "check", "--image", dockerd.IMAGE)

    assert (done.code, "in a pod whose network is closed" in done.out) == (0, True), done.out + done.err


def test_a_network_that_no_policy_closes_is_found_before_the_agent_starts(project: Project, real: Cluster) -> None:
    plays(project, "echo started")
    real.open_network()
    try:
        done, _ = project.apply()
    finally:
        real.close_network()

    assert (done.code, "takes a NetworkPolicy and does not enforce it" in done.err + done.out) == (4, True), done.out
    assert "started" not in done.out


async def test_a_server_that_is_restarted_costs_no_command_and_no_output(provider: Provider, real: Cluster) -> None:
    def restart() -> None:
        real.stop("kube-apiserver")
        real.start_server()

    await count_through(provider, restart)


async def test_a_kubelet_that_is_restarted_costs_no_command_and_no_output(provider: Provider, real: Cluster) -> None:
    def restart() -> None:
        real.stop("kubelet")
        real.start_kubelet()

    await count_through(provider, restart)


async def test_of_20_runs_that_ask_at_once_for_a_pool_of_5_just_5_get_a_warm_pod(real: Cluster, tmp_path: Path) -> None:
    await claim_at_once(tmp_path, real.kubeconfig, pods=5, claims=20)


@pytest.fixture
def claim(real: Cluster) -> Iterator[str]:
    with real_volumes.toolchain_claim(real, "64Mi") as name:
        yield name


async def test_a_toolchain_is_sent_once_and_is_the_same_in_each_pod(
    real: Cluster, claim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def provider(name: str) -> Provider:
        return in_pods(folder(tmp_path / name), real.kubeconfig, 0.4, RUNNER_KUBERNETES_CACHE_CLAIM=claim)

    put(tmp_path / "toolchain" / "tool", "#!/bin/sh\necho it works\n", 0o755)

    first = await said(provider("one"), tmp_path / "toolchain")
    monkeypatch.setattr(_pod_cache, "pack_trees", lambda sources: pytest.fail("it is sent again"))
    second = await said(provider("another"), tmp_path / "toolchain")

    assert first == second == "it works\n"


async def test_a_node_that_is_cordoned_keeps_its_commands(provider: Provider, real: Cluster) -> None:
    handle = await provider.create(REQUEST)
    async with provider.open(handle, SandboxSpec()) as workspace:
        await trio.to_thread.run_sync(real.kubectl, "cordon", "n1")
        try:
            assert (await workspace.run(["sh", "-c", "echo still"])).stdout == b"still\n"
        finally:
            await trio.to_thread.run_sync(real.kubectl, "uncordon", "n1")
    await provider.destroy(handle)


async def test_a_deleted_pod_is_a_lost_workspace(provider: Provider, real: Cluster) -> None:
    handle = await provider.create(REQUEST)
    with trio.fail_after(60):
        async with provider.open(handle, SandboxSpec()) as workspace, workspace.exec(["sleep", "600"]) as process:
            await trio.to_thread.run_sync(real.kubectl, "delete", "-n", NAMESPACE, "--wait=false", *pods(real))
            with pytest.raises(WorkspaceLost, match="somebody deleted pod"):
                await process.wait()
    await provider.destroy(handle)


def kill_and_recover(project: Project, real: Cluster, left: Callable[[], object]) -> None:
    """Kill the runner of a run, and recover it; before that something is ``left``."""
    started = project.start("apply", str(project.folder))
    until(lambda: "sandbox" in "".join(states(real)), 120)
    os.killpg(started.pid, signal.SIGKILL)
    started.communicate()
    assert left()

    done = project.runner("recover")

    assert done.code == 0, done.err


def test_a_runner_that_is_killed_leaves_nothing_once_it_was_recovered(project: Project, real: Cluster) -> None:
    plays(project, "echo work > done; sleep 600")

    kill_and_recover(project, real, lambda: pods(real))

    until(lambda: pods(real) == [], 90)  # old kubelets leave the object of a pod that has ended for up to a minute


@pytest.fixture
def volumes(project: Project, real: Cluster) -> Iterator[None]:
    """The disks of workspaces are volumes; at the end there is no claim."""
    project.env |= {"RUNNER_KUBERNETES_STORAGE_CLASS": real_volumes.CLASS}
    with real_volumes.provisioning(real):
        yield
        until(lambda: claims(real) == [], 90)


def claims(of: Cluster) -> list[str]:
    return of.kubectl("get", "pvc", "-n", NAMESPACE, "--output=name").split()


@pytest.mark.usefixtures("volumes")
def test_a_run_whose_disk_is_a_volume_can_fill_it_and_no_more(project: Project) -> None:
    plays(
        project,
        "echo work > done; head -c 100000000 /dev/zero > large || echo full; rm large; ls -ld /workspace done; id",
        workspace="resource_limits: {disk: 64M}",
    )

    record = project.succeed()

    assert "full" in project.logs("agent")
    assert "done" in (project.directory(record) / "work.patch").read_text()


@pytest.mark.usefixtures("volumes")
def test_a_killed_runner_leaves_no_volume_once_it_was_recovered(project: Project, real: Cluster) -> None:
    plays(project, "echo work > done; sleep 600", workspace="resource_limits: {disk: 64M}")

    kill_and_recover(project, real, lambda: claims(real))

    until(lambda: (pods(real), claims(real)) == ([], []), 90)


def test_a_class_that_a_cluster_does_not_have_ends_a_run_at_once(project: Project, real: Cluster) -> None:
    """As an account that may not look for classes sees it: by the cluster's own event."""
    handle = WorkspaceRequest(id="w-2", run="run-1", nonce="nonce", limits=Limits(disk_bytes=64 << 20))
    env = {**project.env, "RUNNER_HOME": str(project.home), "RUNNER_KUBERNETES_STORAGE_CLASS": "gone"}
    provider = PodsOnTestImage(Settings.from_env(env))

    async def open_it() -> None:
        made = await provider.create(handle)
        try:
            async with provider.open(made, SandboxSpec()):
                pytest.fail("it is open")
        finally:
            await provider.destroy(made)

    with pytest.raises(VolumeFailed, match="not found"):
        trio.run(open_it)


def states(real: Cluster) -> Iterator[str]:
    found = json.loads(real.kubectl("get", "pods", "-n", NAMESPACE, "--output=json") or '{"items": []}')
    for pod in found["items"]:
        yield from (one["name"] for one in pod["status"].get("containerStatuses", ()) if "running" in one["state"])
