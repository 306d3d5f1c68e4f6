"""Workspaces as Sandboxes of agent-sandbox, on the double: the same workspaces, and nothing that weakens them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
from msgspec.structs import replace

from runner.cluster import agent_sandbox
from runner.core.errors import ProviderFailed
from runner.core.settings import Settings
from runner.ops.host.cluster_check import check_cluster
from runner.ports.provider import SandboxSpec, WorkspaceRequest
from runner.providers._pod_sandbox import PodSandbox
from runner.providers.kubernetes import KubernetesProvider
from tests.providers.test_kubernetes import PATH, Api, kill_a_runner, lose_a_pod
from tests.support import cluster, dockerd
from tests.support.cluster.double import NAMESPACE
from tests.support.needs import ROOT
from tests.support.providers import in_pods
from tests.support.situations import REPO, Project, commit, step, write_files

if TYPE_CHECKING:
    from runner.cluster.objects import ClusterObjects

pytestmark = ROOT.mark

REQUEST = WorkspaceRequest(id="w-1", run="run-1", nonce="nonce")
SANDBOXES = f"/apis/agents.x-k8s.io/v1beta1/namespaces/{NAMESPACE}/sandboxes"
CHOSEN = {"RUNNER_KUBERNETES_SANDBOXES": "agent-sandbox"}


@pytest.fixture
def api() -> Iterator[Api]:
    dockerd.DOCKER.require()
    made = Api()
    made("POST", "/double/sandboxes", {"versions": ["v1beta1"]})
    yield made
    assert left(made) == []
    made("POST", "/double/denied", [])
    made("POST", "/double/sandboxes", {})


def left(api: Api) -> list[str]:
    return api.pods() + [one["metadata"]["name"] for one in api("GET", SANDBOXES)["items"]]


@pytest.fixture
def provider(api: Api, tmp_path: Path) -> KubernetesProvider:
    return in_pods(tmp_path, cluster.double_kubeconfig(), 0.4, **CHOSEN)


def test_a_whole_run_works_in_sandboxes_as_in_pods(project: Project, api: Api) -> None:
    write_files(project.folder / "repo", {"a/kept": "kept"})
    commit(project.folder / "repo")
    workspace = f"{REPO}\nbase_image: {dockerd.IMAGE}\nprotected_paths: [secret/]\n"
    script = "test $(id -u) != 0 || exit 1; echo new > new; mkdir secret || echo closed"
    project.script(script, provider="kubernetes", workspace=workspace, run="verify: {files: {required: [new]}}")
    project.env |= {"KUBECONFIG": str(cluster.double_kubeconfig()), "RUNNER_KUBERNETES_NAMESPACE": NAMESPACE, **CHOSEN}

    record = project.succeed()

    planned = (project.directory(record) / "plan.json").read_text()
    assert "kubernetes, by Sandboxes of agent-sandbox" in planned
    assert "closed" in project.logs("agent")
    assert step(record, "verify")["status"] == "succeeded"


@pytest.mark.nightly
async def test_the_work_of_a_killed_runner_is_fetched_and_no_sandbox_is_left(
    provider: KubernetesProvider, api: Api, tmp_path: Path
) -> None:
    kill_a_runner(tmp_path, **CHOSEN)
    (handle,) = await provider.list_owned("nonce")
    [sandbox] = api("GET", SANDBOXES)["items"]
    [pod] = api("GET", PATH)["items"]

    await provider.evict(handle)

    [owner] = pod["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("Sandbox", sandbox["metadata"]["uid"])
    assert left(api) == []
    assert (handle.tree / "done").read_text() == "work\n"
    await provider.destroy(handle)


async def test_a_sandbox_without_a_pod_is_removed_with_its_workspace(
    provider: KubernetesProvider, api: Api, tmp_path: Path
) -> None:
    """Settings may say something else by then."""
    api("POST", "/double/sandboxes", {"versions": ["v1beta1"], "runs": False})
    handle = await provider.create(REQUEST)

    async def open_it() -> None:
        async with provider.open(handle, SandboxSpec()):
            raise AssertionError("nothing runs in it")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(open_it)
        while not await trio.to_thread.run_sync(left, api):
            await trio.sleep(0.01)
        [sandbox] = (await trio.to_thread.run_sync(api, "GET", SANDBOXES))["items"]
        nursery.cancel_scope.cancel()
    assert left(api) == []
    await trio.to_thread.run_sync(api, "POST", SANDBOXES, {**sandbox, "status": {}})  # as if it had been killed

    await in_pods(tmp_path, cluster.double_kubeconfig(), 0.4).destroy(handle)

    assert left(api) == []


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        pytest.param({"runs": False}, "its controller says nothing; does it run", id="no controller"),
        pytest.param({"alters": {"automountServiceAccountToken": True}}, "asked for: `spec.autom", id="token"),
        pytest.param({"alters": {"runtimeClassName": "weak", "hostname": "x"}}, "asked for: `spec.hostn", id="host"),
        pytest.param({"alters": {"securityContext": {}}}, "ReconcilerError: runAsNonRoot", id="not admitted"),
    ],
)
async def test_a_pod_that_is_not_as_it_was_asked_for_runs_nothing(
    provider: KubernetesProvider, api: Api, monkeypatch: pytest.MonkeyPatch, installed: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(agent_sandbox, "POD_SECONDS", 1.0)
    api("POST", "/double/sandboxes", {"versions": ["v1beta1"], **installed})
    handle = await provider.create(REQUEST)

    with pytest.raises(ProviderFailed, match=words) as caught:
        async with provider.open(handle, SandboxSpec()):
            raise AssertionError("something would run in it")

    assert caught.value.hint
    assert left(api) == []
    await provider.destroy(handle)


RIGHTS = [["create", "sandboxes"], ["list", "sandboxes"]]
LACKING = [
    pytest.param({}, [], "has no custom resources of it", id="not installed"),
    pytest.param({"versions": ["v1alpha1"]}, [], "has only v1alpha1 of it", id="too old"),
    pytest.param({"versions": ["v1beta1"]}, RIGHTS, "missing in.*: create sandboxes, list sandboxes", id="no rights"),
]


@pytest.mark.parametrize(("installed", "denied", "words"), LACKING)
async def test_what_a_cluster_lacks_for_sandboxes_is_named(
    api: Api, provider: KubernetesProvider, installed: dict[str, Any], denied: list[list[str]], words: str
) -> None:
    there = await provider.probe()
    api("POST", "/double/sandboxes", installed)
    api("POST", "/double/denied", denied)
    probe = await provider.probe()
    api("POST", "/double/sandboxes", {"versions": ["v1beta1"]})

    assert (there.available, there.versions["agent-sandbox"]) == (True, "v1beta1"), there.reason
    assert (probe.available, bool(probe.hint)) == (False, True)
    assert re.search(words, probe.reason or "")


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ("pods", "plain pods; agent-sandbox v1beta1 is installed, used with RUNNER_KUBERNETES_SANDBOXES: this account"),
        ("agent-sandbox", "Sandboxes of agent-sandbox; agent-sandbox v1beta1 is installed: this account does not see"),
    ],
)
async def test_the_check_says_what_workspaces_are(api: Api, tmp_path: Path, chosen: str, words: str) -> None:
    env = {"RUNNER_HOME": str(tmp_path), "KUBECONFIG": str(cluster.double_kubeconfig())}
    env |= {"RUNNER_KUBERNETES_NAMESPACE": NAMESPACE, "RUNNER_KUBERNETES_SANDBOXES": chosen}

    findings = {one.name: one for one in await check_cluster(Settings.from_env(env), None)}

    assert words in findings["sandboxes"].found


def test_another_pod_of_its_name_is_not_the_one_that_was_lost() -> None:
    sandbox = PodSandbox(cast("ClusterObjects", None), "p", "workspace `w-1`")
    for uid in ("1", "2"):
        sandbox.look({"metadata": {"uid": uid}, "status": {"phase": "Pending"}})

    assert "somebody deleted pod `p`" in str(sandbox.why_lost())


@pytest.mark.nightly
async def test_a_pod_that_its_controller_made_again_is_not_taken_for_the_lost_one(
    provider: KubernetesProvider, api: Api
) -> None:
    await lose_a_pod(provider, api)


@pytest.mark.nightly
async def test_a_warm_pod_is_that_of_a_sandbox(provider: KubernetesProvider, api: Api) -> None:
    slot = await provider.create(replace(REQUEST, id="slot-1"))
    async with provider.open_slot(slot, (), ()) as idle:
        [sandbox] = api("GET", SANDBOXES)["items"]
        handoff = idle.detach()
    handle = await provider.assign(slot, REQUEST)
    provider.receive(handle, handoff)
    async with provider.open(handle, SandboxSpec()) as workspace:
        assert set(left(api)) == {sandbox["metadata"]["name"]}
        assert (await workspace.run(["true"])).exit.ok
        assert (await workspace.effective()).notes == ()
    assert left(api) == []
    await provider.destroy(handle)
