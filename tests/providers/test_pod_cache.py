"""Toolchains that pods take from a claim: sent once, and told when it is not there or has something else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
import trio

from runner.core.errors import VolumeFailed
from runner.ports.provider import Provider, SandboxSpec
from runner.providers import _pod_cache
from runner.providers._pod_opening import send_all
from runner.sandbox.mirrored import Volume
from tests.providers.test_kubernetes import PATH, REQUEST, Api, api
from tests.support import cluster
from tests.support.folder_contents import folder, put
from tests.support.needs import ROOT
from tests.support.providers import in_pods

if TYPE_CHECKING:
    from runner.providers._pod_sandbox import PodSandbox

__all__ = ["api"]  # the fixture

pytestmark = ROOT.mark

CLAIMS = PATH.replace("/pods", "/persistentvolumeclaims")


@pytest.fixture
def claim(api: Api) -> Iterator[str]:
    api("POST", CLAIMS, {"metadata": {"name": "toolchains"}})
    yield "toolchains"
    api("DELETE", f"{CLAIMS}/toolchains")


@pytest.fixture
def toolchain(tmp_path: Path) -> Path:
    put(tmp_path / "toolchain" / "tool", "#!/bin/sh\necho it works\n", 0o755)
    return tmp_path / "toolchain"


def provider_of(home: Path, claim: str) -> Provider:
    return in_pods(folder(home), cluster.double_kubeconfig(), 0.4, RUNNER_KUBERNETES_CACHE_CLAIM=claim)


async def said(provider: Provider, toolchain: Path) -> str:
    """What the tool says in a workspace of its own."""
    handle = await provider.create(REQUEST)
    try:
        async with provider.open(handle, SandboxSpec(toolchains=(str(toolchain),))) as workspace:
            return (await workspace.run([f"{toolchain}/tool"])).stdout.decode()
    finally:
        await provider.destroy(handle)


async def test_a_toolchain_is_sent_once_and_is_the_same_in_each_pod(
    claim: str, toolchain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await said(provider_of(tmp_path / "one", claim), toolchain)
    monkeypatch.setattr(_pod_cache, "pack_trees", lambda sources: pytest.fail("it is sent again"))
    second = await said(provider_of(tmp_path / "another", claim), toolchain)

    assert first == second == "it works\n"


class FirstContainer:
    """A container that ends the guest's words with these exit codes, one after another."""

    what = "workspace `w-1`"

    def __init__(self, *codes: int) -> None:
        self.codes = [*codes]
        self.asked: list[str] = []

    async def run_first(self, container: str, words: Sequence[str], stdin: object) -> int:
        await trio.lowlevel.checkpoint()
        self.asked.append(words[0])
        return self.codes.pop(0)


async def test_what_somebody_has_changed_is_told_and_not_sent_over_it(toolchain: Path) -> None:
    container = FirstContainer(9)

    with pytest.raises(VolumeFailed, match="the cache had something else than toolchain") as told:
        await _pod_cache.take_or_send(cast("PodSandbox", container), Volume("t", toolchain, "/t"))

    assert container.asked == ["cached"]
    assert "RUNNER_KUBERNETES_CACHE_CLAIM" in str(told.value.hint)


async def test_what_a_claim_cannot_keep_is_noted(toolchain: Path, tmp_path: Path) -> None:
    container = FirstContainer(7, 8, 0)

    notes = await send_all(
        cast("PodSandbox", container), 1_000_000, tmp_path, [Volume("t", toolchain, "/t")], cache="toolchains"
    )

    assert container.asked == ["cached", "keep", "unpack"]
    assert notes == ("claim `toolchains` could not keep toolchain `/t`",)


@pytest.mark.nightly
async def test_a_claim_that_is_not_there_is_told(api: Api, toolchain: Path, tmp_path: Path) -> None:
    with pytest.raises(VolumeFailed, match='persistentvolumeclaim "gone" not found') as told:
        await said(provider_of(tmp_path / "one", "gone"), toolchain)

    assert "RUNNER_KUBERNETES_CACHE_CLAIM" in str(told.value.hint)
