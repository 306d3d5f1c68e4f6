"""Workspaces that outlive runs, on the real `local` provider: made, used, stopped, expired and removed."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from msgspec.structs import replace

from runner.artifacts.run_lock import try_lock
from runner.cli.streams import descriptor_streams
from runner.core import errors
from runner.core.model import CommandHolder, Handle, Limits
from runner.core.model import WorkspaceStatus as S
from runner.core.settings import Settings
from runner.events import events as ev
from runner.lifecycle.lease import REFRESH
from runner.ops.host.state import see_clock
from runner.ops.runs.gc import collect
from runner.ops.workspaces import workspaces as ws
from runner.ops.workspaces.exec import CommandCancellation, execute
from runner.ops.workspaces.leases import break_lease, lease_of, list_leases, release
from runner.ops.workspaces.maintenance import complete_changes, reap, reaping, sweep, unsteady
from runner.ops.workspaces.workspace_lease import HeldWorkspace, WorkspaceEnv, hold, open_workspace_env
from runner.ops.workspaces.workspaces import WorkspaceOptions
from runner.ports.provider import Provider, SandboxSpec
from runner.ports.store import ProjectRow, Store, WorkspaceRow
from tests.support.folder_contents import everything, folder, put
from tests.support.situations import git, leftovers

DAY = 86_400
SECOND = 1_000_000


@dataclass
class House:
    """A ``RUNNER_HOME``, and a directory of its user's."""

    home: Path
    theirs: Path
    advice: list[str] = field(default_factory=list)

    @property
    def settings(self) -> Settings:
        return Settings.from_env({"RUNNER_HOME": str(self.home / "state"), "PATH": os.environ["PATH"]})

    def open(self, **more: str) -> AbstractAsyncContextManager[WorkspaceEnv]:
        env = {"RUNNER_HOME": str(self.home / "state"), "PATH": os.environ["PATH"], **more}
        return open_workspace_env(Settings.from_env(env), lambda advice: self.advice.append(advice.code))

    def another(self) -> House:
        return House(self.home.with_name("other"), self.theirs)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path / "home", tmp_path / "theirs")
    put(made.theirs / "kept", "theirs\n")
    yield made
    async with made.open() as env:
        for row in await env.store.workspaces():
            await ws.destroy(env, row.id, discard=True)
        assert await env.store.leases() == []
    assert leftovers(made.home) == []
    assert list((made.home / "state" / "workspaces").glob("*")) == []


@pytest.fixture
async def env(house: House) -> AsyncIterator[WorkspaceEnv]:
    async with house.open() as opened:
        yield opened


@pytest.fixture
async def row(env: WorkspaceEnv) -> WorkspaceRow:
    """An empty workspace."""
    return await ws.create(env, WorkspaceOptions())


async def inside(env: WorkspaceEnv, row: WorkspaceRow, *argv: str, stdin: bytes = b"") -> tuple[int, bytes]:
    """A command in a workspace: its exit code, and what it printed."""
    scratch = env.settings.home.parent
    (scratch / "stdin").write_bytes(stdin)
    with open(scratch / "stdin", "rb") as reading, open(scratch / "stdout", "wb") as writing:
        streams = descriptor_streams(reading.fileno(), writing.fileno(), writing.fileno())
        code = await execute(env, row.id, argv, streams, CommandCancellation())
    return code, (scratch / "stdout").read_bytes()


async def dead_holder(env: WorkspaceEnv, row: WorkspaceRow, command: str = "exec") -> HeldWorkspace:
    """One whose lease nobody keeps any more."""
    dead = HeldWorkspace(env, row, command)
    await dead.lease_holder.acquire(dead.write)
    return dead


async def shell(env: WorkspaceEnv, row: WorkspaceRow, script: str) -> tuple[int, bytes]:
    return await inside(env, row, "sh", "-c", f"exec 2>&1; {script}")


async def events(env: WorkspaceEnv, row: WorkspaceRow) -> list[ev.Event]:
    return [recorded.event for recorded in await env.store.workspace_events(row.id)]


def statuses(history: Sequence[ev.Event]) -> list[S]:
    return [event.status for event in history if isinstance(event, ev.WorkspaceStatusChanged)]


# --- making ---


async def test_a_workspace_is_made_empty_and_used(env: WorkspaceEnv, row: WorkspaceRow) -> None:
    assert (row.status, row.provider, row.persistent) == (S.READY, "local", False)
    if row.limits is not None:  # an ordinary user's are not kept, which is said
        assert (row.limits.cpus or 2, row.limits.memory_bytes or 4 << 30) == (2, 4 << 30)
    assert row.expires == pytest.approx(row.created + 30 * DAY * SECOND)
    assert await shell(env, row, "pwd; ls -A; git status --short") == (0, b"/workspace\n.git\n")
    assert statuses(await events(env, row)) == [S.PROVISIONING, S.READY]


