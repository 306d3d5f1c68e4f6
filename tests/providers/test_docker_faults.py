"""What is made in containers when their daemon fails, lies or is late, and of images with odd contents."""

from __future__ import annotations

import io
import os
import random
import secrets
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from docker import APIClient

from runner.core.errors import CleanUpIncomplete, ProviderBusy, ProviderFailed
from runner.core.model import Handle
from runner.ports.provider import SandboxSpec, Workspace, WorkspaceRequest
from runner.providers.docker import DockerProvider
from runner.sandbox.docker_api import Engine
from runner.testing.outside import living_of
from runner.testing.place import shell
from tests.providers.test_docker import client
from tests.support import dockerd
from tests.support.dockerd import IMAGE
from tests.support.faulty_docker import Breaks, Dawdles, Fails, Fault, Faulty, Refuses, Says, faulty

__all__ = ["client"]
CREATE, START, LIST, REMOVE = "POST /containers/create", "POST /containers/.*/start", "GET /containers/json", "DELETE"
INSPECT = "GET /containers/[^/]+/json"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Faulty]:
    with faulty(Path(dockerd.host().removeprefix("unix://")), tmp_path / "docker.sock") as relay:
        yield relay


async def workspace_of(provider: DockerProvider, image: str = IMAGE) -> Handle:
    name = f"faults-{os.getpid()}-{secrets.token_hex(4)}"
    return await provider.create(WorkspaceRequest(id=name, run="run-1", nonce="nonce", image=image))


async def assert_gone(provider: DockerProvider, handle: Handle) -> None:
    """By what it can do now, nothing of it is left."""
    await provider.destroy(handle)
    assert dockerd.containers(handle.id) == []
    assert living_of(handle.uid) == []
    assert not handle.tree.exists()
    assert not [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if handle.id in line]


async def opens(provider: DockerProvider, handle: Handle) -> bool:
    async with provider.open(handle, SandboxSpec()) as workspace:
        return (await workspace.run(["true"])).exit.ok


@pytest.mark.parametrize(
    ("where", "fault", "error"),
    [
        pytest.param(CREATE, Refuses(), ProviderBusy, marks=pytest.mark.nightly, id="making fails"),
        pytest.param(CREATE, Fails(), ProviderBusy, marks=pytest.mark.nightly, id="made, and said to have failed"),
        pytest.param(CREATE, Breaks(), ProviderBusy, id="made, and nobody hears of it"),
        pytest.param(START, Fails(), ProviderBusy, marks=pytest.mark.nightly, id="started, and said to have failed"),
        pytest.param(START, Breaks(), ProviderBusy, marks=pytest.mark.nightly, id="started, and nobody hears of it"),
        pytest.param(INSPECT, Refuses(), ProviderBusy, marks=pytest.mark.nightly, id="it cannot be looked at"),
        pytest.param(CREATE, Says(rb'"Id":"\w+"', b'"Id":"%s"' % (b"0" * 64)), ProviderFailed, id="made, and unknown"),
        pytest.param(
            INSPECT,
            Says(rb'"Name":"/runner-', b'"Name":"/another'),
            ProviderFailed,
            marks=pytest.mark.nightly,
            id="another's name",
        ),
        pytest.param(
            INSPECT, Says(rb'"runner.nonce":"nonce"', b'"runner.nonce":"other"'), ProviderFailed, id="another's"
        ),
        pytest.param(LIST, Refuses(), ProviderBusy, marks=pytest.mark.nightly, id="what is left cannot be listed"),
    ],
)
async def test_a_failure_half_way_is_a_failure_and_leaves_nothing(
    daemon: Faulty, tmp_path: Path, where: str, fault: Fault, error: type[ProviderFailed]
) -> None:
    provider = DockerProvider(tmp_path, Engine(daemon.host), grace=0.2)
    handle = await workspace_of(provider)
    daemon.faults[where] = [fault]
    with pytest.raises(ProviderFailed) as caught:
        await opens(provider, handle)
    assert type(caught.value) is error

    daemon.faults.clear()
    assert await opens(provider, handle)
    await assert_gone(provider, handle)


