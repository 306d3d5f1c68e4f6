"""What every provider owes the engine: one suite, a fresh workspace for each check.

A provider's known gaps are listed with their reason; a check that unexpectedly passes fails.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import pytest
import trio

from runner.errors import CleanUpIncomplete, ProtectedLink, ProviderFailed, WorkspaceLost
from runner.model import Exit, Feature, Handle, IsolationClass, Limits, Mount, Rung
from runner.ports.provider import Opening, Process, Provider, Workspace, WorkspaceRequest
from runner.providers.fake import Fake, Scripted
from runner.providers.local import Local
from runner.providers.process import OnHost

GRACE = 0.4
ORDINARY = "local as an ordinary user"  # whoever runs the suite
MIB = 1 << 20

_FAKE = "nothing is executed"
_HOST = "commands see this host"
_UNTOLD = "the kernel ends what is left with the pid namespace, and tells nobody"
GAPS: dict[str, dict[str, str]] = {
    "local": {"test_what_a_command_leaves_running_is_killed_and_told": _UNTOLD},
    ORDINARY: {"test_what_a_command_leaves_running_is_killed_and_told": _UNTOLD},
    "process": {
        "test_protected_paths_are_read_only_in_place_and_the_rest_is_writable": _HOST,
        "test_writing_a_protected_file_fails_and_changes_nothing": _HOST,
        "test_a_protected_path_that_does_not_exist_is_no_error_and_cannot_be_created": _HOST,
        "test_moving_the_parent_of_a_protected_path_away_fails": _HOST,
        "test_a_protected_path_that_is_a_link_is_refused": _HOST,
        "test_a_stand_in_that_a_crash_left_is_removed": _HOST,
        "test_nothing_is_reachable_without_network": _HOST,
        "test_the_host_cannot_be_seen": _HOST,
        "test_isolation_read_back_is_what_holds": _HOST,
        "test_a_read_only_mount_cannot_be_written": _HOST,
        "test_paths_are_the_same_on_every_provider_with_mounts": _HOST,
    },
}

NAMES = count()
OURS = f".{os.getpid()}"  # the fraction of every long sleep, to tell those of a suite beside us
LEAVES = f"setsid sleep 1240{OURS} >/dev/null 2>&1 & sleep 0.1"


def _scripted(argv: Sequence[str]) -> Scripted:
    """Just enough for the checks that are about the port and not about processes."""
    known = {
        ("true",): Scripted(),
        ("sh", "-c", LEAVES): Scripted(leaves=True),
        ("sh", "-c", "exit 7"): Scripted(Exit(code=7)),
        ("no-such-command",): Scripted(Exit(code=127)),
        ("sh", "-c", "kill -9 $$"): Scripted(Exit(signal=9)),
        ("sh", "-c", "echo out; echo err >&2"): Scripted(stdout=b"out\n", stderr=b"err\n"),
        ("sh", "-c", "echo ready; exec sleep 60"): Scripted(stdout=b"ready\n", seconds=60),
        ("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"): Scripted(
            stdout=b"ready\n", seconds=60, yields_to=Rung.KILL
        ),
    }
    return known[tuple(argv)]


FAKE_PASSES = {
    "test_it_is_available_and_gives_a_reason_for_every_gap",
    "test_a_command_ends_with_its_own_status",
    "test_a_command_that_is_not_there_ends_with_127",
    "test_a_signal_is_told_from_success",
    "test_output_and_errors_are_separate",
    "test_output_over_the_bound_is_cut_and_says_so",
    "test_leaving_the_block_ends_an_obedient_command_at_once",
    "test_a_command_that_ignores_term_is_killed_after_the_grace",
    "test_each_rung_of_ending_a_command_is_told",
    "test_what_a_command_leaves_running_is_killed_and_told",
    "test_a_command_that_is_being_stopped_is_killed_when_its_sandbox_closes",
    "test_a_workspace_is_found_by_its_nonce_only",
    "test_a_command_that_does_not_read_its_input_is_no_error",
    "test_destroying_twice_is_no_error",
    "test_destroying_a_half_made_workspace_removes_the_rest",
    "test_directories_without_a_record_are_left_and_named",
    "test_destroying_leaves_nothing_of_a_hostile_tree",
    "test_a_handle_that_points_elsewhere_is_refused",
    "test_a_lost_workspace_is_said_so",
    "test_an_id_that_is_a_path_is_refused",
    "test_making_a_workspace_again_is_refused_and_leaves_the_first",
    "test_what_the_host_wrote_belongs_to_the_workspace_after_give",
}


@dataclass
class Place:
    kind: str
    provider: Provider
    home: Path
    handle: Handle
    nonce: str

    def open(self, opening: Opening | None = None) -> AbstractAsyncContextManager[Workspace]:
        return self.provider.open(self.handle, opening or Opening())

    def write(self, name: str, text: str) -> Path:
        path = self.handle.tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


def make(kind: str, home: Path, grace: float) -> Provider:
    kinds: dict[str, Callable[[], Provider]] = {
        "local": lambda: Local(home, grace=grace),
        ORDINARY: lambda: Local(home, grace=grace, own_users=False),
        "process": lambda: OnHost(home, grace=grace),
        "fake": lambda: Fake(home, _scripted, grace=grace),
    }
    return kinds[kind]()


@pytest.fixture(params=["local", ORDINARY, "process", "fake"])
async def provider(request: pytest.FixtureRequest, tmp_path: Path) -> Provider:
    name = request.node.originalname
    gap = GAPS.get(request.param, {}).get(name)
    if request.param == "fake" and name not in FAKE_PASSES:
        gap = _FAKE
    if gap:
        request.applymarker(pytest.mark.xfail(reason=gap, strict=True))
    made = make(request.param, tmp_path, GRACE)
    probe = await made.probe()
    if not probe.available:
        pytest.skip(f"{probe.reason}; {probe.hint}")
    return made


@pytest.fixture
async def place(request: pytest.FixtureRequest, provider: Provider, tmp_path: Path) -> AsyncIterator[Place]:
    """A fresh workspace; afterwards an outside look finds nothing of it."""
    before = _host(tmp_path)
    nonce = "nonce-of-this-store"
    handle = await provider.create(WorkspaceRequest(f"check-{os.getpid()}-{next(NAMES)}", "run-1", nonce))
    yield Place(request.node.callspec.params["provider"], provider, tmp_path, handle, nonce)
    if handle.tree.exists() or handle.private.exists():
        await provider.destroy(handle)
    assert not handle.tree.exists()
    assert not handle.private.exists()
    assert [p.name for p in (tmp_path / "sandboxes").iterdir() if handle.id in p.name] == []
    assert _host(tmp_path) == before


def _host(home: Path) -> set[str]:
    """Processes, mounts and control groups of workspaces, as an outsider sees them."""
    found = {line for line in Path("/proc/1/mountinfo").read_text().splitlines() if str(home) in line}
    groups = (name for _, names, _ in os.walk("/sys/fs/cgroup") for name in names)  # others come and go meanwhile
    found |= {name for name in groups if name.startswith(f"runner-check-{os.getpid()}-")}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes() + os.readlink(f"/proc/{pid}/cwd").encode()
        except OSError:
            continue
        if str(home).encode() in words or re.fullmatch(rb"sleep\x0012[34]\d%s\x00.*" % OURS.encode(), words):
            found.add(f"process {pid}")
    return found


async def shell(workspace: Workspace, text: str) -> str:
    """What a shell prints, both streams; it must not fail to start."""
    result = await workspace.run(["sh", "-c", f"{{ {text}\n}} 2>&1"])
    return result.stdout.decode()


async def read_until(process: Process, text: bytes) -> bytes:
    seen = b""
    with trio.fail_after(10):
        while text not in seen:
            chunk = await process.stdout.receive_some(4096)
            assert chunk, f"the command ended after {seen!r}"
            seen += chunk
    return seen


@asynccontextmanager
async def took_at_most(seconds: float) -> AsyncIterator[None]:
    start = trio.current_time()
    yield
    assert trio.current_time() - start < seconds


# --- commands ---------------------------------------------------------------------------------------


async def test_it_is_available_and_gives_a_reason_for_every_gap(provider: Provider) -> None:
    probe = await provider.probe()

    assert probe.provider == provider.name
    assert Feature.DISK in probe.missing
    assert all(probe.missing.values())


@pytest.mark.parametrize(("argv", "code"), [(["true"], 0), (["sh", "-c", "exit 7"], 7)], ids=["0", "7"])
async def test_a_command_ends_with_its_own_status(place: Place, argv: list[str], code: int) -> None:
    async with place.open() as workspace:
        assert (await workspace.run(argv)).exit == Exit(code=code)


async def test_a_command_that_is_not_there_ends_with_127(place: Place) -> None:
    async with place.open() as workspace:
        assert (await workspace.run(["no-such-command"])).exit == Exit(code=127)


async def test_a_signal_is_told_from_success(place: Place) -> None:
    """Where a first process stands between, it can only say 128 and the signal's number, as a shell does."""
    async with place.open() as workspace:
        ended = (await workspace.run(["sh", "-c", "kill -9 $$"])).exit

    assert ended in (Exit(signal=9), Exit(code=137))


