"""Pods as workspaces, on the double: lost connections and pods, a runner that is killed, what a cluster lacks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.request import Request, urlopen

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from runner.core.errors import ImageMissing, WorkspaceLost
from runner.core.model import IsolationClass, Limits
from runner.core.nurseries import unwrapping_groups
from runner.core.settings import Settings
from runner.ports.provider import Probe, Provider, SandboxSpec, WorkspaceRequest
from runner.providers._pod_sandbox import PodSandbox
from runner.providers.kubernetes import KubernetesProvider
from runner.sandbox import pod
from runner.testing.outside import eventually
from tests.support import cluster, dockerd
from tests.support.cluster.double import NAMESPACE
from tests.support.needs import ROOT
from tests.support.providers import PODS, count_through, make
from tests.support.situations import REPO, Project, commit, step, write_files

if TYPE_CHECKING:
    from runner.cluster.objects import ClusterObjects

pytestmark = ROOT.mark

REQUEST = WorkspaceRequest(id="w-1", run="run-1", nonce="nonce")
PATH = f"/api/v1/namespaces/{NAMESPACE}/pods"

RUNNER = """
import sys, trio
from pathlib import Path
from runner.ports.provider import SandboxSpec, WorkspaceRequest
from runner.providers.kubernetes import KubernetesProvider
from runner.core.settings import Settings
from tests.support import dockerd

async def main():
    env = {"RUNNER_HOME": sys.argv[1], "KUBECONFIG": sys.argv[2], "RUNNER_KUBERNETES_NAMESPACE": "agents"}
    env |= dict(word.split("=") for word in sys.argv[3:])
    provider = KubernetesProvider(Settings.from_env(env))
    handle = await provider.create(WorkspaceRequest(id="w-1", run="run-1", nonce="nonce", image=dockerd.IMAGE))
    async with provider.open(handle, SandboxSpec(protected=("missing/",))) as workspace:
        await workspace.run(["sh", "-c", "echo work > done; mkdir closed; echo x > closed/file; chmod 0 closed"])
        async with workspace.exec(["sh", "-c", "trap '' TERM; echo going on > on; while :; do sleep 1; done"]):
            await trio.sleep(0.5)
            print("ready", flush=True)
            await trio.sleep_forever()

trio.run(main)
"""


class Api:
    """The double's API, for what nobody of the runner does."""

    def __init__(self) -> None:
        document = json.loads(cluster.double_kubeconfig().read_text())
        self._server = document["clusters"][0]["cluster"]["server"]

    def __call__(self, method: str, path: str, body: Any = None) -> Any:
        sent = None if body is None else json.dumps(body).encode()
        with urlopen(Request(self._server + path, data=sent, method=method), timeout=30) as answer:
            return json.load(answer)

    def pods(self) -> list[str]:
        return [one["metadata"]["name"] for one in self("GET", PATH)["items"]]


@pytest.fixture
def api() -> Iterator[Api]:
    dockerd.DOCKER.require()
    made = Api()
    yield made
    made("POST", "/double/denied", [])
    made("POST", "/double/classes", {})
    made("POST", "/double/version", ["1", "31"])
    assert made.pods() == []


@pytest.fixture
def provider(api: Api, tmp_path: Path) -> Provider:
    return make(PODS, tmp_path, 0.4)


async def test_a_lost_connection_costs_no_command_and_no_output(provider: Provider, api: Api) -> None:
    def cut() -> None:
        api("POST", "/double/cut", {})

    await count_through(provider, cut, before=cut)


async def lose_a_pod(provider: Provider, api: Api) -> None:
    """Delete the pod of a workspace under its command: whoever wants its work is told, and it opens again as it was."""
    handle = await provider.create(REQUEST)
    (handle.tree / "here").write_text("kept")
    async with provider.open(handle, SandboxSpec()) as workspace, workspace.exec(["sleep", "60"]) as process:
        await trio.to_thread.run_sync(api, "DELETE", f"{PATH}/{api.pods()[0]}")
        with pytest.raises(WorkspaceLost, match="somebody deleted pod"):
            await process.wait()
    with pytest.raises(WorkspaceLost, match="before what is in it was fetched"):
        await provider.retrieve(handle)
    async with provider.open(handle, SandboxSpec()) as workspace:
        assert (await workspace.run(["cat", "here"])).stdout == b"kept"
    await provider.destroy(handle)