@pytest.mark.scenario("WSM-01")
async def test_a_directory_that_is_no_repository_becomes_one_in_place(env: WorkspaceEnv, house: House) -> None:
    (house.theirs / "kept").chmod(0o640)
    before = everything(house.theirs)

    row = await ws.create(env, WorkspaceOptions(path=house.theirs))

    assert everything(house.theirs, without=(".git",)) == before
    assert git(house.theirs, "status", "--short") == "?? kept"
    assert {path.stat().st_uid for path in house.theirs.rglob("*")} == {house.theirs.stat().st_uid}
    assert row.base is None
    assert await shell(env, row, "cat kept; echo more > made") == (0, b"theirs\n")
    assert (house.theirs / "made").stat().st_uid == house.theirs.stat().st_uid


@pytest.mark.scenario("WSM-02")
async def test_the_history_of_a_repository_that_is_adopted_is_left_alone(env: WorkspaceEnv, house: House) -> None:
    git(house.theirs, "init", "-q", "-b", "trunk")
    git(house.theirs, "add", "-A")
    git(house.theirs, "commit", "-qm", "first")
    before = everything(house.theirs)

    row = await ws.create(env, WorkspaceOptions(path=house.theirs))
    code, said = await shell(
        env,
        row,
        "git log --oneline | wc -l; echo x > .git/config; rm -rf .git; mv .git away; git commit --allow-empty -m x",
    )

    assert row.base == git(house.theirs, "rev-parse", "HEAD")
    assert code != 0
    assert said.startswith(b"1\n")
    assert everything(house.theirs) == before


@pytest.mark.scenario("WSM-27")
async def test_what_cannot_be_adopted_is_refused_before_anything_is_made(env: WorkspaceEnv, house: House) -> None:
    state = env.settings.home
    (house.theirs / "src").mkdir()
    (house.theirs / "link").symlink_to(house.theirs)
    await ws.create(env, WorkspaceOptions(path=house.theirs / "link"))
    inner = folder(house.theirs.with_name("repo"))
    git(inner, "init", "-q")
    (inner / "sub").mkdir()
    git(inner.parent, "init", "-q", "--bare", "bare.git")
    refused = {
        house.theirs: "is a workspace",
        house.theirs / "src": "is a workspace",
        house.theirs.parent: "RUNNER_HOME",
        state: "RUNNER_HOME",
        house.theirs / "kept": "not a directory",
        house.theirs / "gone": "does not exist",
        inner / "sub": "part of the repository",
        inner.parent / "bare.git": "bare repository",
    }
    for path, words in refused.items():
        with pytest.raises(errors.BadDirectory, match=words):
            await ws.create(env, WorkspaceOptions(path=path))

    assert len(await env.store.workspaces()) == 1
    assert not (house.theirs / "src" / ".git").exists()


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_directory_is_known_by_what_it_is_and_not_by_its_name(
    env: WorkspaceEnv, house: House, replaced: bool
) -> None:
    row = await ws.create(env, WorkspaceOptions(path=house.theirs))
    moved = house.theirs.rename(house.theirs.with_name("moved"))
    if replaced:
        house.theirs.mkdir()
        (house.theirs / "another").touch()

    for use in (shell(env, row, "touch made"), ws.stop(env, row.id)):
        with pytest.raises(errors.WorkspaceLost, match="not the directory that was adopted"):
            await use
    await ws.delete(env, row.id)

    assert sorted(os.listdir(moved)) == [".git", "kept"]
    assert not replaced or os.listdir(house.theirs) == ["another"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (WorkspaceOptions(path=Path("/x"), url="https://host/repo"), errors.UsageError),
        (WorkspaceOptions(branch="main"), errors.UsageError),
        (WorkspaceOptions(project="unknown"), errors.UnknownProject),
        (WorkspaceOptions(provider="fake"), errors.UnknownPlugin),
    ],
)
async def test_a_wish_that_makes_no_sense_makes_nothing(
    env: WorkspaceEnv, options: WorkspaceOptions, error: type[errors.RunnerError]
) -> None:
    with pytest.raises(error):
        await ws.create(env, options)

    assert await env.store.workspaces() == []


async def test_a_directory_is_never_given_to_a_provider_that_cannot_protect_its_git(
    env: WorkspaceEnv, house: House
) -> None:
    with pytest.raises(errors.ProviderUnavailable, match="from changing"):
        await ws.create(env, WorkspaceOptions(path=house.theirs, provider="process"))

    assert not (house.theirs / ".git").exists()