async def test_output_and_errors_are_separate(place: Place) -> None:
    async with place.open() as workspace:
        result = await workspace.run(["sh", "-c", "echo out; echo err >&2"])

    assert (result.stdout, result.stderr, result.cut) == (b"out\n", b"err\n", False)


async def test_output_over_the_bound_is_cut_and_says_so(place: Place) -> None:
    async with place.open() as workspace:
        result = await workspace.run(["sh", "-c", "echo out; echo err >&2"], keep_bytes=2)

    assert (result.stdout, result.stderr, result.cut) == (b"ou", b"er", True)


async def test_standard_input_is_read_to_its_end(place: Place) -> None:
    body = os.urandom(8 * MIB)
    async with place.open() as workspace:
        result = await workspace.run(["sha256sum"], stdin=body)

    assert result.stdout.decode().split()[0] == hashlib.sha256(body).hexdigest()


async def test_eight_mebibytes_pass_on_both_streams(place: Place) -> None:
    async with place.open() as workspace:
        result = await workspace.run(
            ["sh", "-c", f"head -c {8 * MIB} /dev/zero & head -c {8 * MIB} /dev/zero >&2; wait"], keep_bytes=16 * MIB
        )

    assert (len(result.stdout), len(result.stderr)) == (8 * MIB, 8 * MIB)


