"""Volumes of a StorageClass as disks of workspaces: that they are limits, and what is told when there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.core.errors import ProviderFailed, VolumeFailed
from runner.core.model import Feature, Limits
from runner.core.settings import Settings
from runner.ports.provider import SandboxSpec, WorkspaceRequest
from runner.providers import _pod_volume
from runner.testing.outside import eventually
from runner.testing.place import MIB
from tests.providers.test_kubernetes import PATH, Api
from tests.support import cluster, dockerd
from tests.support.cluster.double import NAMESPACE
from tests.support.needs import ROOT
from tests.support.providers import PodsOnTestImage
from tests.support.situations import REPO, Project, commit, write_files

pytestmark = ROOT.mark

SIZE = 64 * MIB
REQUEST = WorkspaceRequest(id="w-1", run="run-1", nonce="nonce", limits=Limits(disk_bytes=SIZE))
CLAIMS = PATH.replace("/pods", "/persistentvolumeclaims")
FILL = "head -c 100000000 /dev/zero > large"


@pytest.fixture
def api() -> Iterator[Api]:
    dockerd.DOCKER.require()
    made = Api()
    made(
        "POST", "/double/storage", {"fast": "", "full": "exceeded quota: storage", "large": "large", "slow": "no room"}
    )
    yield made
    made("POST", "/double/storage", {})
    made("POST", "/double/denied", [])
    eventually(lambda: (made.pods(), claims(made)) == ([], []))


def claims(api: Api) -> list[dict[str, Any]]:
    return [*api("GET", CLAIMS)["items"]]


def environment(storage_class: str | None) -> dict[str, str]:
    named = {} if storage_class is None else {"RUNNER_KUBERNETES_STORAGE_CLASS": storage_class}
    return {"KUBECONFIG": str(cluster.double_kubeconfig()), "RUNNER_KUBERNETES_NAMESPACE": NAMESPACE, **named}


def provider_of(home: Path, storage_class: str | None) -> PodsOnTestImage:
    env = {"RUNNER_HOME": str(home), "HOME": str(home), **environment(storage_class)}
    return PodsOnTestImage(Settings.from_env(env), grace=0.4)


@pytest.mark.nightly
async def test_a_workspace_fills_its_volume_and_no_more_which_goes_with_its_pod(api: Api, tmp_path: Path) -> None:
    provider = provider_of(tmp_path, "fast")
    probe = await provider.probe()
    handle = await provider.create(REQUEST)
    async with provider.open(handle, SandboxSpec()) as workspace:
        [claim] = claims(api)
        seen = await workspace.effective()
        filled = await workspace.run(["sh", "-c", f"{FILL}; echo $?; rm large; echo kept > work"])
    [again] = await provider.list_owned("nonce")
    await provider.destroy(again)

    assert probe.available, probe.reason
    assert (probe.enforces(Feature.DISK), probe.watched) == (True, frozenset())
    assert claim["spec"]["resources"]["requests"]["storage"] == str(SIZE)
    assert claim["metadata"]["ownerReferences"][0]["kind"] == "Pod"
    assert (handle.limits, again, seen.limits.disk_bytes) == (REQUEST.limits, handle, SIZE)
    assert b"No space left" in filled.stderr
    assert not handle.tree.exists()


@pytest.mark.parametrize(
    ("storage_class", "words"),
    [
        pytest.param("gone", "StorageClass `gone` with 64M .* not found", id="no such class"),
        pytest.param("full", "exceeded quota", id="quota"),
        pytest.param("slow", "no room", id="not provisioned"),
        pytest.param(
            "large", "a volume of 3072M .* limits nothing", marks=pytest.mark.nightly, id="larger than the limit"
        ),
    ],
)
async def test_a_volume_that_is_not_there_or_limits_nothing_is_told_before_any_command_runs(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage_class: str, words: str
) -> None:
    monkeypatch.setattr(_pod_volume, "LOOK", 0.1)
    monkeypatch.setattr(_pod_volume, "FAILING", 0.5)
    provider = provider_of(tmp_path, storage_class)
    handle = await provider.create(REQUEST)
    with pytest.raises(VolumeFailed, match=words) as told:
        async with provider.open(handle, SandboxSpec()):
            pytest.fail("it is open")
    await provider.destroy(handle)

    assert (told.value.code, bool(told.value.hint)) == ("provider.volume", True)


@pytest.mark.nightly
async def test_files_that_do_not_fit_into_the_volume_are_told(api: Api, tmp_path: Path) -> None:
    provider = provider_of(tmp_path, "fast")
    handle = await provider.create(REQUEST)
    (handle.tree / "large").write_bytes(bytes(SIZE + 1))
    with pytest.raises(VolumeFailed, match="do not fit into its volume"):
        async with provider.open(handle, SandboxSpec()):
            pytest.fail("it is open")
    await provider.destroy(handle)


async def test_without_a_class_no_limit_is_promised(api: Api, tmp_path: Path) -> None:
    with pytest.raises(ProviderFailed, match="cannot limit the disk"):
        await provider_of(tmp_path, None).create(REQUEST)


async def test_what_a_cluster_lacks_for_volumes_is_named(api: Api, tmp_path: Path) -> None:
    gone = await provider_of(tmp_path, "gone").probe()
    api("POST", "/double/denied", [["list", "events"]])
    blind = await provider_of(tmp_path, "fast").probe()

    assert "no StorageClass `gone`" in (gone.reason or "")
    assert "list events" in (blind.reason or "")


async def test_warm_pods_of_another_class_are_none(api: Api, tmp_path: Path) -> None:
    places = [(await provider_of(tmp_path, name).probe()).place for name in ("fast", "slow", None)]

    assert len({*places}) == 3


@pytest.mark.nightly
def test_a_run_that_fills_its_volume_keeps_its_work(project: Project, api: Api) -> None:
    write_files(project.folder / "repo", {"kept": "kept"})
    commit(project.folder / "repo")
    workspace = f"{REPO}\nbase_image: {dockerd.IMAGE}\nresource_limits: {{disk: 64M}}\n"
    project.script(
        f"echo work > work; {FILL} || echo full; rm large", provider="kubernetes", workspace=workspace, run=""
    )
    project.env |= environment(None)
    watched = project.runner("plan", str(project.folder))
    project.env |= environment("fast")
    limited = project.runner("plan", str(project.folder))

    record = project.succeed()

    assert ("watched from outside" in watched.out, "watched from outside" in limited.out) == (True, False)
    assert "full" in project.logs("agent")
    assert "work" in (project.directory(record) / "work.patch").read_text()
