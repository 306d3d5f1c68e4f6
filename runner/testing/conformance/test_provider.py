"""The contract of every provider: one suite, a fresh workspace for each check.

Here are single commands, walls and limits; streams, stopping, directories and guests have modules of their own.
A provider's known gaps are listed with their reason; a check that unexpectedly passes fails.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from runner.core.errors import ProviderFailed
from runner.core.model import Exit, Feature, Limits
from runner.ports.provider import Provider, SandboxSpec, WorkspaceRequest
from runner.safefs.trees import can_chown
from runner.testing.outside import OURS, cmdline, marked
from runner.testing.place import GRACE, HOST_KERNEL, MIB, Candidate, Place, carrying, read_until, shell

pytestmark = pytest.mark.scenario("LIF-25", only="provider")


async def test_it_is_available_and_gives_a_reason_for_every_gap(provider: Provider, candidate: Candidate) -> None:
    probe = await provider.probe()

    assert probe.provider == provider.name
    if candidate.disk_limit is not None:
        assert probe.enforces(Feature.DISK) == (candidate.disk_limit and can_chown())
    assert all(probe.missing.values())


@pytest.mark.parametrize(("argv", "code"), [(["true"], 0), (["sh", "-c", "exit 7"], 7)], ids=["0", "7"])
async def test_a_command_ends_with_its_own_status(place: Place, argv: list[str], code: int) -> None:
    async with place.open() as workspace:
        assert (await workspace.run(argv)).exit == Exit(code=code)


async def test_a_command_that_is_not_there_ends_with_127(place: Place) -> None:
    async with place.open() as workspace:
        assert (await workspace.run(["no-such-command"])).exit == Exit(code=127)


async def test_a_signal_is_told_from_success(place: Place) -> None:
    """A first process that stands between can only say 128 and the signal's number, as a shell does."""
    async with place.open() as workspace:
        ended = (await workspace.run(["sh", "-c", "kill -9 $$"])).exit

    assert ended in (Exit(signal=9), Exit(code=137))