@pytest.mark.nightly
async def test_a_deleted_pod_is_a_lost_workspace_until_somebody_has_been_told(provider: Provider, api: Api) -> None:
    await lose_a_pod(provider, api)


async def test_an_opening_that_is_cancelled_waits_for_its_pod_to_go_and_no_longer(provider: Provider, api: Api) -> None:
    """The pod's state was not looked at any more then, and its end awaited for a minute."""
    handle = await provider.create(REQUEST)

    async def open_it() -> None:
        async with provider.open(handle, SandboxSpec()):
            await trio.sleep_forever()

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_it)
            while not await trio.to_thread.run_sync(api.pods):
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()

    eventually(lambda: api.pods() == [])  # nothing of it runs; its object may go a moment later
    await provider.destroy(handle)


async def test_the_work_of_a_killed_runner_is_fetched_and_nothing_is_left(
    provider: Provider, api: Api, tmp_path: Path
) -> None:
    kill_a_runner(tmp_path)
    (handle,) = await provider.list_owned("nonce")
    assert len(api.pods()) == 1

    await provider.evict(handle)

    assert api.pods() == []
    found = {path.name: path.is_dir() for path in handle.tree.iterdir()}
    assert found == {"done": False, "closed": True, "on": False}
    assert (handle.tree / "closed" / "file").read_text() == "x\n"
    await provider.destroy(handle)


@pytest.mark.nightly
async def test_a_workspace_of_a_killed_runner_can_be_destroyed_without_its_work(
    provider: Provider, api: Api, tmp_path: Path
) -> None:
    kill_a_runner(tmp_path)
    (handle,) = await provider.list_owned("nonce")

    await provider.destroy(handle)

    assert api.pods() == []


def kill_a_runner(home: Path, **env: str) -> None:
    """Leave a workspace whose command goes on in its pod."""
    words = [sys.executable, "-c", RUNNER, str(home), str(cluster.double_kubeconfig())]
    words += [f"{name}={value}" for name, value in env.items()]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as runner:
        assert runner.stdout is not None
        assert runner.stdout.readline() == b"ready\n"
        runner.kill()


@pytest.mark.parametrize(
    ("env", "denied", "words"),
    [
        pytest.param({"RUNNER_KUBERNETES_NAMESPACE": ""}, [], "no namespace of a cluster is named", id="no namespace"),
        pytest.param({"KUBECONFIG": ""}, [], "no kubeconfig names a cluster", id="no kubeconfig"),
        pytest.param({"RUNNER_KUBERNETES_CONTEXT": "gone"}, [], "has no context `gone`", id="no such context"),
        pytest.param(
            {"RUNNER_KUBERNETES_NAMESPACE": "other"}, [], "takes no pod of the runner", id="no such namespace"
        ),
        pytest.param({}, [["get", "pods/exec"], ["watch", "pods"]], "get pods/exec, watch pods", id="no rights"),
        pytest.param({"RUNNER_KUBERNETES_RUNTIME_CLASS": "gone"}, [], "no RuntimeClass `gone`", id="no such class"),
        pytest.param({"RUNNER_KUBERNETES_RUNTIME_CLASS": "odd"}, [], "nobody knows how strong", id="unknown class"),
    ],
)
async def test_what_a_cluster_lacks_is_named(
    api: Api, tmp_path: Path, env: dict[str, str], denied: list[list[str]], words: str
) -> None:
    api("POST", "/double/denied", denied)
    api("POST", "/double/classes", {"odd": "odd"})
    probe = await _probe(tmp_path, env)

    assert not probe.available
    assert words in (probe.reason or "")
    assert probe.hint


@pytest.mark.parametrize(
    ("handler", "isolation"),
    [("runsc", IsolationClass.KERNEL), ("kata-qemu", IsolationClass.VM)],
)
async def test_a_runtime_class_tells_how_strong_its_boundary_is(
    api: Api, tmp_path: Path, handler: str, isolation: IsolationClass
) -> None:
    api("POST", "/double/classes", {"strong": handler})

    probe = await _probe(tmp_path, {"RUNNER_KUBERNETES_RUNTIME_CLASS": "strong"})

    assert (probe.available, probe.isolation) == (True, isolation)


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        pytest.param(["1", "18+"], "is Kubernetes 1.18, and 1.19 is the oldest", id="too old"),
        pytest.param(["", ""], None, id="built by somebody"),
    ],
)
async def test_a_cluster_that_is_too_old_is_refused_and_one_that_does_not_know_its_version_is_not(
    api: Api, tmp_path: Path, told: list[str], reason: str | None
) -> None:
    api("POST", "/double/version", told)

    probe = await _probe(tmp_path, {})

    assert probe.available == (reason is None)
    assert (reason or "") in (probe.reason or "")