async def test_the_container_of_another_is_not_taken_for_ours(
    client: APIClient, daemon: Faulty, tmp_path: Path
) -> None:
    """The same id given twice: the other's is neither started nor removed."""
    other = client.create_container(IMAGE, ["/bin/true"], labels={"runner.nonce": "another"})["Id"]
    provider = DockerProvider(tmp_path, Engine(daemon.host), grace=0.2)
    handle = await workspace_of(provider)
    try:
        daemon.faults[CREATE] = [Says(rb'"Id":"\w+"', b'"Id":"%s"' % other.encode())]
        with pytest.raises(ProviderFailed, match="a container of another name"):
            await opens(provider, handle)
        daemon.faults.clear()
        await assert_gone(provider, handle)
        assert client.inspect_container(other)["State"]["Status"] == "created"
    finally:
        client.remove_container(other)


async def test_what_is_made_when_nobody_waits_any_more_is_removed(daemon: Faulty) -> None:
    engine, workspace = Engine(daemon.host), f"late-{os.getpid()}-{secrets.token_hex(4)}"
    config = {"Image": IMAGE, "Cmd": ["true"], "Labels": {"runner.workspace": workspace}}
    daemon.faults[CREATE] = [Dawdles(0.5)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.make, f"runner-{workspace}", config)
        await reached(daemon, CREATE)
        nursery.cancel_scope.cancel()
    assert dockerd.containers(workspace) == []
    await reached(daemon, f"{REMOVE} /containers/")
    await trio.sleep(0.2)

    assert dockerd.containers(workspace) == []


async def reached(daemon: Faulty, start: str) -> None:
    with trio.fail_after(60):
        while not any(line.startswith(start) for line in daemon.seen):
            await trio.sleep(0.01)


@pytest.mark.parametrize("where", [pytest.param(LIST, marks=pytest.mark.nightly, id="list"), REMOVE])
async def test_what_cannot_be_removed_is_said_and_removed_by_a_later_try(
    daemon: Faulty, tmp_path: Path, where: str
) -> None:
    provider = DockerProvider(tmp_path, Engine(daemon.host), grace=0.2)
    handle = await workspace_of(provider)
    async with provider.open(handle, SandboxSpec()):
        daemon.faults[where] = [Refuses()]
    for _ in range(3):
        with pytest.raises(CleanUpIncomplete, match=handle.id):
            await provider.destroy(handle)
        assert living_of(handle.uid) == []
    daemon.faults.clear()
    await assert_gone(provider, handle)
    await provider.destroy(handle)


@pytest.mark.nightly
async def test_a_daemon_that_fails_every_other_call_leaves_nothing(daemon: Faulty, tmp_path: Path) -> None:
    provider = DockerProvider(tmp_path, Engine(daemon.host), grace=0.2)
    for seed in range(60):
        handle = await workspace_of(provider)
        luck = random.Random(seed)
        kinds = (Refuses(), Fails(), Breaks())
        daemon.faults["(?!GET /_ping)"] = [luck.choice((None, luck.choice(kinds))) for _ in range(200)]
        start = time.monotonic()
        for _ in range(6):
            try:
                assert await opens(provider, handle)
            except ProviderFailed:
                continue
        assert time.monotonic() - start < 30
        daemon.faults.clear()
        await assert_gone(provider, handle)


async def test_that_nothing_runs_any_more_is_known_before_the_daemon_has_removed_it(
    daemon: Faulty, tmp_path: Path
) -> None:
    provider = DockerProvider(tmp_path, Engine(daemon.host), grace=0.2)
    handle = await workspace_of(provider)
    seen: list[tuple[int, int]] = []

    async def look(workspace: Workspace) -> None:
        await workspace.terminated.wait()
        seen.append((len(living_of(handle.uid)), len(dockerd.containers(handle.id))))

    async with trio.open_nursery() as nursery, provider.open(handle, SandboxSpec()) as workspace:
        nursery.start_soon(look, workspace)
        assert (await workspace.run(["true"])).exit.ok
        assert not workspace.terminated.is_set()
        daemon.faults[REMOVE] = [Dawdles(0.5)]
    assert seen == [(0, 1)]
    await assert_gone(provider, handle)


