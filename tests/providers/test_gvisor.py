"""What only the gVisor provider has: a guest that is root and attached, and a sandbox that the host kills whole."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from runner.core.errors import CleanUpIncomplete, OutOfMemory, ProviderFailed, WorkspaceLost
from runner.core.model import Exit, Handle, IsolationClass, Limits
from runner.ports.provider import SandboxSpec, WorkspaceRequest
from runner.providers.docker import DockerProvider, check_runtime
from runner.providers.gvisor import RUNSC
from runner.sandbox.docker_api import Engine
from runner.testing.outside import cmdline, pids
from runner.testing.place import MIB, took_at_most
from tests.support import dockerd
from tests.support.dockerd import IMAGE, Daemon
from tests.support.folder_contents import folder, put
from tests.support.providers import inhabitants

pytestmark = [pytest.mark.slow, dockerd.GVISOR.mark]


@pytest.fixture
def mortal() -> Iterator[Daemon]:
    with dockerd.mortal("gvisor") as daemon:
        yield daemon


def at(home: Path, host: str | None = None, *, timeout: float = 10) -> DockerProvider:
    return DockerProvider(home, Engine(host or dockerd.host(), timeout), grace=0.2, runtime=RUNSC)


async def workspace_of(provider: DockerProvider, limits: Limits | None = None) -> Handle:
    name = f"gvisor-{secrets.token_hex(6)}"
    return await provider.create(
        WorkspaceRequest(id=name, run="run-1", nonce="nonce", limits=limits or Limits(), image=IMAGE)
    )


def noted(handle: Handle) -> list[str]:
    return (handle.private / "system" / "containers").read_text().split()


def helpers(container: str) -> list[int]:
    """Processes of this host that were started for a container, and name it."""
    return [pid for pid in pids() if container.encode() in cmdline(str(pid))]


STATUS = """
import ctypes, os
fields = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
print(*(fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd")))
print(os.stat("/proc/1").st_uid, os.getuid(), ctypes.CDLL(None).prctl(39, 0, 0, 0, 0), os.uname().release)
"""


async def test_the_guest_has_just_what_it_needs_and_commands_have_nothing(tmp_path: Path) -> None:
    provider = at(tmp_path)
    handle = await workspace_of(provider)
    async with provider.open(handle, SandboxSpec()) as workspace:
        with dockerd.session().client() as client:
            made = client.inspect_container(noted(handle)[0])
        seen = await workspace.run(["python3", "-SIc", STATUS])
    await provider.destroy(handle)

    config, host = made["Config"], made["HostConfig"]
    assert (host["Runtime"], host["CapDrop"], host["Privileged"]) == ("runsc", ["ALL"], False)
    assert sorted(host["CapAdd"]) == ["KILL", "SETGID", "SETPCAP", "SETUID"]
    assert (config["User"], config["StdinOnce"]) == ("0:0", True)
    assert (host["SecurityOpt"], host["ReadonlyRootfs"]) == (["no-new-privileges"], True)
    assert (host["NetworkMode"], host["LogConfig"]["Type"]) == ("none", "none")
    capabilities, users = seen.stdout.decode().splitlines()
    assert set(capabilities.split()) == {"0" * 16}
    assert users.split()[:3] == ["0", str(handle.uid), "1"]
    assert users.split()[3] != os.uname().release


async def test_a_daemon_without_the_runtime_is_unavailable_and_the_hint_is_its_configuration(tmp_path: Path) -> None:
    runtime = replace(RUNSC, program="runsc-that-is-not-there")
    without = DockerProvider(tmp_path, Engine(dockerd.host()), runtime=runtime)
    probe = await without.probe()

    assert (probe.available, probe.isolation) == (False, IsolationClass.KERNEL)
    assert "has no runtime" in (probe.reason or "")
    assert '{"runtimes": {"runsc":' in (probe.hint or "")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        pytest.param(None, "No such file", id="away"),
        pytest.param("not a program", "Exec format error", id="no program"),
        pytest.param("#!/bin/sh\necho no platform >&2; exit 1", "no platform", id="that fails"),
    ],
)
async def test_a_runtime_whose_program_does_not_start_is_unavailable(
    tmp_path: Path, program: str | None, words: str
) -> None:
    """The daemon lists it all the same, so that a run would only fail once everything else was made."""
    runsc = tmp_path / "runsc"
    if program is not None:
        put(runsc, program, 0o755)

    with pytest.raises(ProviderFailed, match=f"`{runsc}`, does not start: .*{words}"):
        await check_runtime({"Runtimes": {"runsc": {"path": str(runsc)}}}, "runsc")


async def test_too_much_memory_ends_the_sandbox_which_says_why_and_opens_again(tmp_path: Path) -> None:
    provider = at(tmp_path)
    handle = await workspace_of(provider, Limits(memory_bytes=64 * MIB))
    async with provider.open(handle, SandboxSpec()) as workspace:
        assert (await workspace.effective()).limits.memory_bytes == 64 * MIB
        reserved = await workspace.run(["python3", "-SIc", "import mmap; mmap.mmap(-1, 8 << 30)"])
        assert reserved.exit.ok
        async with took_at_most(60):
            with pytest.raises(OutOfMemory, match="ran out of memory, and its sandbox was killed whole"):
                await workspace.run(["tail", "/dev/zero"])
        with pytest.raises(OutOfMemory):
            await workspace.run(["true"])
    async with provider.open(handle, SandboxSpec()) as workspace:
        assert (await workspace.run(["true"])).exit.ok
    await provider.destroy(handle)

    assert inhabitants(handle) == []


async def test_a_directory_of_root_cannot_be_lent(tmp_path: Path) -> None:
    tree = folder(tmp_path / "tree")
    with pytest.raises(ProviderFailed, match="gvisor cannot map owners"):
        await at(tmp_path / "home").create(
            WorkspaceRequest(id="lent", run="run-1", nonce="nonce", tree=tree, image=IMAGE)
        )


@pytest.mark.nightly
async def test_a_daemon_that_hangs_holds_up_commands_and_no_end(mortal: Daemon, tmp_path: Path) -> None:
    patient, hanging = at(tmp_path, mortal.host), at(tmp_path, mortal.host, timeout=1)
    handle = await workspace_of(patient)
    try:
        async with hanging.open(handle, SandboxSpec()) as workspace:
            mortal.signal(signal.SIGSTOP)
            with trio.move_on_after(0.5) as scope:
                await workspace.run(["true"])
            assert scope.cancelled_caught
            start = time.monotonic()
        assert time.monotonic() - start < 60
        assert inhabitants(handle) == []
        with pytest.raises(CleanUpIncomplete, match=handle.id):
            await hanging.destroy(handle)
    finally:
        mortal.signal(signal.SIGCONT)
    await patient.destroy(handle)


@pytest.mark.nightly
@pytest.mark.parametrize("closed", ["by its opening", "by another"])
async def test_a_workspace_is_lost_with_its_daemon_and_nothing_of_it_lives(
    mortal: Daemon, tmp_path: Path, closed: str
) -> None:
    """Whoever cleans up finds its processes without the daemon, by what was noted before they were started."""
    provider = at(tmp_path, mortal.host)
    handle = await workspace_of(provider)
    async with provider.open(handle, SandboxSpec()) as workspace, workspace.exec(["sleep", "1000"]) as process:
        (container,) = noted(handle)
        assert len(inhabitants(handle)) > 2
        mortal.kill()
        if closed == "by another":
            with pytest.raises(CleanUpIncomplete, match="cannot be reached"):
                await provider.evict(handle)
            assert inhabitants(handle) == []
        async with took_at_most(60):
            with pytest.raises(WorkspaceLost):
                await process.wait()
    with trio.fail_after(10):  # the process that opens files for a sandbox ends when it finds that this has ended
        while inhabitants(handle):
            await trio.sleep(0.01)
    await trio.to_thread.run_sync(mortal.start)
    await provider.destroy(handle)

    assert helpers(container) == []
    with mortal.client() as client:
        assert client.containers(all=True) == []


async def test_what_is_said_at_last_comes_before_the_end_of_a_sandbox_that_is_removed(tmp_path: Path) -> None:
    provider = at(tmp_path)
    handle = await workspace_of(provider)
    async with provider.open(handle, SandboxSpec()) as workspace:
        assert (await workspace.run(["sh", "-c", "exit 7"])).exit == Exit(code=7)
        with dockerd.session().client() as client:
            await trio.to_thread.run_sync(lambda: client.remove_container(noted(handle)[0], force=True))
        async with took_at_most(60):
            with pytest.raises(WorkspaceLost):
                await workspace.run(["true"])
    await provider.destroy(handle)

    assert inhabitants(handle) == []