async def _probe(home: Path, env: dict[str, str]) -> Probe:
    whole = {
        "RUNNER_HOME": str(home),
        "HOME": str(home),
        "KUBECONFIG": str(cluster.double_kubeconfig()),
        "RUNNER_KUBERNETES_NAMESPACE": NAMESPACE,
        **env,
    }
    return await KubernetesProvider(Settings.from_env(whole)).probe()


async def test_an_image_is_pinned_by_what_a_node_says_of_it(provider: KubernetesProvider, api: Api) -> None:
    assert await provider.image(dockerd.IMAGE) == dockerd.image_id()
    with pytest.raises(ImageMissing, match=r"registry\.invalid/none"):
        await provider.image("registry.invalid/none:1")


async def test_an_image_that_a_node_refuses_may_come_for_half_a_minute(autojump_clock: MockClock) -> None:
    sandbox = PodSandbox(cast("ClusterObjects", None), "p", "workspace `w-1`")
    start = trio.current_time()

    async def tell(second: float, reason: str) -> None:
        await trio.sleep_until(start + second)
        status = {"name": pod.FIRST, "state": {"waiting": {"reason": reason}}}
        sandbox.look({"metadata": {"uid": "1"}, "status": {"initContainerStatuses": [status]}})

    async def wait() -> None:
        with unwrapping_groups():
            async with trio.open_nursery() as nursery:
                for second, reason in {0: "ErrImagePull", 20: "PodInitializing", 40: "ErrImagePull"}.items():
                    nursery.start_soon(tell, second, reason)
                nursery.start_soon(tell, 50, "ImagePullBackOff")
                await sandbox.run_first(pod.FIRST, [], tuple)

    with pytest.raises(ImageMissing, match="ImagePullBackOff"):
        await wait()
    assert 70 <= trio.current_time() - start < 72


@pytest.mark.nightly
async def test_a_pod_that_exceeds_its_memory_loses_only_the_offender(provider: Provider, api: Api) -> None:
    handle = await provider.create(replace(REQUEST, limits=Limits(memory_bytes=64 << 20)))
    async with provider.open(handle, SandboxSpec()) as workspace:
        ended = (await workspace.run(["tail", "/dev/zero"])).exit
        assert (await workspace.run(["true"])).exit.ok
    await provider.destroy(handle)

    assert ended.oom


def test_a_whole_run_works_there_as_anywhere(project: Project, api: Api) -> None:
    """Clone, setup, agent, scan, snapshot, verify and save."""
    write_files(project.folder / "repo", {"a/kept": "kept", "gone": "gone"})
    commit(project.folder / "repo")
    script = """
        test "$(pwd)" = /workspace && test "$(id -u)" != 0 && cat made-by-setup ~/of-setup || exit 1
        rm gone; mkdir b; echo new > b/new; echo more >> a/kept; mkdir secret || echo closed
    """
    workspace = f"{REPO}\nbase_image: {dockerd.IMAGE}\nprotected_paths: [secret/]\n"
    workspace += 'setup_commands: ["echo setup > made-by-setup; echo home > ~/of-setup"]'
    verify = "verify: {files: {required: [b/new]}, commands: [{run: [sh, -c, 'test ! -e gone'], timeout: 60s}]}"
    project.script(script, provider="kubernetes", workspace=workspace, run=f"snapshot: {{message: work}}\n{verify}")
    project.env |= {"KUBECONFIG": str(cluster.double_kubeconfig()), "RUNNER_KUBERNETES_NAMESPACE": NAMESPACE}

    record = project.succeed()

    assert project.logs("agent").splitlines()[:2] == ["setup", "home"]
    assert "closed" in project.logs("agent")
    patch = (project.directory(record) / "work.patch").read_text()
    assert "b/new" in patch
    assert "secret" not in patch
    assert step(record, "verify")["status"] == "succeeded"