async def test_a_command_that_does_not_read_its_input_is_no_error(place: Place) -> None:
    async with place.open() as workspace:
        assert (await workspace.run(["true"], stdin=b"x" * 4 * MIB)).exit.ok


async def test_the_environment_is_exactly_the_allow_list(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_SECRET", "hunter2")
    async with place.open(Opening(env={"OPENING": "1"})) as workspace:
        result = await workspace.run(["env", "-0"], env={"COMMAND": "a\nb"})
        base = await workspace.run(["env", "-0"])

    env = dict(item.split("=", 1) for item in result.stdout.decode().split("\0") if item)
    assert set(env) - {"TMPDIR"} == {"PATH", "LANG", "HOME", "PWD", "OPENING", "COMMAND"}
    assert (env["COMMAND"], env["HOME"], env["PWD"]) == ("a\nb", workspace.paths.home, workspace.paths.workspace)
    assert b"COMMAND" not in base.stdout


async def test_values_of_the_environment_are_on_no_command_line(place: Place) -> None:
    async with (
        place.open(Opening(env={"KEY": "marked-secret-1"})) as workspace,
        workspace.exec(["sh", "-c", "echo ready; exec sleep 61"], env={"OTHER": "marked-secret-2"}) as process,
    ):
        await read_until(process, b"ready")
        lines = [_cmdline(pid) for pid in filter(str.isdigit, os.listdir("/proc"))]

    assert not [line for line in lines if b"marked-secret" in line]


def _cmdline(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


async def test_no_descriptor_but_three_is_open(place: Place) -> None:
    with open("/dev/null") as leaked:
        os.set_inheritable(leaked.fileno(), True)
        async with place.open() as workspace:
            seen = await shell(workspace, "ls /proc/self/fd")

    assert seen.split() == ["0", "1", "2", "3"]  # 3 is the directory that ls itself reads


async def test_a_command_runs_where_it_is_told(place: Place) -> None:
    place.write("sub/file", "")
    await place.provider.give(place.handle)
    async with place.open() as workspace:
        top = await workspace.run(["pwd"])
        below = await workspace.run(["pwd"], cwd="sub")

    assert top.stdout.decode().strip() == workspace.paths.workspace
    assert below.stdout.decode().strip() == f"{workspace.paths.workspace}/sub"


async def test_a_directory_that_is_not_there_is_the_platform_s_error(place: Place) -> None:
    async with place.open() as workspace:
        with pytest.raises(ProviderFailed, match="nowhere"):
            await workspace.run(["true"], cwd="nowhere")


async def test_twenty_commands_run_at_once(place: Place) -> None:
    seen: dict[int, bytes] = {}

    async def one(number: int) -> None:
        seen[number] = (await workspace.run(["sh", "-c", f"sleep 0.2; echo {number}"])).stdout

    async with place.open() as workspace, trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(one, number)

    assert seen == {number: f"{number}\n".encode() for number in range(20)}


async def test_there_is_no_controlling_terminal(place: Place) -> None:
    async with place.open() as workspace:
        assert "No such device" in await shell(workspace, "echo x > /dev/tty")


# --- ending -----------------------------------------------------------------------------------------


async def test_leaving_the_block_ends_an_obedient_command_at_once(place: Place) -> None:
    command = ["sh", "-c", "echo ready; exec sleep 60"]
    async with place.open() as workspace, took_at_most(GRACE), workspace.exec(command) as process:
        await read_until(process, b"ready")


async def test_cancelling_lets_a_command_finish_in_its_own_words(place: Place) -> None:
    kept = b""
    with trio.move_on_after(10) as scope:
        async with place.open() as workspace:
            script = "trap 'echo bye > told; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
            async with workspace.exec(["sh", "-c", script]) as process:
                kept = await read_until(process, b"ready")
                scope.cancel()
                await trio.sleep_forever()

    assert scope.cancelled_caught
    assert kept == b"ready\n"
    assert (place.handle.tree / "told").read_text() == "bye\n"


async def test_a_command_that_ignores_term_is_killed_after_the_grace(place: Place) -> None:
    async with place.open() as workspace:
        start = trio.current_time()
        async with workspace.exec(["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"]) as process:
            await read_until(process, b"ready")

    assert GRACE <= trio.current_time() - start < GRACE + 3


@pytest.mark.parametrize(
    ("script", "rungs"),
    [
        ("echo ready; exec sleep 60", [Rung.TERM]),
        ("trap '' TERM; echo ready; while :; do sleep 1; done", [Rung.TERM, Rung.KILL]),
    ],
    ids=["obedient", "ignoring TERM"],
)
async def test_each_rung_of_ending_a_command_is_told(place: Place, script: str, rungs: list[Rung]) -> None:
    told: list[Rung] = []
    async with place.open() as workspace:
        async with workspace.exec(["sh", "-c", script], on_rung=told.append) as process:
            await read_until(process, b"ready")
        assert told == rungs
        async with workspace.exec(["true"], on_rung=told.append) as process:
            await process.wait()
        assert told == rungs


async def test_what_a_command_leaves_running_is_killed_and_told(place: Place) -> None:
    told: list[Rung] = []
    async with place.open() as workspace:
        async with workspace.exec(["sh", "-c", LEAVES], on_rung=told.append) as process:
            await process.wait()
        assert told == [Rung.KILL]


async def test_a_command_that_is_being_stopped_is_killed_when_its_sandbox_closes(place: Place) -> None:
    script = "trap '' TERM; echo ready; while :; do sleep 1; done"
    stopping, over = trio.CancelScope(), trio.Event()
    told: list[Rung] = []

    async def command(workspace: Workspace, task_status: trio.TaskStatus[None]) -> None:
        with stopping:
            async with workspace.exec(["sh", "-c", script], on_rung=told.append) as process:
                await read_until(process, b"ready")
                task_status.started()
                await trio.sleep_forever()
        over.set()

    async with trio.open_nursery() as nursery, took_at_most(5):
        async with make(place.kind, place.home, grace=7).open(place.handle, Opening()) as workspace:
            await nursery.start(command, workspace)
            stopping.cancel()
            await trio.sleep(0.2)
            assert not over.is_set()
        await over.wait()
    assert told == [Rung.TERM, Rung.KILL]


async def test_a_daemon_with_a_session_of_its_own_is_gone_after_the_block(place: Place) -> None:
    daemon = f"setsid sh -c 'trap \"\" TERM; exec sleep 1234{OURS}' >/dev/null 2>&1 &"
    script = f"({daemon}); echo ready; exec sleep 60"
    async with place.open() as workspace:
        async with workspace.exec(["sh", "-c", script]) as process:
            await read_until(process, b"ready")
            await trio.sleep(0.1)
        assert _running(1234) == []


async def test_a_daemon_that_outlives_its_command_is_gone_after_the_block(place: Place) -> None:
    async with place.open() as workspace:
        assert (await workspace.run(["sh", "-c", f"setsid sleep 1235{OURS} >/dev/null 2>&1 & sleep 0.1"])).exit.ok
        assert _running(1235) == []


async def test_ending_one_command_leaves_the_others(place: Place) -> None:
    async with place.open() as workspace, workspace.exec(["cat"]) as other:
        await workspace.run(["sh", "-c", f"setsid sleep 1236{OURS} >/dev/null 2>&1 &"])
        await other.stdin.send_all(b"still here")
        assert await read_until(other, b"here") == b"still here"


async def test_a_grandchild_that_holds_the_pipes_does_not_hold_the_end(place: Place) -> None:
    async with place.open() as workspace, took_at_most(5):
        result = await workspace.run(["sh", "-c", f"sleep 1237{OURS} & echo done"])

    assert result.stdout == b"done\n"


async def test_a_hostile_number_of_children_is_gone_after_the_block(place: Place) -> None:
    script = f"i=0; while [ $i -lt 200 ]; do setsid sleep 1238{OURS} & i=$((i+1)); done; echo ready; wait"
    async with place.open() as workspace:
        async with workspace.exec(["sh", "-c", script]) as process:
            await read_until(process, b"ready")
        assert _running(1238) == []


def _running(seconds: int) -> list[str]:
    """Processes of ours that sleep so long."""
    words = f"sleep\0{seconds}{OURS}\0".encode()
    return [pid for pid in filter(str.isdigit, os.listdir("/proc")) if _cmdline(pid) == words]


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [12, pytest.param(60, marks=pytest.mark.nightly)])
async def test_an_idle_command_lives(place: Place, seconds: float) -> None:
    """Trio ends idle worker threads after 10 s, and the kernel then kills what they have spawned."""
    async with place.open() as workspace, workspace.exec(["cat"]) as process:
        await trio.sleep(seconds)
        await process.stdin.send_all(b"still here")
        assert await read_until(process, b"here") == b"still here"


@pytest.mark.slow
@pytest.mark.parametrize("mebibytes", [256, pytest.param(10240, marks=pytest.mark.nightly)])
async def test_output_of_any_size_costs_no_memory(place: Place, mebibytes: int) -> None:
    size = 0
    async with place.open() as workspace, workspace.exec(["head", "-c", f"{mebibytes}M", "/dev/zero"]) as process:
        before = _resident()
        while chunk := await process.stdout.receive_some(MIB):
            size += len(chunk)

    assert size == mebibytes * MIB
    assert _resident() - before < 64 * MIB


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- openings ---------------------------------------------------------------------------------------


async def test_home_persists_and_a_fresh_one_does_not(place: Place) -> None:
    async with place.open() as workspace:
        await shell(workspace, 'echo mine > "$HOME/note"')
    async with place.open(Opening(fresh_home=True)) as workspace:
        fresh = await shell(workspace, 'ls -A "$HOME"; echo lost > "$HOME/other"')
    async with place.open() as workspace:
        again = await shell(workspace, 'ls -A "$HOME"')

    assert (fresh, again) == ("", "note\n")


async def test_temporary_files_are_gone_at_the_next_opening(place: Place) -> None:
    async with place.open() as workspace:
        await shell(workspace, "touch ${TMPDIR:-/tmp}/left")
    async with place.open() as workspace:
        assert await shell(workspace, "ls -A ${TMPDIR:-/tmp}") == ""


async def test_a_tree_that_is_not_writable_stays_untouched(place: Place) -> None:
    place.write("sub/kept", "as it was")
    await place.provider.give(place.handle)
    async with place.open(Opening(tree_writable=False)) as workspace:
        assert await shell(workspace, "echo new > sub/kept; rm -r sub; echo more > made") == ""
        seen = await shell(workspace, "ls -A")
    async with place.open() as workspace:
        after = await shell(workspace, "cat sub/kept; ls -A")

    assert (seen, after) == ("made\n", "as it wassub\n")


async def test_another_tree_can_be_shown_instead_even_one_of_the_host_s_own(place: Place, tmp_path: Path) -> None:
    clean = tmp_path / "clean"
    clean.mkdir()
    (clean / "file").write_text("of the commit")
    opening = Opening(tree=Mount(clean, "/workspace"), tree_writable=False, fresh_home=True)
    async with place.open(opening) as workspace:
        seen = await shell(workspace, "cat file; echo x > file && cat file; ls -A")

    assert seen == "of the commitx\nfile\n"
    assert (clean / "file").read_text() == "of the commit"


async def test_output_and_inputs_are_where_the_paths_say(place: Place) -> None:
    (place.handle.private / "runner" / "task.json").write_text("{}")
    await place.provider.give(place.handle)
    async with place.open() as workspace:
        paths = workspace.paths
        seen = await shell(workspace, f"cat {paths.runner}/task.json; echo report > {paths.output}/report.md")

    assert seen == "{}"
    assert (place.handle.private / "output" / "report.md").read_text() == "report\n"


async def test_a_mounted_incident_can_be_read(place: Place, tmp_path: Path) -> None:
    incident = tmp_path / "incident"
    incident.mkdir()
    (incident / "incident.json").write_text("{}")
    async with place.open(Opening(mounts=(Mount(incident, "/incident"),))) as workspace:
        assert await shell(workspace, f"cat {workspace.paths.incident}/incident.json") == "{}"


async def test_a_read_only_mount_cannot_be_written(place: Place, tmp_path: Path) -> None:
    skills = tmp_path / "skills"
    skills.mkdir(mode=0o777)
    async with place.open(Opening(mounts=(Mount(skills, "/skills"),))) as workspace:
        assert "Read-only file system" in await shell(workspace, "echo x > /skills/x")


async def test_a_toolchain_is_at_its_own_path(place: Place, tmp_path_factory: pytest.TempPathFactory) -> None:
    tools = Path("/usr/share")
    async with place.open(Opening(toolchains=(str(tools),))) as workspace:
        assert (await workspace.run(["test", "-d", str(tools)])).exit.ok


async def test_paths_are_the_same_on_every_provider_with_mounts(place: Place) -> None:
    async with place.open() as workspace:
        assert workspace.paths.workspace == "/workspace"
        assert workspace.paths.home == "/home/agent"


async def test_a_lost_workspace_is_said_so(place: Place) -> None:
    os.rename(place.handle.tree, place.handle.tree.with_name("elsewhere"))
    try:
        with pytest.raises(WorkspaceLost):
            async with place.open():
                pytest.fail("opened")
    finally:
        os.rename(place.handle.tree.with_name("elsewhere"), place.handle.tree)


# --- protected paths --------------------------------------------------------------------------------


@pytest.mark.scenario("ISO-10", only="local")
async def test_protected_paths_are_read_only_in_place_and_the_rest_is_writable(place: Place) -> None:
    place.write("AGENTS.md", "rules")
    place.write(".factory/hooks/one", "hook")
    await place.provider.give(place.handle)
    async with place.open(Opening(protected=("AGENTS.md", ".factory/"))) as workspace:
        seen = await shell(workspace, "cat AGENTS.md .factory/hooks/one; echo ok > free; touch .factory/new")

    assert seen.startswith("ruleshook")
    assert "Read-only file system" in seen
    assert (place.handle.tree / "free").exists()


@pytest.mark.scenario("ISO-11", only="local")
@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        ("echo x > d/P", "Read-only file system"),
        ("echo x >> d/P", "Read-only file system"),
        ("truncate -s 0 d/P", "Read-only file system"),
        ("chmod 777 d/P", "Read-only file system"),
        ("touch d/P", "Read-only file system"),
        ("rm -f d/P", "busy"),
        ("mv d/P other", "busy"),
        ("echo x > n; mv -f n d/P", "busy"),
        ("ln d/P hard", "cross-device"),
        ("ln -s d/P soft; echo x > soft", "Read-only file system"),
        ("umount d/P", "mount"),
    ],
    ids=lambda value: value.split(";")[0],
)
async def test_writing_a_protected_file_fails_and_changes_nothing(place: Place, attempt: str, words: str) -> None:
    kept = place.write("d/P", "rules")
    await place.provider.give(place.handle)
    async with place.open(Opening(protected=("d/P",))) as workspace:
        seen = await shell(workspace, attempt)

    assert words.lower() in seen.lower()
    assert kept.read_text() == "rules"


