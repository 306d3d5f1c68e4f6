"""What only the docker provider has: a daemon that may hang, restart or be gone, images with wishes, and neighbours."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from docker import APIClient

from runner.core.errors import CleanUpIncomplete, ImageMissing, ProviderFailed, WorkspaceLost
from runner.core.model import Exit, Handle, Limits
from runner.ports.provider import SandboxSpec, WorkspaceRequest
from runner.providers.docker import DockerProvider
from runner.sandbox.docker_api import Engine
from runner.testing.outside import living_of
from runner.testing.place import MIB, shell
from tests.support import dockerd
from tests.support.dockerd import IMAGE, Daemon
from tests.support.needs import ROOT

UNREACHABLE = "unix:///nowhere/docker.sock"


@pytest.fixture
def client() -> Iterator[APIClient]:
    with dockerd.session().client() as client:
        yield client


@pytest.fixture(scope="module")
def mortal() -> Iterator[Daemon]:
    with dockerd.mortal("mortal") as daemon:
        yield daemon


async def workspace_of(provider: DockerProvider, *, image: str = IMAGE, limits: Limits | None = None) -> Handle:
    name = f"docker-{secrets.token_hex(6)}"
    return await provider.create(
        WorkspaceRequest(id=name, run="run-1", nonce="nonce", limits=limits or Limits(), image=image)
    )


def containers(client: APIClient, handle: Handle) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.containers(all=True, filters={"label": f"runner.workspace={handle.id}"})
    return found


async def test_a_container_has_no_way_out_that_docker_could_give_it(client: APIClient, tmp_path: Path) -> None:
    provider = DockerProvider(tmp_path, Engine(dockerd.host()))
    handle = await workspace_of(provider)
    async with provider.open(handle, SandboxSpec()) as workspace:
        (found,) = containers(client, handle)
        made = client.inspect_container(found["Id"])
        seen = await shell(workspace, "echo x > /etc/x; echo x > /x; df -k /tmp /dev/shm 2>/dev/null; ls /proc/self/fd")
    await provider.destroy(handle)

    config, host = made["Config"], made["HostConfig"]
    assert (host["CapDrop"], host["CapAdd"], host["Privileged"]) == (["ALL"], None, False)
    assert (host["NetworkMode"], host["IpcMode"], host["PidMode"], host["UTSMode"]) == ("none", "private", "", "")
    assert (host["SecurityOpt"], host["ReadonlyRootfs"]) == (["no-new-privileges"], True)
    assert (host["Devices"], host["LogConfig"]["Type"], host["RestartPolicy"]["Name"]) == (None, "none", "no")
    assert config["User"] == f"{handle.uid}:{handle.uid}"
    assert config["Labels"]["runner.nonce"] == "nonce"
    assert not [mount for mount in made["Mounts"] if "docker.sock" in mount["Source"]]
    assert all(mount["Source"].startswith(f"/run/runner-docker/{handle.id}/") for mount in made["Mounts"])
    assert seen.count("Read-only file system") == 2


async def test_what_an_image_asks_for_is_not_heeded(client: APIClient, tmp_path: Path) -> None:
    """Entrypoint, user, environment, health check and volumes: of these only its files are wanted."""
    wishes = [
        'ENTRYPOINT ["/bin/false"]',
        "USER root",
        "WORKDIR /nowhere",
        "VOLUME /data",
        "VOLUME /home",
        "ENV PATH=/evil LD_PRELOAD=/evil.so FROM_IMAGE=1",
        'HEALTHCHECK CMD ["/bin/false"]',
        "LABEL runner.nonce=another runner.workspace=another",
    ]
    name = f"runner-wishes-{os.getpid()}"
    _derive(client, name, wishes)
    before = dockerd.volumes(client)
    provider = DockerProvider(tmp_path, Engine(dockerd.host()))
    try:
        handle = await workspace_of(provider, image=f"{name}:1")
        async with provider.open(handle, SandboxSpec()) as workspace:
            env = await workspace.run(["env"])
            seen = await shell(workspace, "id -u; pwd; echo x > /data/x; echo x > /home/x; echo ok > $HOME/mine")
        await provider.destroy(handle)
    finally:
        client.remove_image(f"{name}:1")

    assert b"FROM_IMAGE" not in env.stdout
    assert b"PATH=/usr/local/bin:/usr/bin:/bin" in env.stdout
    assert seen.splitlines()[:2] == [str(handle.uid), "/workspace"]
    assert seen.count("Permission denied") == 2
    assert dockerd.volumes(client) == before


def _derive(client: APIClient, name: str, changes: list[str]) -> None:
    """The image of the tests, with further instructions."""
    container = client.create_container(IMAGE, ["/bin/true"])["Id"]
    client.commit(container, repository=name, tag="1", changes=changes)
    client.remove_container(container)


async def test_a_volume_within_the_workspace_is_refused(client: APIClient, tmp_path: Path) -> None:
    name = f"runner-inside-{os.getpid()}"
    _derive(client, name, ["VOLUME /workspace/cache"])
    try:
        with pytest.raises(ProviderFailed, match="/workspace/cache"):
            await workspace_of(DockerProvider(tmp_path, Engine(dockerd.host())), image=f"{name}:1")
    finally:
        client.remove_image(f"{name}:1")


async def test_an_image_that_is_not_there_is_said_so_and_nothing_is_left(tmp_path: Path) -> None:
    provider = DockerProvider(tmp_path, Engine(dockerd.host()))
    with pytest.raises(ImageMissing, match=r"\Adocker has no image `no-such-image:1`\Z"):
        await workspace_of(provider, image="no-such-image:1")

    assert await provider.list_owned("nonce") == []


async def test_what_dials_the_channel_from_inside_is_turned_away(tmp_path: Path) -> None:
    """Of one user with the guest, and before it: only the container's first process is listened to."""
    dial = """
import socket
with socket.socket(socket.AF_UNIX) as end:
    end.connect("/run/channel/socket")
    end.sendall(b"\\x14" + bytes(11) + bytes(20))
    end.settimeout(0.5)
    try: print(end.recv(1))
    except TimeoutError: print("unheard")
"""
    provider = DockerProvider(tmp_path, Engine(dockerd.host()))
    handle = await workspace_of(provider)
    async with provider.open(handle, SandboxSpec()) as workspace:
        heard = await workspace.run(["python3", "-SIc", dial])
        assert (await workspace.run(["true"])).exit.ok
    await provider.destroy(handle)

    assert heard.stdout in (b"unheard\n", b"b''\n")