@pytest.mark.scenario("ISO-06")
async def test_a_workspace_of_an_isolated_project_gets_its_agents_file_and_protected_paths(
    env: WorkspaceEnv, house: House
) -> None:
    (house.theirs / "AGENTS.md").write_text("be kind\n")
    await env.store.put_project(
        ProjectRow(
            name="shop", root=str(house.theirs), workspace_isolation=True, protected_paths=(".runner/", "AGENTS.md")
        )
    )

    row = await ws.create(env, WorkspaceOptions(project="shop"))

    _, said = await shell(env, row, "cat AGENTS.md; mkdir .runner/x || echo no > AGENTS.md || ls ..")
    assert said.startswith(b"be kind\n")
    assert said.count(b"Read-only file system") == 2, said
    assert b"workspaces" not in said
    removed = await ws.destroy(env, row.id)
    assert (removed.saved, removed.saved_work and removed.saved_work.changed) == (None, 0), "the copy is nobody's work"


@pytest.mark.scenario("ISO-08")
async def test_a_workspace_that_begins_with_an_agents_file_keeps_it(env: WorkspaceEnv, house: House) -> None:
    (house.theirs / "AGENTS.md").write_text("be kind\n")
    await env.store.put_project(
        ProjectRow(name="shop", root=str(house.theirs), workspace_isolation=True, protected_paths=())
    )
    own = folder(house.theirs / "own")
    (own / "AGENTS.md").write_text("be quick\n")

    row = await ws.create(env, WorkspaceOptions(path=own, project="shop"))

    assert await shell(env, row, "cat AGENTS.md") == (0, b"be quick\n")


@pytest.mark.scenario("ISO-13", only="local")
async def test_a_workspace_of_a_shared_project_sees_the_project(env: WorkspaceEnv, house: House) -> None:
    (house.theirs / "AGENTS.md").write_text("be kind\n")
    await env.store.put_project(
        ProjectRow(name="shop", root=str(house.theirs), workspace_isolation=False, protected_paths=("AGENTS.md",))
    )

    row = await ws.create(env, WorkspaceOptions(project="shop"))

    assert await shell(env, row, "pwd; cat /workspace/AGENTS.md; echo own | tee /workspace/AGENTS.md > AGENTS.md") == (
        0,
        f"/workspace/workspaces/{row.id}\nbe kind\n".encode(),
    )


@pytest.mark.scenario("LIF-05")
async def test_no_more_workspaces_are_made_than_there_may_be(house: House) -> None:
    """Those that nobody uses are named, the one that is idle for longest first; of two at once, one is made."""
    async with house.open(WORKSPACE_MAX="3") as env:
        first, second = (
            await ws.create(env, WorkspaceOptions()),
            await ws.create(env, WorkspaceOptions(persistent=True)),
        )
        await shell(env, first, "true")
        refused: list[errors.WorkspaceLimit] = []

        async def another() -> None:
            try:
                await ws.create(env, WorkspaceOptions())
            except errors.WorkspaceLimit as error:
                refused.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(another)
            nursery.start_soon(another)
        with pytest.raises(errors.WorkspaceLimit, match="`WORKSPACE_MAX` is 3") as over:
            await ws.create(env, WorkspaceOptions())

        assert (len(refused), len(await env.store.workspaces())) == (1, 3)
        assert f"longest idle first: {second.id}, {first.id}, " in str(over.value.hint)
        assert "set `WORKSPACE_MAX` higher" in str(over.value.hint)
        await ws.destroy(env, second.id)
        await ws.create(env, WorkspaceOptions())


# --- finding ---


@pytest.mark.scenario("WSM-04")
async def test_a_workspace_is_found_by_its_id_and_by_a_path_in_it(env: WorkspaceEnv, house: House) -> None:
    empty, adopted = await ws.create(env, WorkspaceOptions()), await ws.create(env, WorkspaceOptions(path=house.theirs))
    (house.theirs.parent / "link").symlink_to(house.theirs)
    settings = env.settings

    assert await env.store.workspace(empty.id[:8]) == empty
    for path in (house.theirs, house.theirs / "kept", house.theirs.parent / "link" / "kept" / "nothing"):
        assert (await ws.find_by_path(settings, path)).row == adopted
    assert (await ws.find_by_path(settings, ws.tree_of(settings, empty) / "deep" / "down")).row == empty
    with pytest.raises(errors.UnknownWorkspace):
        await ws.find_by_path(settings, house.theirs.parent)
    with pytest.raises(errors.UnknownWorkspace):
        await env.store.workspace("nothing")
    with pytest.raises(errors.UnknownWorkspace):
        await env.store.workspace("")