@pytest.mark.scenario("ISO-12", only="local")
@pytest.mark.parametrize("path", ["AGENTS.md", ".factory/", "no/such/parent.md", "sub/new"])
async def test_a_protected_path_that_does_not_exist_is_no_error_and_cannot_be_created(place: Place, path: str) -> None:
    place.write("sub/file", "")
    await place.provider.give(place.handle)
    before = sorted(str(p) for p in place.handle.tree.rglob("*"))
    async with place.open(Opening(protected=(path,))) as workspace:
        seen = await shell(workspace, f"mkdir -p $(dirname {path}); echo forged > {path}; rm -rf {path.split('/')[0]}")

    assert seen != ""
    left = sorted(str(p) for p in place.handle.tree.rglob("*"))
    assert [p for p in left if p not in before] == []
    assert not (place.handle.tree / path).exists()


async def test_moving_the_parent_of_a_protected_path_away_fails(place: Place) -> None:
    place.write("a/b/P.md", "rules")
    await place.provider.give(place.handle)
    async with place.open(Opening(protected=("a/b/P.md",))) as workspace:
        seen = await shell(workspace, "mv a q; mv a/b a/c; mkdir -p a/b; echo forged > a/b/P.md")

    assert seen.count("busy") == 2
    assert (place.handle.tree / "a/b/P.md").read_text() == "rules"