async def test_temporary_files_are_in_memory_and_within_its_limit(tmp_path: Path) -> None:
    provider = DockerProvider(tmp_path, Engine(dockerd.host()))
    handle = await workspace_of(provider, limits=Limits(memory_bytes=64 * MIB))
    async with provider.open(handle, SandboxSpec()) as workspace:
        seen = await shell(workspace, "head -c 200M /dev/zero > /tmp/large; head -c 200M /dev/zero > /dev/shm/large")
        assert (await workspace.run(["sh", "-c", "true | true"])).exit.ok
    await provider.destroy(handle)

    assert seen.count("No space left on device") == 2


async def test_only_our_own_containers_are_removed(client: APIClient, tmp_path: Path) -> None:
    """Neither another store's, whatever the workspace's name, nor one that nobody labelled."""
    provider = DockerProvider(tmp_path, Engine(dockerd.host()))
    handle = await workspace_of(provider)
    labels = {"runner.product": "runner", "runner.workspace": handle.id, "runner.nonce": "of another store"}
    others = [client.create_container(IMAGE, ["/bin/true"], labels=given)["Id"] for given in (labels, {})]
    try:
        async with provider.open(handle, SandboxSpec()):
            pass
        await provider.evict(handle)
        await provider.destroy(handle)
        assert {found["Id"] for found in client.containers(all=True)} >= set(others)
    finally:
        for other in others:
            client.remove_container(other)


