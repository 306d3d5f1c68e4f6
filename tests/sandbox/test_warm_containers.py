"""Containers that run before it is known for whom: shown later what is protected, taken over once, and never weaker."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from runner.core.model import Handle, Limits, Mount
from runner.ports.provider import SandboxHandoff, SandboxSpec, WorkspaceRequest
from runner.providers.docker import DockerProvider
from runner.sandbox.docker_api import Engine
from runner.testing.outside import alive
from runner.testing.place import MIB, shell
from tests.support import dockerd

LIMITS = Limits(cpus=1, memory_bytes=128 * MIB, pids=64)
PROTECTED = (".env", "deploy/key", "missing/file")


def wish(id: str, limits: Limits = LIMITS) -> WorkspaceRequest:
    return WorkspaceRequest(
        id=f"{id}-{os.getpid()}-{secrets.token_hex(3)}", run="run-1", nonce="nonce", limits=limits, image=dockerd.IMAGE
    )


async def detached_sandbox(
    home: Path, limits: Limits = LIMITS, *, lost: bool = False
) -> tuple[DockerProvider, Handle, SandboxHandoff]:
    """A workspace that was a slot of one provider, and another provider that has its container, unless it got lost."""
    keeper, claimer = DockerProvider(home, Engine(dockerd.host())), DockerProvider(home, Engine(dockerd.host()))
    slot = await keeper.create(wish("slot", limits))
    async with keeper.open_slot(slot, (), ()) as idle:
        await idle.ping()
        handoff = idle.detach()
    handle = await keeper.assign(slot, wish("warm"))
    if lost:
        handoff.close()
    else:
        claimer.receive(handle, handoff)
    return claimer, handle, handoff


def fill(handle: Handle) -> None:
    (handle.tree / ".env").write_text("secret\n")
    (handle.tree / "deploy").mkdir()
    (handle.tree / "deploy" / "key").write_text("secret\n")


def containers(handle: Handle) -> list[str]:
    with dockerd.session().client() as client:
        found = client.containers(all=True, filters={"label": f"runner.workspace={handle.private.name}"})
    return [container["Id"] for container in found]


def left(handle: Handle) -> list[str]:
    """What an outsider finds of a workspace: containers and mounts."""
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if handle.private.name in line]
    return [*containers(handle), *mounts, *map(str, Path("/run/runner-docker").glob(handle.private.name))]


@pytest.mark.scenario("LIF-03")
async def test_a_warm_container_is_what_a_cold_one_is_and_no_other_is_started(tmp_path: Path) -> None:
    """Protected paths are mounted into it late: read back, they are what they are in a container that begins so."""
    attack = """
    echo x > .env; rm -f .env; mv .env b; echo x > deploy/key; mv deploy c; rm -rf deploy; mkdir missing/x
    touch missing/file; umount .env; mv missing d; echo ok > deploy/other; echo ok > new; cat .env deploy/key
    """
    spec = SandboxSpec(protected=PROTECTED, env={"GREETING": "hello"})
    provider, handle, _ = await detached_sandbox(tmp_path)
    fill(handle)
    await provider.chown_to_workspace_user(handle)
    before = containers(handle)
    seen, said, trees = [], [], []
    for _ in range(2):
        async with provider.open(handle, spec) as workspace:
            said.append(sorted((await shell(workspace, f"echo $GREETING; {attack}")).splitlines()))
            seen.append(await workspace.effective())
            if len(seen) == 1:
                assert containers(handle) == before
        trees.append(sorted(str(path.relative_to(handle.tree)) for path in handle.tree.rglob("*")))
    await provider.destroy(handle)
    await provider.destroy(handle)

    assert seen[0] == seen[1]
    assert seen[0].read_only == ("/workspace/.env", "/workspace/deploy/key", "/workspace/missing")
    assert said[0] == said[1]
    assert {"hello", "secret"} <= set(said[0])
    assert trees == [[".env", "deploy", "deploy/key", "deploy/other", "new"]] * 2
    assert left(handle) == []


@pytest.mark.parametrize(
    ("name", "target"),
    [("incident", "/incident"), ("skills", "/skills"), ("kube", "/root/.kube")],
    ids=["incident", "skills", "kubeconfig"],
)
async def test_files_of_a_run_appear_in_a_container_that_runs(tmp_path: Path, name: str, target: str) -> None:
    provider, handle, _ = await detached_sandbox(tmp_path)
    before, source = containers(handle), handle.private / name
    (source / "report.txt").write_text("it burns\n")
    await provider.chown_to_workspace_user(handle)
    async with provider.open(handle, SandboxSpec(mounts=(Mount(source, target),))) as workspace:
        said = await shell(workspace, f"cat {target}/report.txt; echo x > {target}/report.txt")
        assert containers(handle) == before
    await provider.destroy(handle)

    assert said.startswith("it burns\n")
    assert "Read-only file system" in said


@pytest.mark.parametrize("how", ["of another shape", "dead"])
async def test_a_container_that_can_not_be_taken_is_ended_and_another_started(tmp_path: Path, how: str) -> None:
    provider, handle, handoff = await detached_sandbox(tmp_path)
    before = containers(handle)
    if how == "dead":
        os.kill(int(handoff.state["pid"]), 9)
    spec = replace(SandboxSpec(), fresh_home=how == "of another shape")
    async with provider.open(handle, spec) as workspace:
        assert (await workspace.run(["true"])).exit.ok
        assert len(containers(handle)) == 1
        assert containers(handle) != before
    await provider.destroy(handle)

    assert left(handle) == []


async def test_a_workspace_whose_warm_container_is_gone_needs_no_daemon_to_go(tmp_path: Path) -> None:
    provider, handle, _ = await detached_sandbox(tmp_path)
    async with provider.open(handle, SandboxSpec()) as workspace:
        assert (await workspace.run(["true"])).exit.ok
    await DockerProvider(tmp_path, Engine(f"unix://{tmp_path}/nobody.sock")).destroy(handle)

    assert left(handle) == []
    assert not handle.private.exists()


async def test_a_container_that_nobody_has_ends_by_itself_and_is_removed(tmp_path: Path) -> None:
    provider, handle, handoff = await detached_sandbox(tmp_path, lost=True)
    with trio.fail_after(60):
        while alive(int(handoff.state["pid"])):
            await trio.sleep(0.01)
    await provider.destroy(handle)

    assert left(handle) == []
    assert await provider.list_owned("nonce") == []


@pytest.mark.nightly
async def test_a_slot_has_the_disk_that_its_workspace_may_fill(tmp_path: Path) -> None:
    provider, handle, _ = await detached_sandbox(tmp_path, replace(LIMITS, disk_bytes=32 * MIB))
    async with provider.open(handle, SandboxSpec()) as workspace:
        said = await shell(workspace, "head -c 64M /dev/zero > big; rm big; echo ok > small; cat small")
        seen = await workspace.effective()
    await provider.destroy(handle)

    assert "No space left on device" in said
    assert said.endswith("ok\n")
    assert seen.limits.disk_bytes == 32 * MIB
    assert left(handle) == []