async def test_the_environment_is_exactly_the_allow_list(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_SECRET", "hunter2")
    async with place.open(SandboxSpec(env={"OPENING": "1"})) as workspace:
        result = await workspace.run(["env", "-0"], env={"COMMAND": "a\nb"})
        base = await workspace.run(["env", "-0"])

    env = dict(item.split("=", 1) for item in result.stdout.decode().split("\0") if item)
    ours = {"TMPDIR"} if os.geteuid() == 0 else {"TMPDIR", "RUNNER_PRIVATE"}
    assert set(env) - ours == {"PATH", "LANG", "HOME", "PWD", "OPENING", "COMMAND"}
    assert (env["COMMAND"], env["HOME"], env["PWD"]) == ("a\nb", workspace.paths.home, workspace.paths.workspace)
    assert b"COMMAND" not in base.stdout


async def test_values_of_the_environment_are_on_no_command_line(place: Place) -> None:
    async with (
        place.open(SandboxSpec(env={"KEY": "marked-secret-1"})) as workspace,
        workspace.exec(["sh", "-c", "echo ready; exec sleep 61"], env={"OTHER": "marked-secret-2"}) as process,
    ):
        await read_until(process, b"ready")
        lines = [cmdline(pid) for pid in filter(str.isdigit, os.listdir("/proc"))]

    assert not [line for line in lines if b"marked-secret" in line]


async def test_no_descriptor_but_three_is_open(place: Place) -> None:
    with open("/dev/null") as leaked:
        os.set_inheritable(leaked.fileno(), True)
        async with place.open() as workspace:
            seen = await workspace.run(["sh", "-c", "cd /proc/self/fd; echo *"])

    assert seen.stdout.split() == [b"0", b"1", b"2", b"3"]  # 3 is the directory that the shell itself reads


async def test_a_command_runs_where_it_is_told(place: Place) -> None:
    place.write("sub/file", "")
    await place.provider.chown_to_workspace_user(place.handle)
    async with place.open() as workspace:
        top = await workspace.run(["pwd"])
        below = await workspace.run(["pwd"], cwd="sub")

    assert top.stdout.decode().strip() == workspace.paths.workspace
    assert below.stdout.decode().strip() == f"{workspace.paths.workspace}/sub"


async def test_a_directory_that_is_not_there_is_the_platform_s_error(place: Place) -> None:
    async with place.open() as workspace:
        with pytest.raises(ProviderFailed, match="nowhere"):
            await workspace.run(["true"], cwd="nowhere")


async def test_there_is_no_controlling_terminal(place: Place) -> None:
    async with place.open() as workspace:
        assert re.search("No such device|Input/output error", await shell(workspace, "echo x > /dev/tty"))


async def test_nothing_is_reachable_without_network(place: Place) -> None:
    connect = "exec 3<>/dev/tcp/127.0.0.1"
    async with _listening() as port, place.open() as workspace:
        seen = await shell(workspace, f"sed 1,2d /proc/net/dev; bash -c '{connect}/{port}' 2>/dev/null || echo refused")

    assert {*re.findall(r"^\s*(\w+):", seen, re.MULTILINE)} == {*place.candidate.interfaces}
    assert "refused" in seen


@asynccontextmanager
async def _listening() -> AsyncIterator[int]:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        yield listener.socket.getsockname()[1]


async def test_the_host_cannot_be_seen(place: Place, tmp_path: Path) -> None:
    async with place.open() as workspace:
        for hidden in (
            tmp_path,
            Path("/root"),
            Path("/var/lib"),
            Path("/run/docker.sock"),
            place.handle.private.parent,
        ):
            assert not (await workspace.run(["test", "-e", str(hidden)])).exit.ok, hidden
        pids = await shell(workspace, "cd /proc; echo [0-9]*")
        names = await shell(workspace, "cd /home; echo *; echo /workspace/../*; hostname")

    assert len(pids.split()) < 6
    assert names.split()[0] == "agent"
    assert str(os.uname().nodename) not in names.split()[-1]


async def test_a_setuid_file_made_inside_gives_nothing_outside(place: Place) -> None:
    async with place.open() as workspace:
        await shell(workspace, "cp /bin/true ./harmless; chmod 4755 harmless")

    found = (place.handle.tree / "harmless").stat()
    assert found.st_uid == place.handle.uid
    if os.geteuid() == 0 and place.candidate.own_users:
        assert found.st_uid != 0


@pytest.mark.scenario("BEY-05", only="provider")
async def test_isolation_read_back_is_what_holds(place: Place) -> None:
    place.write("P", "")
    await place.provider.chown_to_workspace_user(place.handle)
    async with place.open(SandboxSpec(protected=("P", "missing/", "absent/"))) as workspace:
        found = await workspace.effective()

    assert found.isolation is place.probe.isolation
    assert found.uid == place.uid
    assert (found.capabilities, found.no_new_privileges) == ("none", True)
    assert found.filtered
    assert (found.shared_namespaces, found.interfaces) == (place.candidate.shared_namespaces, ("lo",))
    assert found.read_only == ("/workspace/P", "/workspace/absent", "/workspace/missing")


async def test_the_provider_s_own_name_and_user_are_read_back(place: Place) -> None:
    async with place.open() as workspace:
        found = await workspace.effective()

    assert (found.provider, found.uid) == (place.provider.name, place.uid)


@pytest.mark.scenario("LIF-17", only="provider")
async def test_memory_over_the_limit_ends_the_offender_and_says_why_and_the_workspace_lives(
    limited: Callable[[Limits], Awaitable[Place]],
) -> None:
    place = await limited(Limits(memory_bytes=64 * MIB))
    async with place.open() as workspace, workspace.exec(["cat"]) as other:
        offender = await workspace.run(["tail", "/dev/zero"])
        child = await workspace.run(["sh", "-c", "tail /dev/zero; echo alive"])
        await other.stdin.send_all(b"still here")
        await read_until(other, b"here")
        await other.stdin.aclose()
        ended = await other.wait()

    assert offender.exit.oom
    assert (child.exit, child.stdout) == (Exit(code=0), b"alive\n")
    assert ended == Exit(code=0)


@pytest.mark.parametrize(
    ("script", "kills"),
    [("true", 0), ("tail /dev/zero; tail /dev/zero; true", 2)],
    ids=["none", "of two children"],
)
async def test_kills_for_memory_are_counted_also_when_the_command_goes_on(
    limited: Callable[[Limits], Awaitable[Place]], script: str, kills: int
) -> None:
    place = await limited(Limits(memory_bytes=64 * MIB))
    async with place.open() as workspace:
        async with workspace.exec(["sh", "-c", "tail /dev/zero"]) as before:
            await before.wait()
        async with workspace.exec(["sh", "-c", script]) as process:
            assert (await process.wait()).ok
            assert process.oom_kills == kills

    assert process.oom_kills == kills


async def test_a_fork_bomb_stays_under_its_limit(limited: Callable[[Limits], Awaitable[Place]]) -> None:
    place = await limited(Limits(pids=30))
    async with place.open() as workspace:
        limits = (await workspace.effective()).limits
        seen = await shell(workspace, f"i=0; while [ $i -lt 60 ]; do sleep 1239{OURS} & i=$((i+1)); done")

    assert "fork" in seen
    assert limits == Limits(pids=30)


BOMB = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
told = False
while True:
    try: os.fork()
    except OSError:
        told = told or os.write(1, b"full")
        time.sleep(0.01)
"""


async def test_a_fork_bomb_ends_with_its_block_and_the_workspace_lives(
    limited: Callable[[Limits], Awaitable[Place]], provider: Provider
) -> None:
    shown = (await provider.probe()).isolation in HOST_KERNEL
    place = await limited(Limits(pids=50 if shown else 15))  # in a kernel of its own a busy process costs far more
    async with place.open() as workspace:
        async with workspace.exec(["python3", "-SIc", BOMB], env={"MARK": place.mark}) as process:
            await read_until(process, b"full")
            assert not place.shows_processes or len(marked(place.mark)) >= 30
            start = trio.current_time()
        assert trio.current_time() - start < GRACE + 60
        assert await carrying(place, workspace, place.mark) == 0
        assert (await workspace.run(["true"])).exit.ok


async def test_processors_are_limited(limited: Callable[[Limits], Awaitable[Place]]) -> None:
    place = await limited(Limits(cpus=0.25))
    async with place.open() as workspace:
        seen = await shell(workspace, "timeout 1 sh -c 'while :; do :; done'; cat /proc/self/stat >/dev/null; times")
        assert (await workspace.effective()).limits == Limits(cpus=0.25)

    minutes, seconds = re.findall(r"(\d+)m([\d.]+)s", seen)[2]  # the children's user time
    assert (
        not place.shows_processes or int(minutes) * 60 + float(seconds) < 0.6
    )  # which a kernel of its own only guesses


async def test_a_limit_that_cannot_be_kept_is_refused(provider: Provider) -> None:
    """No provider can limit the disk of one workspace of a project that is seen whole."""
    with pytest.raises(ProviderFailed, match="disk"):
        await provider.create(
            WorkspaceRequest(id="never", run="run-1", nonce="nonce", limits=Limits(disk_bytes=MIB), shared=True)
        )