async def test_a_container_that_is_removed_behind_our_back_is_a_lost_workspace(
    client: APIClient, tmp_path: Path
) -> None:
    provider = DockerProvider(tmp_path, Engine(dockerd.host()))
    handle = await workspace_of(provider)
    async with provider.open(handle, SandboxSpec()) as workspace, workspace.exec(["sleep", "1000"]) as process:
        (found,) = containers(client, handle)
        await trio.to_thread.run_sync(lambda: client.remove_container(found["Id"], force=True))
        with trio.fail_after(60), pytest.raises(WorkspaceLost):
            await process.wait()
    async with provider.open(handle, SandboxSpec()) as workspace:
        assert (await workspace.run(["true"])).exit.ok
    await provider.destroy(handle)


@ROOT.mark
@pytest.mark.parametrize("host", [UNREACHABLE, "tcp://127.0.0.1:2375", "ssh://host"])
async def test_a_daemon_that_is_not_on_this_host_is_unavailable_with_a_reason(tmp_path: Path, host: str) -> None:
    probe = await DockerProvider(tmp_path, Engine(host)).probe()

    assert not probe.available
    assert probe.reason
    assert host in probe.reason
    assert probe.hint


async def test_a_workspace_that_was_never_opened_needs_no_daemon_to_go(tmp_path: Path) -> None:
    handle = await workspace_of(DockerProvider(tmp_path, Engine(dockerd.host())))
    gone = DockerProvider(tmp_path, Engine(UNREACHABLE))
    await gone.destroy(handle)

    assert not handle.tree.exists()


# --- a daemon that fails ----------------------------------------------------------------------------


@pytest.mark.nightly
async def test_a_daemon_that_hangs_holds_up_no_command_and_no_end(mortal: Daemon, tmp_path: Path) -> None:
    provider = DockerProvider(tmp_path, Engine(mortal.host), grace=0.2)
    handle = await workspace_of(provider)
    hanging = DockerProvider(tmp_path, Engine(mortal.host, 1), grace=0.2)
    try:
        async with hanging.open(handle, SandboxSpec()) as workspace:
            mortal.signal(signal.SIGSTOP)
            assert (await workspace.run(["sh", "-c", "exit 7"])).exit == Exit(code=7)
            start = time.monotonic()
        assert time.monotonic() - start < 30
        assert living_of(handle.uid) == []
        assert not (await hanging.probe()).available
        with pytest.raises(ProviderFailed, match="has not answered"):
            async with hanging.open(handle, SandboxSpec()):
                pytest.fail("opened")
        with pytest.raises(CleanUpIncomplete, match=handle.id):
            await hanging.destroy(handle)
        assert await hanging.list_owned("nonce") == [handle]
    finally:
        mortal.signal(signal.SIGCONT)
    await provider.destroy(handle)

    with mortal.client() as client, trio.fail_after(60):  # what it was asked to make meanwhile is removed once it is
        while containers(client, handle):
            await trio.sleep(0.05)


@pytest.mark.parametrize(
    "comes_back", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["gone", "restarted"]
)
async def test_commands_outlive_a_daemon_that_is_killed(mortal: Daemon, tmp_path: Path, comes_back: bool) -> None:
    """A daemon that starts ends what an earlier one had started: then the workspace is lost, and said so."""
    provider = DockerProvider(tmp_path, Engine(mortal.host), grace=0.2)
    handle = await workspace_of(provider)
    async with provider.open(handle, SandboxSpec()) as workspace:
        mortal.kill()
        assert (await workspace.run(["sh", "-c", "exit 7"])).exit == Exit(code=7)
        if comes_back:
            async with workspace.exec(["sleep", "1000"]) as process:
                await trio.to_thread.run_sync(mortal.start)
                with trio.fail_after(60), pytest.raises(WorkspaceLost):
                    await process.wait()
    assert living_of(handle.uid) == []
    if not comes_back:
        with pytest.raises(CleanUpIncomplete, match="cannot be reached"):
            await provider.destroy(handle)
        await trio.to_thread.run_sync(mortal.start)
    await provider.destroy(handle)

    with mortal.client() as client:
        assert containers(client, handle) == []