@pytest.mark.parametrize("path", ["link", "link/below", "dangling"])
async def test_a_protected_path_that_is_a_link_is_refused(place: Place, path: str) -> None:
    (place.handle.tree / "link").symlink_to("/etc")
    (place.handle.tree / "dangling").symlink_to("nowhere")
    with pytest.raises(ProtectedLink, match=path.split("/", maxsplit=1)[0]):
        async with place.open(Opening(protected=(path,))):
            pytest.fail("opened")


async def test_a_stand_in_that_a_crash_left_is_removed(place: Place) -> None:
    place.write("AGENTS.md", "").chmod(0)
    async with place.open(Opening(protected=("AGENTS.md",))) as workspace:
        await workspace.run(["true"])

    assert not (place.handle.tree / "AGENTS.md").exists()


# --- walls ------------------------------------------------------------------------------------------


async def test_nothing_is_reachable_without_network(place: Place) -> None:
    connect = "exec 3<>/dev/tcp/127.0.0.1"
    async with _listening() as port, place.open() as workspace:
        seen = await shell(workspace, f"sed 1,2d /proc/net/dev; bash -c '{connect}/{port}' 2>/dev/null || echo refused")

    assert re.findall(r"^\s*(\w+):", seen, re.MULTILINE) == ["lo"]
    assert "refused" in seen


