"""Workspaces as Sandboxes on a real cluster, with a stand-in for the controller of agent-sandbox."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from runner.core.errors import WorkspaceLost
from runner.ports.provider import SandboxSpec, WorkspaceRequest
from runner.providers.kubernetes import KubernetesProvider
from tests.providers.test_real_kubernetes import kill_and_recover, plays
from tests.support import cluster, dockerd
from tests.support.cluster.real import CLUSTER, NAMESPACE, Cluster
from tests.support.cluster.sandboxes import controlling
from tests.support.providers import count_through, in_pods
from tests.support.situations import Project, commit, step, until, write_files

pytestmark = [CLUSTER.mark, pytest.mark.nightly]

REQUEST = WorkspaceRequest(id="w-1", run="run-1", nonce="nonce")
CHOSEN = {"RUNNER_KUBERNETES_SANDBOXES": "agent-sandbox"}


def left(of: Cluster) -> list[str]:
    return of.kubectl("get", "sandboxes,pods", "-n", NAMESPACE, "--output=name").split()


@pytest.fixture(scope="module")
def controlled() -> Iterator[Cluster]:
    found = cluster.real_cluster()
    with controlling(found, NAMESPACE):
        yield found


@pytest.fixture
def real(controlled: Cluster) -> Iterator[Cluster]:
    yield controlled
    until(lambda: left(controlled) == [], 90)


@pytest.fixture
def provider(real: Cluster, tmp_path: Path) -> KubernetesProvider:
    return in_pods(tmp_path, real.kubeconfig, 0.4, **CHOSEN)


@pytest.fixture
def project(project: Project, real: Cluster) -> Project:
    project.env |= {"KUBECONFIG": str(real.kubeconfig), "RUNNER_KUBERNETES_NAMESPACE": NAMESPACE, **CHOSEN}
    write_files(project.folder / "repo", {"a/kept": "kept", "gone": "gone"})
    commit(project.folder / "repo")
    return project


def test_a_whole_run_works_in_sandboxes_as_in_pods(project: Project) -> None:
    plays(
        project,
        "cat made-by-setup; rm gone; mkdir b; echo new > b/new; mkdir secret || echo closed",
        workspace='setup_commands: ["echo setup > made-by-setup"]',
        run="snapshot: {message: work}\nverify: {files: {required: [b/new]}}",
    )

    record = project.succeed()

    assert project.logs("agent").splitlines()[0] == "setup"
    assert "closed" in project.logs("agent")
    assert step(record, "verify")["status"] == "succeeded"


def test_the_cluster_is_found_fit_with_the_rights_of_the_manifest(project: Project, real: Cluster) -> None:
    manifest, kubeconfig = project.folder.parent / "access.yaml", project.folder.parent / "account"
    manifest.write_text(project.runner("cluster", "manifest", "--namespace", NAMESPACE, "--agent-sandbox").out)
    real.kubectl("apply", "-f", str(manifest))
    try:
        real.write_kubeconfig(kubeconfig, account_token(real))
        project.env["KUBECONFIG"] = str(kubeconfig)
        done = project.runner("cluster", "check", "--image", dockerd.IMAGE)
    finally:
        manifest.write_text(manifest.read_text().split("---\n", 1)[1])  # the namespace stays
        real.kubectl("delete", "-f", str(manifest))

    assert (done.code, "in a pod whose network is closed" in done.out) == (0, True), done.out + done.err
    assert "Sandboxes of agent-sandbox; agent-sandbox v1beta1 is installed" in done.out


def account_token(real: Cluster) -> str:
    """The token that an old cluster makes for account `runner`."""

    def tokens() -> list[str]:
        secrets = json.loads(real.kubectl("get", "secrets", "-n", NAMESPACE, "--output=json"))["items"]
        named = "kubernetes.io/service-account.name"
        return [
            one["data"]["token"] for one in secrets if one["metadata"].get("annotations", {}).get(named) == "runner"
        ]

    until(lambda: tokens() != [], 30)
    return b64decode(tokens()[0]).decode()


async def test_a_pod_is_that_of_its_sandbox(provider: KubernetesProvider, real: Cluster) -> None:
    handle = await provider.create(REQUEST)
    async with provider.open(handle, SandboxSpec()):
        lists = [
            await trio.to_thread.run_sync(real.kubectl, "get", kind, "-n", NAMESPACE, "--output=json")
            for kind in ("sandboxes", "pods")
        ]
    await provider.destroy(handle)

    [sandbox], [pod] = (json.loads(found)["items"] for found in lists)
    assert [one["uid"] for one in pod["metadata"]["ownerReferences"]] == [sandbox["metadata"]["uid"]]
    assert pod["spec"]["automountServiceAccountToken"] is False


async def test_a_server_that_is_restarted_costs_no_command_and_no_output(
    provider: KubernetesProvider, real: Cluster
) -> None:
    def restart() -> None:
        real.stop("kube-apiserver")
        real.start_server()

    await count_through(provider, restart)


async def test_a_deleted_pod_is_a_lost_workspace_though_there_is_another(
    provider: KubernetesProvider, real: Cluster
) -> None:
    handle = await provider.create(REQUEST)
    with trio.fail_after(90):
        async with provider.open(handle, SandboxSpec()) as workspace, workspace.exec(["sleep", "600"]) as process:
            words = ("delete", "pods", "--all", "-n", NAMESPACE, "--wait=false")
            await trio.to_thread.run_sync(real.kubectl, *words)
            with pytest.raises(WorkspaceLost, match="somebody deleted pod"):
                await process.wait()
    await provider.destroy(handle)


def test_a_runner_that_is_killed_leaves_nothing_once_it_was_recovered(project: Project, real: Cluster) -> None:
    plays(project, "echo work > done; sleep 600")

    kill_and_recover(project, real, lambda: len(left(real)) == 2)

    until(lambda: left(real) == [], 90)
