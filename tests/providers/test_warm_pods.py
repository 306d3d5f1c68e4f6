"""Pods that run before it is known for whom: what they protect, who gets them, and that nothing of them is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from runner.core.model import Handle, Limits, Mount, PoolMissReason, SlotKey
from runner.core.settings import Settings
from runner.lifecycle.pool import name_of
from runner.ops.planning.make_plan import make_plan
from runner.ops.pool.handoff import warm
from runner.ops.pool.pool import open_pool, pools_of
from runner.ops.workspaces.workspace_lease import open_workspace_env
from runner.ports.provider import SandboxHandoff, SandboxSpec, WorkspaceRequest
from runner.ports.store import PoolRow
from runner.providers._warm_pod import HandedOffPod, pinned_by, stand_ins
from runner.providers.kubernetes import KubernetesProvider
from runner.safefs.safe_open import open_directory
from runner.sandbox.protected_paths import open_guards
from runner.testing.place import MIB, shell
from tests.providers.test_kubernetes import Api
from tests.support import cluster, dockerd
from tests.support.cluster.double import NAMESPACE
from tests.support.needs import ROOT
from tests.support.providers import PODS, make
from tests.support.runs import apply
from tests.support.situations import REPO, Project

pytestmark = ROOT.mark

LIMITS = Limits(cpus=1, memory_bytes=128 * MIB, pids=64)
PROTECTED = (".env", "deploy/key", "missing/", "never")
ATTACK = """
echo x > .env; rm -f .env; mv .env b; echo x > deploy/key; mv deploy c; rm -rf deploy; mkdir missing/x; mv missing d
rm -f never; echo x > never; echo ok > deploy/other; echo ok > new; cat .env deploy/key
"""


@pytest.fixture
def api() -> Iterator[Api]:
    dockerd.DOCKER.require()
    made = Api()
    yield made
    assert made.pods() == []


def wish(id: str) -> WorkspaceRequest:
    return WorkspaceRequest(id=id, run="run-1", nonce="nonce", limits=LIMITS)


async def detached_pod(home: Path) -> tuple[KubernetesProvider, Handle, SandboxHandoff]:
    """A workspace that was a slot of one provider, and another provider that has its pod."""
    keeper, claimer = make(PODS, home, 0.4), make(PODS, home, 0.4)
    assert isinstance(keeper, KubernetesProvider)
    assert isinstance(claimer, KubernetesProvider)
    slot = await keeper.create(wish("slot-1"))
    async with keeper.open_slot(slot, (), PROTECTED) as idle:
        await idle.ping()
        handoff = idle.detach()
    handle = await keeper.assign(slot, wish("warm"))
    claimer.receive(handle, handoff)
    return claimer, handle, handoff


def fill(handle: Handle) -> None:
    (handle.tree / ".env").write_text("secret\n")
    (handle.tree / "deploy").mkdir()
    (handle.tree / "deploy" / "key").write_text("secret\n")
    (handle.private / "incident" / "report").write_text("it burns\n")


async def test_a_warm_pod_is_what_a_cold_one_is_and_no_other_is_started(api: Api, tmp_path: Path) -> None:
    provider, handle, handoff = await detached_pod(tmp_path)
    fill(handle)
    incident = (Mount(handle.private / "incident", "/incident"),)
    spec = SandboxSpec(protected=PROTECTED, env={"GREETING": "hello"}, mounts=incident)
    seen, said, trees, pods = [], [], [], []
    for _ in range(2):
        async with provider.open(handle, spec) as workspace:
            pods.append(api.pods())
            said.append(sorted((await shell(workspace, f"echo $GREETING; cat /incident/*; {ATTACK}")).splitlines()))
            seen.append(await workspace.effective())
        trees.append(sorted(str(path.relative_to(handle.tree)) for path in handle.tree.rglob("*")))
    await provider.destroy(handle)

    assert pods[0] == [handoff.state["name"]] != pods[1]
    assert seen[0] == seen[1]
    assert seen[0].read_only == ("/workspace/.env", "/workspace/deploy/key", "/workspace/missing", "/workspace/never")
    assert said[0] == said[1]
    assert {"hello", "it burns", "secret"} <= set(said[0])
    assert trees == [[".env", "deploy", "deploy/key", "deploy/other", "new"]] * 2


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (["deploy/key", ".env"], None),
        (["deploy/"], None),
        ([], "`deploy` is not in the tree as it is protected there"),
        (["deploy/", ".env/"], "`.env` is not in the tree as it is protected there"),
    ],
    ids=["there", "missing", "nothing above a path", "a directory for a file"],
)
def test_a_warm_pod_fits_a_tree_that_can_be_protected_in_it(tmp_path: Path, made: list[str], words: str | None) -> None:
    for name in made:
        path = tmp_path / "tree" / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text("x")
    for name in ("tree", "scratch"):
        (tmp_path / name).mkdir(exist_ok=True)
    handle = Handle(id="w-1", provider="kubernetes", tree=tmp_path / "tree", private=tmp_path, uid=0)
    with stand_ins(tmp_path / "scratch", PROTECTED) as guards:
        pod = HandedOffPod("pod", b"", places={}, pinned=pinned_by(guards), toolchains=())
    with open_directory(handle.tree) as tree, open_guards(tree, PROTECTED) as guards:
        found = pod.why_unfit(handle, SandboxSpec(protected=PROTECTED), guards)
        other = pod.why_unfit(handle, SandboxSpec(protected=PROTECTED, fresh_home=True), guards)

    assert (found, other) == (words, "it has other mounts")


@pytest.mark.nightly
async def test_a_run_has_its_pod_from_the_pool_or_says_why_not(project: Project, repository: Path, api: Api) -> None:
    """Setup and agent in the warm pod, verify in one of its own."""
    project.env |= {"KUBECONFIG": str(cluster.double_kubeconfig()), "RUNNER_KUBERNETES_NAMESPACE": NAMESPACE}
    pool = f"{REPO}\nbase_image: {dockerd.IMAGE}\nprotected_paths: [README, missing/]\nwarm_pool: {{size: 1}}"
    script = "cat README; echo x > README || echo denied; touch made"
    project.script(script, provider="kubernetes", workspace=pool, run="snapshot: {message: work}")
    settings = project.settings(**project.env)
    planned = await make_plan(project.folder, settings)
    async with open_workspace_env(settings) as env, open_pool(env, pools_of(planned, None), print):
        with trio.fail_after(120):
            while [slot.state.value for slot in await env.store.slots()] != ["ready"]:
                await trio.sleep(0.1)
        (warm_one,) = await apply(planned, settings, [])
        read = project.logs("agent").split()
        project.script("true", provider="kubernetes", workspace=pool.replace("README, ", ""))
        (cold,) = await apply(await make_plan(project.folder, settings), settings, [])

    assert (warm_one.exit_code, cold.exit_code, read) == (0, 0, ["hello", "denied"])
    assert (str(warm_one.slot).partition("-")[0], warm_one.pool_miss) == ("slot", None)
    assert (cold.slot, cold.pool_miss) == (None, PoolMissReason.SHAPE)
    assert warm_one.observed is not None
    assert not [note for note in warm_one.observed.notes if "kept warm" in note]
    assert warm_one.observed.read_only == ("/workspace/README", "/workspace/missing")


@pytest.mark.nightly
async def test_of_runs_that_ask_at_once_as_many_get_a_warm_pod_as_there_are(api: Api, tmp_path: Path) -> None:
    await claim_at_once(tmp_path, cluster.double_kubeconfig(), pods=2, claims=5)


async def claim_at_once(home: Path, kubeconfig: Path, *, pods: int, claims: int) -> None:
    """Let workspaces be asked for at once: as many come from the pool as are in it, each from another pod."""
    env = {"RUNNER_HOME": str(home), "KUBECONFIG": str(kubeconfig), "RUNNER_KUBERNETES_NAMESPACE": "agents"}
    settings, limits, protected = Settings.from_env(env), Limits(cpus=0.25, memory_bytes=64 * MIB, pids=64), ("P",)
    place = (await KubernetesProvider(settings).probe()).place
    key = SlotKey(provider="kubernetes", image=dockerd.IMAGE, limits=limits, protected=protected, place=place)
    slots: list[str | None] = []

    async def claim(id: str, nonce: str) -> None:
        provider = KubernetesProvider(settings)
        request = WorkspaceRequest(id=id, run=id, nonce=nonce, limits=limits, image=dockerd.IMAGE)
        found = await warm(home, provider, key, request)
        handle = found if isinstance(found, Handle) else await provider.create(request)
        slots.append(handle.slot)
        (handle.tree / "P").write_text(id)
        async with provider.open(handle, SandboxSpec(protected=protected)) as workspace:
            said = await shell(workspace, "cat P; echo other > P")
            assert said.startswith(id)
            assert "Read-only file system" in said
        await provider.destroy(handle)

    pool = [PoolRow(name_of(key), key, pods)]
    async with open_workspace_env(settings) as found, open_pool(found, pool, print):
        with trio.fail_after(240):
            while [slot.state.value for slot in await found.store.slots()] != ["ready"] * pods:
                await trio.sleep(0.1)
        async with trio.open_nursery() as nursery:
            for number in range(claims):
                nursery.start_soon(claim, f"w-{number}", found.store.nonce)

    had = [slot for slot in slots if slot is not None]
    assert (len(slots), len(had), len({*had})) == (claims, pods, pods)
    assert [*(home / "sandboxes").glob("*.json"), *(home / "state" / "sandboxes").glob("*.json")] == []


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["another tree", "deleted"])
async def test_a_pod_that_can_not_be_taken_is_ended_and_another_started(api: Api, tmp_path: Path, how: str) -> None:
    provider, handle, _ = await detached_pod(tmp_path)
    before = api.pods()
    fill(handle)
    if how == "another tree":
        (handle.tree / "never").mkdir()
    else:
        await trio.to_thread.run_sync(api, "DELETE", f"/api/v1/namespaces/agents/pods/{before[0]}")
    async with provider.open(handle, SandboxSpec(protected=PROTECTED)) as workspace:
        now = api.pods()
        seen = await workspace.effective()
    await provider.destroy(handle)

    assert len(now) == 1
    assert now != before
    assert [note for note in seen.notes if note.startswith("not the pod that was kept warm: ")]