@pytest.mark.scenario("WSM-06")
@pytest.mark.parametrize("persistent", [False, True])
async def test_workspaces_survive_a_restart(house: House, persistent: bool) -> None:
    async with house.open() as env:
        row = await ws.create(env, WorkspaceOptions(persistent=persistent))
        await shell(env, row, "echo work > made")
    async with house.open() as env:
        assert [(found.id, found.status) for found in await env.store.workspaces()] == [(row.id, S.READY)]
        assert await shell(env, row, "cat made") == (0, b"work\n")


# --- commands ---


async def test_a_command_has_the_callers_streams_and_status(env: WorkspaceEnv, row: WorkspaceRow) -> None:
    content = os.urandom(3 << 20)

    assert await inside(env, row, "cat", stdin=content) == (0, content)
    assert await shell(env, row, "exit 7") == (7, b"")
    assert await shell(env, row, "kill -9 $$") == (137, b"")
    assert (await inside(env, row, "no-such-command"))[0] == 127
    assert await inside(env, row, "true", stdin=content) == (0, b"")


@pytest.mark.scenario("LIF-15", only="local")
async def test_each_command_moves_the_end_of_a_workspace(env: WorkspaceEnv, row: WorkspaceRow) -> None:
    await shell(env, row, "true")

    used = await env.store.workspace(row.id)

    assert used.used > row.used
    assert used.expires == used.used + 30 * DAY * SECOND


@pytest.mark.scenario("WSM-20")
async def test_files_that_policy_forbids_are_named_before_the_lease(env: WorkspaceEnv, row: WorkspaceRow) -> None:
    tree = ws.tree_of(env.settings, row)
    (tree / "link").symlink_to("/usr")
    (tree / ".env").write_text("KEY=1")

    with pytest.raises(errors.ForbiddenFiles, match=r"\.env: forbidden:\*\*/\.env"):
        await shell(env, row, "true")

    assert (await env.store.lease(row.id)).fence == 1, "it was made with the first, and there was no other"
    (tree / ".env").unlink()
    assert (await shell(env, row, "true"))[0] == 0, "a link out of the tree does no harm in a sandbox"


@pytest.mark.scenario("WSM-18")
async def test_the_policy_of_the_base_commit_holds_and_not_that_of_the_work_tree(
    env: WorkspaceEnv, house: House
) -> None:
    put(house.theirs / ".agentgate" / "policy.yaml", 'forbiddenPatterns: ["**/*.pem"]\n')
    git(house.theirs, "init", "-q")
    git(house.theirs, "add", "-A")
    git(house.theirs, "commit", "-qm", "first")
    row = await ws.create(env, WorkspaceOptions(path=house.theirs))
    (house.theirs / ".env").write_text("KEY=1")
    (house.theirs / ".agentgate" / "policy.yaml").write_text("forbiddenPatterns: []\n")

    assert (await shell(env, row, "true"))[0] == 0
    (house.theirs / "key.pem").touch()
    with pytest.raises(errors.ForbiddenFiles, match=r"key\.pem"):
        await shell(env, row, "true")


# --- leases ---


@pytest.mark.scenario("WSM-08")
@pytest.mark.scenario("WSM-10")
@pytest.mark.scenario("WSM-14")
async def test_who_has_a_workspace_is_shown_and_nobody_else_can_write(env: WorkspaceEnv, row: WorkspaceRow) -> None:
    async with hold(env, row, "exec"):
        lease = await lease_of(env, row.id)
        assert [lease] == await list_leases(env)
        assert (lease.workspace, lease.holder, lease.state) == (row.id, f"exec {os.getpid()}", "live")
        assert (lease.refreshed, lease.expires) == (lease.acquired, lease.acquired + 3_600 * SECOND)
        for verb in (ws.stop, ws.destroy, ws.delete, release):
            with pytest.raises(errors.LeaseHeld, match=lease.holder):
                await verb(env, row.id)
        with pytest.raises(errors.LeaseHeld):
            await shell(env, row, "true")
        assert (await env.store.workspace(row.id)).status is S.READY

    assert await lease_of(env, row.id) is None
    assert await release(env, row.id) == f"workspace {row.id} is free"
    assert (await shell(env, row, "true"))[0] == 0