@asynccontextmanager
async def _listening() -> AsyncIterator[int]:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        yield listener.socket.getsockname()[1]


async def test_the_host_cannot_be_seen(place: Place, tmp_path: Path) -> None:
    async with place.open() as workspace:
        for hidden in (tmp_path, Path("/root"), Path("/var"), Path("/run/docker.sock"), place.handle.private.parent):
            assert not (await workspace.run(["test", "-e", str(hidden)])).exit.ok, hidden
        pids = await shell(workspace, "cd /proc; ls -d [0-9]*")
        names = await shell(workspace, "ls /home; ls -d /workspace/../*; hostname")

    assert len(pids.split()) < 6
    assert names.split()[0] == "agent"
    assert str(os.uname().nodename) not in names.split()[-1]


async def test_a_setuid_file_made_inside_gives_nothing_outside(place: Place) -> None:
    async with place.open() as workspace:
        await shell(workspace, "cp /bin/true ./harmless; chmod 4755 harmless")

    found = (place.handle.tree / "harmless").stat()
    assert found.st_uid == place.handle.uid
    if os.geteuid() == 0 and place.kind != ORDINARY:
        assert found.st_uid != 0


@pytest.mark.scenario("BEY-05", only="local")
async def test_isolation_read_back_is_what_holds(place: Place) -> None:
    place.write("P", "")
    await place.provider.give(place.handle)
    async with place.open(Opening(protected=("P", "missing/", "absent/"))) as workspace:
        found = await workspace.effective()

    assert found.isolation is IsolationClass.NAMESPACES
    assert found.uid == place.handle.uid
    assert (found.capabilities, found.no_new_privileges) == ("none", True)
    assert (found.shared_namespaces, found.interfaces) == ((), ("lo",))
    assert found.read_only == ("/workspace/P", "/workspace/absent", "/workspace/missing")