# --- images -----------------------------------------------------------------------------------------


async def test_programs_that_run_as_root_in_an_image_do_not(client: APIClient, tmp_path: Path) -> None:
    name = f"runner-setuid-{os.getpid()}"
    script = "cp /bin/cat /as-root; chmod 4755 /as-root; echo secret > /secret; chmod 600 /secret"
    container = client.create_container(IMAGE, ["sh", "-c", script])["Id"]
    client.start(container)
    assert client.wait(container)["StatusCode"] == 0
    client.commit(container, repository=name, tag="1", changes=["ONBUILD RUN touch /built", "USER root"])
    client.remove_container(container)
    provider = DockerProvider(tmp_path, Engine(dockerd.host()))
    try:
        handle = await workspace_of(provider, f"{name}:1")
        async with provider.open(handle, SandboxSpec()) as workspace:
            seen = await shell(workspace, "/as-root /secret; cat /secret; ls /built; /as-root /proc/self/status")
        await assert_gone(provider, handle)
    finally:
        client.remove_image(f"{name}:1")

    assert seen.count("Permission denied") == 2
    assert "secret\n" not in seen.replace("/secret", "")
    assert f"Uid:\t{handle.uid}\t{handle.uid}\t{handle.uid}" in seen
    assert "No such file" in seen


@pytest.mark.nightly
async def test_a_dev_that_leads_elsewhere_reaches_nothing_of_the_host(client: APIClient, tmp_path: Path) -> None:
    """Whether the runtime refuses such an image or resolves the link inside of it."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o777)
    name = f"runner-dev-{os.getpid()}"
    client.import_image_from_data(_image_with_dev(str(elsewhere)), repository=name, tag="1")
    provider = DockerProvider(tmp_path / "home", Engine(dockerd.host()))
    try:
        handle = await workspace_of(provider, f"{name}:1")
        try:
            async with provider.open(handle, SandboxSpec()) as workspace:
                assert (await workspace.run(["/nothing"])).exit.code == 127
        except ProviderFailed:
            pass
        await assert_gone(provider, handle)
    finally:
        client.remove_image(f"{name}:1")

    assert list(elsewhere.iterdir()) == []


def _image_with_dev(target: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("etc", "proc", "run", "sys", "tmp"):
            directory = tarfile.TarInfo(name)
            directory.type, directory.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(directory)
        link = tarfile.TarInfo("dev")
        link.type, link.linkname = tarfile.SYMTYPE, target
        tar.addfile(link)
    return buffer.getvalue()


@pytest.mark.nightly
async def test_a_tag_that_moves_changes_no_workspace_that_is_there(client: APIClient, tmp_path: Path) -> None:
    name = f"runner-moving-{os.getpid()}"
    for number in (1, 2):
        container = client.create_container(IMAGE, ["sh", "-c", f"echo {number} > /which"])["Id"]
        client.start(container)
        client.wait(container)
        client.commit(container, repository=name, tag=str(number))
        client.remove_container(container)
    client.tag(f"{name}:1", name, "moving", force=True)
    provider = DockerProvider(tmp_path, Engine(dockerd.host()))
    try:
        handle = await workspace_of(provider, f"{name}:moving")
        which = []
        for _ in range(2):
            async with provider.open(handle, SandboxSpec()) as workspace:
                client.tag(f"{name}:2", name, "moving", force=True)
                which.append(await shell(workspace, "cat /which"))
        await assert_gone(provider, handle)
    finally:
        for tag in ("1", "2", "moving"):
            client.remove_image(f"{name}:{tag}")

    assert which == ["1\n", "1\n"]