@pytest.mark.scenario("WSM-12")
async def test_a_command_that_takes_long_refreshes_its_lease(
    env: WorkspaceEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert REFRESH == 5 * 60
    monkeypatch.setattr("runner.runtime.lease_holder.REFRESH", 0.2)
    row = await ws.create(env, WorkspaceOptions())

    assert (await shell(env, row, "sleep 2"))[0] == 0

    assert len([event for event in await events(env, row) if isinstance(event, ev.LeaseRefreshed)]) >= 2


@pytest.mark.scenario("WSM-11")
async def test_the_lease_of_a_dead_holder_is_taken_over_with_a_warning(env: WorkspaceEnv, house: House) -> None:
    """Its lock is free, so nobody has to wait until its time is over."""
    row = await ws.create(env, WorkspaceOptions())
    await dead_holder(env, row)
    lease = await lease_of(env, row.id)
    assert lease.state == "dead"

    assert (await shell(env, row, "true"))[0] == 0

    assert house.advice == ["lease.taken-over"]
    assert any(getattr(event, "code", "") == "lease.taken-over" for event in await events(env, row))


async def test_what_a_dead_holder_ran_has_ended_when_nobody_hears_of_the_takeover(env: WorkspaceEnv) -> None:
    """The reader of what is said may have gone: then nothing goes on, and the lease of the dead is no more."""

    def unheard(advice: errors.RunnerError) -> None:
        raise BrokenPipeError

    row = await ws.create(env, WorkspaceOptions())
    await dead_holder(env, row)
    provider, handle = await env.find(row)
    assert handle is not None

    async def unheard_of() -> None:
        async with provider.open(handle, SandboxSpec()) as left:
            with pytest.raises(BrokenPipeError):
                await shell(replace(env, advise=unheard), row, "true")
            await left.run(["true"])

    with pytest.raises(errors.WorkspaceLost):
        await unheard_of()


async def test_releasing_ends_a_dead_lease_and_breaking_a_live_one(env: WorkspaceEnv, row: WorkspaceRow) -> None:
    await dead_holder(env, row)
    assert f"`exec {os.getpid()}` had it" in await release(env, row.id)
    with pytest.raises(errors.WorkspaceState, match="nothing to break"):
        await break_lease(env, row.id, sure=True)

    async def broken() -> None:
        async with hold(env, row, "exec") as held:
            with pytest.raises(errors.UsageError, match="kills all"):
                await break_lease(env, row.id, sure=False)
            await break_lease(env, row.id, sure=True)
            assert await lease_of(env, row.id) is None
            async with hold(env, row, "another"):
                pass
            await held.write(ev.WorkspaceStatusChanged(S.STOPPING))

    with pytest.raises(errors.LeaseLost):
        await broken()

    assert (await env.store.workspace(row.id)).status is S.READY


async def test_only_the_process_that_holds_the_lock_is_asked_to_end(env: WorkspaceEnv, row: WorkspaceRow) -> None:
    """The number in a lease may be that of another process by now."""
    lock = try_lock(env.lock(row.id))
    async with trio.open_nursery() as nursery:
        other: trio.Process = await nursery.start(trio.run_process, ["sleep", "100"])
        another = HeldWorkspace(env, row, "exec")
        another.lease_holder.holder = CommandHolder("exec", other.pid)
        await another.lease_holder.acquire(another.write)

        with pytest.raises(errors.LeaseHeld):
            await ws.destroy(env, row.id)

        await trio.sleep(0.05)
        assert other.poll() is None
        nursery.cancel_scope.cancel()
    os.close(lock)
    assert (await env.store.workspace(row.id)).status is S.READY


async def test_a_directory_that_another_store_uses_is_refused(env: WorkspaceEnv, house: House) -> None:
    row = await ws.create(env, WorkspaceOptions(path=house.theirs))
    async with house.another().open() as others:
        theirs = await ws.create(others, WorkspaceOptions(path=house.theirs))
        async with hold(env, row, "exec"):
            with pytest.raises(errors.LeaseHeld, match="another process"):
                await shell(others, theirs, "true")
            assert (await others.store.lease(theirs.id)).id == ""
        assert (await shell(others, theirs, "true"))[0] == 0
        await ws.destroy(others, theirs.id)


# --- stopping ---


@pytest.mark.scenario("LIF-11", only="local")
@pytest.mark.scenario("LIF-12", only="local")
async def test_a_stopped_workspace_keeps_its_files_until_it_is_resumed(env: WorkspaceEnv, row: WorkspaceRow) -> None:
    await shell(env, row, "echo work > made")
    used = await env.store.workspace(row.id)
    stopped = await ws.stop(env, row.id)

    assert stopped.status is S.STOPPED
    assert stopped.used > used.used > row.used
    assert await ws.stop(env, row.id) == stopped
    with pytest.raises(errors.WorkspaceState) as refused:
        await shell(env, row, "true")
    assert "workspace resume" in str(refused.value.hint)
    assert (await ws.resume(env, row.id)).status is S.READY
    assert (await ws.resume(env, row.id)).status is S.READY
    assert await shell(env, row, "cat made") == (0, b"work\n")


# --- removing ---


@pytest.mark.scenario("WSM-05")
async def test_deleting_an_adopted_directory_forgets_it_and_leaves_every_file(env: WorkspaceEnv, house: House) -> None:
    row = await ws.create(env, WorkspaceOptions(path=house.theirs))
    await shell(env, row, "echo work > made")
    before = everything(house.theirs)
    async with hold(env, row, "exec"):
        with pytest.raises(errors.LeaseHeld):
            await ws.delete(env, row.id)

    removed = await ws.delete(env, row.id)

    assert removed.tree == str(house.theirs)
    assert everything(house.theirs) == before
    assert await env.store.workspaces() == []
    with pytest.raises(errors.UnknownWorkspace):
        await ws.delete(env, row.id)
    await ws.create(env, WorkspaceOptions(path=house.theirs))


@pytest.mark.scenario("BEY-08")
@pytest.mark.scenario("LIF-08", only="local")
@pytest.mark.scenario("LIF-10", only="local")
@pytest.mark.parametrize("stopped", [False, True])
async def test_work_is_saved_before_a_workspace_is_destroyed(env: WorkspaceEnv, stopped: bool) -> None:
    row = await ws.create(env, WorkspaceOptions())
    await shell(env, row, "echo work > made; printf '\\377\\000' > binary; mkdir -p a/b; ln -s made a/b/link")
    if stopped:
        await ws.stop(env, row.id)

    removed = await ws.destroy(env, row.id)

    assert removed.saved == env.settings.home / "saved" / row.id
    assert removed.saved_work.changed == 3
    again = folder(env.settings.home.parent / "again")
    git(again, "init", "-q")
    git(again, "apply", str(removed.saved / "work.patch"))
    assert (again / "made").read_text() == "work\n"
    assert (again / "binary").read_bytes() == b"\xff\0"
    names = git(removed.saved / "snapshot.git", "ls-tree", "-r", "--name-only", str(removed.saved_work.commit)).split()
    assert names == ["a/b/link", "binary", "made"]
    history = await events(env, row)
    kinds = [
        type(event) if isinstance(event, ev.WorkspaceSaved) else getattr(event, "status", None) for event in history
    ]
    assert kinds.index(S.DESTROYING) < kinds.index(ev.WorkspaceSaved) < kinds.index(S.DESTROYED)
    with pytest.raises(errors.UnknownWorkspace):
        await ws.destroy(env, row.id)


@pytest.mark.scenario("BEY-08")
async def test_work_that_cannot_be_saved_is_not_destroyed(env: WorkspaceEnv, row: WorkspaceRow) -> None:
    await shell(env, row, "echo KEY=1 > .env; mkfifo pipe")
    for verb in (ws.delete, ws.destroy):
        with pytest.raises(errors.UnsavedWork, match=r"\.env.*pipe"):
            await verb(env, row.id)
    assert (await env.store.workspace(row.id)).status is S.READY
    assert ws.tree_of(env.settings, row).joinpath(".env").exists()

    removed = await ws.destroy(env, row.id, discard=True)

    assert (removed.saved, removed.saved_work) == (None, None)
    assert ev.UnsavedWorkDiscarded() in await events(env, row)
    assert not (env.settings.home / "saved").exists()


async def test_unsaved_work_is_swept_only_by_who_gives_it_up(env: WorkspaceEnv, row: WorkspaceRow) -> None:
    await shell(env, row, "echo work > made")
    with pytest.raises(errors.UnsavedWork, match="1 changed file"):
        await ws.delete(env, row.id)

    await ws.delete(env, row.id, discard=True)

    assert await env.store.workspaces() == []
    assert not (env.settings.home / "saved").exists()


# --- what was cut off ---


@pytest.mark.scenario("LIF-08", only="local")
async def test_destroying_finishes_what_was_cut_off(env: WorkspaceEnv, row: WorkspaceRow) -> None:
    await shell(env, row, "echo work > made")
    dead = await dead_holder(env, row, "destroy")
    await dead.write(ev.WorkspaceStatusChanged(S.DESTROYING))

    removed = await ws.destroy(env, row.id)

    assert removed.saved_work.changed == 1


async def test_recovering_finishes_what_the_dead_have_begun(env: WorkspaceEnv, house: House) -> None:
    making = WorkspaceRow(id="4f2a-half-made", provider="local", status=S.CREATING, created=0, used=0)
    requested = ev.WorkspaceRequested(
        provider="local", project="default", persistent=False, limits=Limits(), ttl_seconds=30.0
    )
    half = HeldWorkspace(env, making, "create")
    await half.write(requested)
    await half.lease_holder.acquire(half.write)
    stopping, destroying, used = [await ws.create(env, WorkspaceOptions()) for _ in range(3)]
    await shell(env, destroying, "echo work > made")
    for row, status in ((stopping, S.STOPPING), (destroying, S.DESTROYING)):
        dead = await dead_holder(env, row, "died")
        await dead.write(ev.WorkspaceStatusChanged(status))
    dead = await dead_holder(env, used)
    (env.settings.home / "workspaces" / "of-nobody").mkdir()

    assert len(await complete_changes(env, dry_run=True)) == 4
    async with hold(env, used, "exec"):
        assert len(await complete_changes(env, dry_run=True)) == 3, "what somebody has is not touched"
    await dead_holder(env, used)
    done = {one.workspace: one for one in await complete_changes(env, dry_run=False)}

    assert {one.left for one in done.values()} == {None}
    assert done[making.id].done == "was left creating, and is gone now"
    assert done[stopping.id].done == "was left stopping, and is stopped now"
    assert done[destroying.id].saved is not None
    assert done[used.id].done == "was left ready, and is ready now"
    assert {row.id for row in await env.store.workspaces()} == {stopping.id, used.id}
    assert await env.store.leases() == []
    assert await complete_changes(env, dry_run=False) == []
    assert [Path(path).name for path in await sweep(env, dry_run=False)] == ["of-nobody"]


async def test_a_workspace_that_cannot_be_made_leaves_nothing(env: WorkspaceEnv, house: House) -> None:
    """The directory is one of root's that others can enter, or of another user."""
    with pytest.raises(errors.ProviderFailed):
        await ws.create(env, WorkspaceOptions(path=Path("/usr/share/misc")))

    assert await env.store.workspaces() == []
    assert await env.store.leases() == []
    assert not Path("/usr/share/misc/.git").exists()


# --- what has had its time ---


def later(env: WorkspaceEnv, seconds: float) -> WorkspaceEnv:
    """The same env, when its store's clock shows a later time."""
    return replace(env, store=cast(Any, Later(env.store, round(seconds * SECOND))))


class Later:
    def __init__(self, store: Store, microseconds: int) -> None:
        self._store, self._more = store, microseconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def now(self) -> int:
        return await self._store.now() + self._more


@pytest.mark.scenario("LIF-13")
async def test_expired_workspaces_are_saved_and_removed_and_those_in_use_are_not(
    env: WorkspaceEnv, house: House
) -> None:
    idle, used, stopped, forever = [await ws.create(env, WorkspaceOptions(persistent=n == 3)) for n in range(4)]
    adopted = await ws.create(env, WorkspaceOptions(path=house.theirs))
    await shell(env, idle, "echo work > made")
    await ws.stop(env, stopped.id)
    then = later(env, 31 * DAY)
    assert await reap(env, dry_run=False) == []
    assert len(await reap(then, dry_run=True)) == 4

    async with hold(env, used, "exec"):
        reaped = {one.workspace: one for one in await reap(then, dry_run=False)}

    assert {id for id, one in reaped.items() if one.left is None} == {idle.id, stopped.id, adopted.id}
    assert reaped[idle.id].saved == env.settings.home / "saved" / idle.id
    assert reaped[used.id].in_use
    assert {row.id for row in await env.store.workspaces()} == {used.id, forever.id}
    assert (house.theirs / "kept").exists()
    assert ev.WorkspaceStatusChanged(S.DESTROYING, "its time was over") in await events(env, idle)


@pytest.mark.scenario("LIF-13")
async def test_work_waits_a_second_for_what_is_removed_and_the_next_who_comes_finishes_it(house: House) -> None:
    class Slow:
        def __init__(self, provider: Provider) -> None:
            self._provider = provider

        def __getattr__(self, name: str) -> Any:
            return getattr(self._provider, name)

        async def destroy(self, handle: Handle) -> None:
            await trio.sleep_forever()

    async with house.open(WORKSPACE_TTL="1s") as env:
        row = await ws.create(env, WorkspaceOptions())
        await shell(env, row, "echo work > made")
        await trio.sleep(1.1)
        deps = env.deps
        slow = replace(env, deps=replace(deps, provider=lambda name: cast(Any, Slow(deps.provider(name)))))

        moments = [trio.current_time()]
        async with reaping(slow):
            moments.append(trio.current_time())
        moments.append(trio.current_time())

        assert 1 <= moments[1] - moments[0] < 5
        assert moments[2] - moments[1] < 4
        assert (await env.store.workspace(row.id)).status is S.DESTROYING
        with trio.fail_after(60):
            while await env.store.workspaces():  # a busy machine may need more than one bounded second
                async with reaping(env):
                    pass
        assert house.advice == ["workspace.expired"]
        assert "+work" in (env.settings.home / "saved" / row.id / "work.patch").read_text()


@pytest.mark.parametrize("adopted", [False, True], ids=["own", "in place"])
async def test_a_clock_that_jumps_takes_no_workspace_from_who_works_in_it(
    house: House, monkeypatch: pytest.MonkeyPatch, adopted: bool
) -> None:
    """By that clock his lease has expired long ago. The first look ever sees the jump; the second is asked for."""
    async with house.open() as env:
        row = await ws.create(env, WorkspaceOptions(path=house.theirs if adopted else None))
        async with hold(env, row, "exec") as held:
            real = time.time_ns
            monkeypatch.setattr(time, "time_ns", lambda: real() + 40 * DAY * 10**9)
            before = await env.store.lease(row.id)
            assert not before.live(await env.store.now())

            first, second = await collect(house.settings, dry_run=False), await collect(house.settings, dry_run=False)
            async with house.open() as others:
                for verb in (ws.destroy, ws.delete, ws.stop, release):
                    with pytest.raises(errors.LeaseHeld):
                        await verb(others, row.id)
                assert await complete_changes(others, dry_run=False) == []

            assert "forward by 3,456,000 s" in str(first.clock)
            assert second.clock is None
            assert [one.in_use for one in second.reaped] == [True]
            assert (await env.store.lease(row.id)).id == before.id
            await held.write(ev.WorkspaceUsed(3_600.0, None))
            await held.lease_holder.refresh(held.write)
            assert (await env.store.lease(row.id)).live(await env.store.now())
        monkeypatch.setattr(time, "time_ns", real)
        assert (await env.store.workspace(row.id)).status is S.READY
        assert (await env.store.lease(row.id)).id == ""


async def test_a_greatest_age_ends_what_is_used_all_the_time(house: House) -> None:
    async with house.open() as env:
        row, forever = await ws.create(env, WorkspaceOptions()), await ws.create(env, WorkspaceOptions(persistent=True))
    async with house.open(WORKSPACE_MAX_AGE="10d") as env:
        assert await reap(later(env, 9 * DAY), dry_run=True) == []
        (reaped,) = await reap(later(env, 11 * DAY), dry_run=True)
        await shell(env, row, "true")
        used, kept = await env.store.workspace(row.id), await env.store.workspace(forever.id)

    assert reaped.workspace == row.id
    assert used.expires == row.created + 10 * DAY * SECOND
    assert kept.expires is None


async def test_expired_work_that_cannot_be_saved_stays(env: WorkspaceEnv, row: WorkspaceRow) -> None:
    await shell(env, row, "echo KEY=1 > .env")

    (reaped,) = await reap(later(env, 31 * DAY), dry_run=False)

    assert (reaped.in_use, ".env" in str(reaped.left)) == (False, True)
    assert await env.store.workspaces() == [await env.store.workspace(row.id)]


async def test_nothing_is_removed_right_after_the_clock_was_set(house: House) -> None:
    async with house.open(WORKSPACE_TTL="1s") as env:
        row = await ws.create(env, WorkspaceOptions())
        assert await unsteady(env, dry_run=False) is None
        anchor = see_clock(await env.store.now())
        await env.store.set_anchor(replace(anchor, offset=anchor.offset - 3_600 * SECOND))
        assert "forward by 3,600 s" in str(await unsteady(env, dry_run=True))

    settings = env.settings
    collection = await collect(settings, dry_run=False)
    assert "forward by 3,600 s" in str(collection.clock)
    assert collection.clean
    collection = await collect(settings, dry_run=True)

    assert collection.clock is None
    assert row.id in {one.row.id for one in await ws.list_workspaces(settings)}


async def test_what_belongs_to_no_run_is_not_collected_for_its_age(house: House) -> None:
    """Its tree is old, and its id is none of a run's."""
    async with house.open(WORKSPACE_TTL="1000d", RUN_RETENTION="1s") as env:
        row = await ws.create(env, WorkspaceOptions(persistent=True))
        os.utime(ws.tree_of(env.settings, row), (0, 0))

        collection = await collect(env.settings, dry_run=False)

        assert (collection.found, collection.reaped) == ((), ())
        assert (await shell(env, row, "true"))[0] == 0