async def test_the_provider_s_own_name_and_user_are_read_back(place: Place) -> None:
    async with place.open() as workspace:
        found = await workspace.effective()

    assert (found.provider, found.uid) == (place.provider.name, place.handle.uid)


# --- limits -----------------------------------------------------------------------------------------


@pytest.fixture
async def limited(provider: Provider, tmp_path: Path) -> AsyncIterator[Callable[[Limits], Awaitable[Place]]]:
    made: list[Handle] = []

    async def make(limits: Limits) -> Place:
        missing = (await provider.probe()).missing
        if {Feature.MEMORY, Feature.CPU, Feature.PIDS} & set(missing) and provider.name != "fake":
            pytest.skip(str(missing))
        name = f"check-{os.getpid()}-{next(NAMES)}"
        made.append(await provider.create(WorkspaceRequest(name, "run-1", "nonce", limits)))
        return Place(provider.name, provider, tmp_path, made[-1], "nonce")

    yield make
    for handle in made:
        await provider.destroy(handle)
    assert _host(tmp_path) == set()


async def test_memory_over_the_limit_ends_the_offender_and_says_why(
    limited: Callable[[Limits], Awaitable[Place]],
) -> None:
    place = await limited(Limits(memory_bytes=64 * MIB))
    async with place.open() as workspace:
        offender = await workspace.run(["tail", "/dev/zero"])
        child = await workspace.run(["sh", "-c", "tail /dev/zero; echo alive"])

    assert offender.exit.oom
    assert (child.exit, child.stdout) == (Exit(code=0), b"alive\n")


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


async def test_processors_are_limited(limited: Callable[[Limits], Awaitable[Place]]) -> None:
    place = await limited(Limits(cpus=0.25))
    async with place.open() as workspace:
        seen = await shell(workspace, "timeout 1 sh -c 'while :; do :; done'; cat /proc/self/stat >/dev/null; times")
        assert (await workspace.effective()).limits == Limits(cpus=0.25)

    minutes, seconds = re.findall(r"(\d+)m([\d.]+)s", seen)[2]  # the children's user time
    assert int(minutes) * 60 + float(seconds) < 0.6


async def test_a_limit_that_cannot_be_kept_is_refused(provider: Provider) -> None:
    with pytest.raises(ProviderFailed, match="disk"):
        await provider.create(WorkspaceRequest("never", "run-1", "nonce", Limits(disk_bytes=MIB)))


# --- workspaces -------------------------------------------------------------------------------------


async def test_a_workspace_is_found_by_its_nonce_only(place: Place) -> None:
    records = place.handle.private.parent
    (records / "decoy.json").write_text('{"provider": "elsewhere", "nonce": "nonce-of-this-store"}')
    (records / "torn.json").write_text("{")
    (records / "list.json").write_text("[]")

    assert await place.provider.list_owned(place.nonce) == [place.handle]
    assert await place.provider.list_owned("another") == []


async def test_destroying_twice_is_no_error(place: Place) -> None:
    await place.provider.destroy(place.handle)
    await place.provider.destroy(place.handle)

    assert await place.provider.list_owned(place.nonce) == []


async def test_destroying_a_half_made_workspace_removes_the_rest(place: Place) -> None:
    (place.handle.private / "home").rmdir()
    place.handle.tree.rmdir()

    await place.provider.destroy(place.handle)

    assert not place.handle.private.exists()


async def test_destroying_leaves_nothing_of_a_hostile_tree(place: Place, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    tree = place.handle.tree
    (tree / "link").symlink_to(outside)
    for name in (b"new\nline", b"\xff\xfe", b"-rf", b"x" * 255):
        (Path(os.fsdecode(os.fsencode(tree) + b"/" + name))).touch()
    os.mkfifo(tree / "fifo")
    fd = os.open(tree, os.O_RDONLY)
    for _ in range(2000):  # 10,000 bytes of path: longer than any system call takes
        os.mkdir("deep!", dir_fd=fd)
        inner = os.open("deep!", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    (tree / "closed" / "inner").mkdir(parents=True)
    (tree / "closed" / "inner").chmod(0)
    (tree / "closed").chmod(0)

    await place.provider.destroy(place.handle)

    assert not tree.exists()
    assert (outside / "kept").read_text() == "kept"


async def test_a_handle_that_points_elsewhere_is_refused(place: Place, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    for forged in (replace(place.handle, tree=victim), replace(place.handle, id="../victim")):
        with pytest.raises(ProviderFailed):
            await place.provider.destroy(forged)

    assert victim.exists()


async def test_directories_without_a_record_are_left_and_named(place: Place) -> None:
    record = place.handle.private.with_name(f"{place.handle.id}.json")
    text = record.read_text()
    record.unlink()
    with pytest.raises(CleanUpIncomplete, match=place.handle.id):
        await place.provider.destroy(place.handle)

    assert place.handle.tree.exists()
    record.write_text(text)


async def test_an_id_that_is_a_path_is_refused(provider: Provider) -> None:
    with pytest.raises(ProviderFailed):
        await provider.create(WorkspaceRequest("../x", "run-1", "nonce"))


async def test_making_a_workspace_again_is_refused_and_leaves_the_first(place: Place) -> None:
    place.write("work", "precious")
    with pytest.raises(ProviderFailed):
        await place.provider.create(WorkspaceRequest(place.handle.id, "run-2", place.nonce))

    assert (place.handle.tree / "work").read_text() == "precious"


async def test_what_the_host_wrote_belongs_to_the_workspace_after_give(place: Place, tmp_path: Path) -> None:
    place.write("a/b/c", "")
    (place.handle.tree / "out").symlink_to(tmp_path)
    owner = tmp_path.stat().st_uid

    await place.provider.give(place.handle)

    assert {p.lstat().st_uid for p in place.handle.tree.rglob("*")} == {place.handle.uid}
    assert tmp_path.stat().st_uid == owner
