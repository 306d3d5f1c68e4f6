"""Workspaces that outlive runs, on the real `local` provider: made, used, stopped, expired and removed."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from runner.artifacts.run_lock import take
from runner.core.errors import (
    BadDirectory,
    ForbiddenFiles,
    LeaseHeld,
    LeaseLost,
    ProviderFailed,
    ProviderUnavailable,
    RunnerError,
    UnknownPlugin,
    UnknownProject,
    UnknownWorkspace,
    UnsavedWork,
    UsageError,
    WorkspaceLimit,
    WorkspaceLost,
    WorkspaceState,
)
from runner.core.model import Handle, Limits
from runner.core.model import WorkspaceStatus as S
from runner.core.settings import Settings
from runner.events.events import (
    Event,
    LeaseRefreshed,
    UnsavedWorkDiscarded,
    WorkspaceRequested,
    WorkspaceSaved,
    WorkspaceStatusChanged,
    WorkspaceUsed,
)
from runner.lifecycle.lease import REFRESH
from runner.ops.host.state import see_clock
from runner.ops.runs.gc import collect
from runner.ops.workspaces import workspaces as ws
from runner.ops.workspaces.exec import execute
from runner.ops.workspaces.leases import break_lease, lease_of, list_leases, release
from runner.ops.workspaces.maintenance import finish_all, reap, reaping, sweep, unsteady
from runner.ops.workspaces.workspace_lease import Premises, Tenancy, occupy, open_premises
from runner.ops.workspaces.workspaces import Wish
from runner.ports.provider import Provider, SandboxSpec
from runner.ports.store import ProjectRow, WorkspaceRow
from tests.support.folder_contents import everything
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

    def open(self, **more: str) -> AbstractAsyncContextManager[Premises]:
        env = {"RUNNER_HOME": str(self.home / "state"), "PATH": os.environ["PATH"], **more}
        return open_premises(Settings.from_env(env), lambda advice: self.advice.append(advice.code))

    def another(self) -> House:
        return House(self.home.with_name("other"), self.theirs)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path / "home", tmp_path / "theirs")
    made.theirs.mkdir()
    (made.theirs / "kept").write_text("theirs\n")
    yield made
    async with made.open() as premises:
        for row in await premises.store.workspaces():
            await ws.destroy(premises, row.id, discard=True)
        assert await premises.store.leases() == []
    assert leftovers(made.home) == []
    assert list((made.home / "state" / "workspaces").glob("*")) == []


@pytest.fixture
async def premises(house: House) -> AsyncIterator[Premises]:
    async with house.open() as opened:
        yield opened


async def inside(premises: Premises, row: WorkspaceRow, *argv: str, stdin: bytes = b"") -> tuple[int, bytes]:
    """A command in a workspace: its exit code, and what it printed."""
    scratch = premises.settings.home.parent
    (scratch / "stdin").write_bytes(stdin)
    with open(scratch / "stdin", "rb") as reading, open(scratch / "stdout", "wb") as writing:
        code = await execute(premises, row.id, argv, (reading.fileno(), writing.fileno(), writing.fileno()))
    return code, (scratch / "stdout").read_bytes()


async def shell(premises: Premises, row: WorkspaceRow, script: str) -> tuple[int, bytes]:
    return await inside(premises, row, "sh", "-c", f"exec 2>&1; {script}")


async def events(premises: Premises, row: WorkspaceRow) -> list[Event]:
    return [recorded.event for recorded in await premises.store.workspace_events(row.id)]


def statuses(history: Sequence[Event]) -> list[S]:
    return [event.status for event in history if isinstance(event, WorkspaceStatusChanged)]


# --- making ---


async def test_a_workspace_is_made_empty_and_used(premises: Premises) -> None:
    row = await ws.create(premises, Wish())

    assert (row.status, row.provider, row.persistent) == (S.READY, "local", False)
    if row.limits is not None:  # an ordinary user's are not kept, which is said
        assert (row.limits.cpus or 2, row.limits.memory_bytes or 4 << 30) == (2, 4 << 30)
    assert row.expires == pytest.approx(row.created + 30 * DAY * SECOND)
    assert await shell(premises, row, "pwd; ls -A; git status --short") == (0, b"/workspace\n.git\n")
    assert statuses(await events(premises, row)) == [S.PROVISIONING, S.READY]


@pytest.mark.scenario("WSM-01")
async def test_a_directory_that_is_no_repository_becomes_one_in_place(premises: Premises, house: House) -> None:
    (house.theirs / "kept").chmod(0o640)
    before = everything(house.theirs)

    row = await ws.create(premises, Wish(path=house.theirs))

    assert everything(house.theirs, without=(".git",)) == before
    assert git(house.theirs, "status", "--short") == "?? kept"
    assert {path.stat().st_uid for path in house.theirs.rglob("*")} == {house.theirs.stat().st_uid}
    assert row.base is None
    assert await shell(premises, row, "cat kept; echo more > made") == (0, b"theirs\n")
    assert (house.theirs / "made").stat().st_uid == house.theirs.stat().st_uid


@pytest.mark.scenario("WSM-02")
async def test_the_history_of_a_repository_that_is_adopted_is_left_alone(premises: Premises, house: House) -> None:
    git(house.theirs, "init", "-q", "-b", "trunk")
    git(house.theirs, "add", "-A")
    git(house.theirs, "commit", "-qm", "first")
    before = everything(house.theirs)

    row = await ws.create(premises, Wish(path=house.theirs))
    code, said = await shell(
        premises,
        row,
        "git log --oneline | wc -l; echo x > .git/config; rm -rf .git; mv .git away; git commit --allow-empty -m x",
    )

    assert row.base == git(house.theirs, "rev-parse", "HEAD")
    assert code != 0
    assert said.startswith(b"1\n")
    assert everything(house.theirs) == before


async def test_what_cannot_be_adopted_is_refused_before_anything_is_made(premises: Premises, house: House) -> None:
    state = premises.settings.home
    (house.theirs / "src").mkdir()
    (house.theirs / "link").symlink_to(house.theirs)
    await ws.create(premises, Wish(path=house.theirs / "link"))
    inner = house.theirs.with_name("repo")
    inner.mkdir()
    git(inner, "init", "-q")
    (inner / "sub").mkdir()
    git(inner.parent, "init", "-q", "--bare", "bare.git")
    refused = {
        house.theirs: "is a workspace already",
        house.theirs / "src": "is a workspace already",
        house.theirs.parent: "RUNNER_HOME",
        state: "RUNNER_HOME",
        house.theirs / "kept": "not a directory",
        house.theirs / "gone": "does not exist",
        inner / "sub": "part of the repository",
        inner.parent / "bare.git": "bare repository",
    }
    for path, words in refused.items():
        with pytest.raises(BadDirectory, match=words):
            await ws.create(premises, Wish(path=path))

    assert len(await premises.store.workspaces()) == 1
    assert not (house.theirs / "src" / ".git").exists()


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_directory_is_known_by_what_it_is_and_not_by_its_name(
    premises: Premises, house: House, replaced: bool
) -> None:
    row = await ws.create(premises, Wish(path=house.theirs))
    moved = house.theirs.rename(house.theirs.with_name("moved"))
    if replaced:
        house.theirs.mkdir()
        (house.theirs / "another").touch()

    for use in (shell(premises, row, "touch made"), ws.stop(premises, row.id)):
        with pytest.raises(WorkspaceLost, match="not the directory that was adopted"):
            await use
    await ws.delete(premises, row.id)

    assert sorted(os.listdir(moved)) == [".git", "kept"]
    assert not replaced or os.listdir(house.theirs) == ["another"]


@pytest.mark.parametrize(
    ("wish", "error"),
    [
        (Wish(path=Path("/x"), url="https://host/repo"), UsageError),
        (Wish(branch="main"), UsageError),
        (Wish(project="unknown"), UnknownProject),
        (Wish(provider="fake"), UnknownPlugin),
    ],
)
async def test_a_wish_that_makes_no_sense_makes_nothing(
    premises: Premises, wish: Wish, error: type[RunnerError]
) -> None:
    with pytest.raises(error):
        await ws.create(premises, wish)

    assert await premises.store.workspaces() == []


async def test_a_directory_is_never_given_to_a_provider_that_cannot_protect_its_git(
    premises: Premises, house: House
) -> None:
    with pytest.raises(ProviderUnavailable, match="from changing"):
        await ws.create(premises, Wish(path=house.theirs, provider="process"))

    assert not (house.theirs / ".git").exists()


@pytest.mark.scenario("ISO-06")
async def test_a_workspace_of_an_isolated_project_gets_its_agents_file_and_protected_paths(
    premises: Premises, house: House
) -> None:
    (house.theirs / "AGENTS.md").write_text("be kind\n")
    await premises.store.put_project(ProjectRow("shop", str(house.theirs), True, (".runner/", "AGENTS.md")))

    row = await ws.create(premises, Wish(project="shop"))

    _, said = await shell(premises, row, "cat AGENTS.md; mkdir .runner/x || echo no > AGENTS.md || ls ..")
    assert said.startswith(b"be kind\n")
    assert said.count(b"Read-only file system") == 2, said
    assert b"workspaces" not in said
    removed = await ws.destroy(premises, row.id)
    assert (removed.saved, removed.saved_work and removed.saved_work.changed) == (None, 0), "the copy is nobody's work"


@pytest.mark.scenario("ISO-08")
async def test_a_workspace_that_begins_with_an_agents_file_keeps_it(premises: Premises, house: House) -> None:
    (house.theirs / "AGENTS.md").write_text("be kind\n")
    await premises.store.put_project(ProjectRow("shop", str(house.theirs), True, ()))
    own = house.theirs / "own"
    own.mkdir()
    (own / "AGENTS.md").write_text("be quick\n")

    row = await ws.create(premises, Wish(path=own, project="shop"))

    assert await shell(premises, row, "cat AGENTS.md") == (0, b"be quick\n")


async def test_a_workspace_of_a_shared_project_sees_the_project(premises: Premises, house: House) -> None:
    (house.theirs / "AGENTS.md").write_text("be kind\n")
    await premises.store.put_project(ProjectRow("shop", str(house.theirs), False, ("AGENTS.md",)))

    row = await ws.create(premises, Wish(project="shop"))

    assert await shell(premises, row, "pwd; cat /workspace/AGENTS.md; echo own > /workspace/AGENTS.md") == (
        0,
        f"/workspace/workspaces/{row.id}\nbe kind\n".encode(),
    )


@pytest.mark.scenario("LIF-05")
async def test_no_more_workspaces_are_made_than_there_may_be(house: House) -> None:
    """Those that nobody uses are named, the one that is idle for longest first; of two at once, one is made."""
    async with house.open(WORKSPACE_MAX="3") as premises:
        first, second = await ws.create(premises, Wish()), await ws.create(premises, Wish(persistent=True))
        await shell(premises, first, "true")
        refused: list[WorkspaceLimit] = []

        async def another() -> None:
            try:
                await ws.create(premises, Wish())
            except WorkspaceLimit as error:
                refused.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(another)
            nursery.start_soon(another)
        with pytest.raises(WorkspaceLimit, match="`WORKSPACE_MAX` is 3") as over:
            await ws.create(premises, Wish())

        assert (len(refused), len(await premises.store.workspaces())) == (1, 3)
        assert f"idle for longest: {second.id}, {first.id}, " in str(over.value.hint)
        assert "set `WORKSPACE_MAX` higher" in str(over.value.hint)
        await ws.destroy(premises, second.id)
        await ws.create(premises, Wish())


# --- finding ---


@pytest.mark.scenario("WSM-04")
async def test_a_workspace_is_found_by_its_id_and_by_a_path_in_it(premises: Premises, house: House) -> None:
    empty, adopted = await ws.create(premises, Wish()), await ws.create(premises, Wish(path=house.theirs))
    (house.theirs.parent / "link").symlink_to(house.theirs)
    settings = premises.settings

    assert await premises.store.workspace(empty.id[:8]) == empty
    for path in (house.theirs, house.theirs / "kept", house.theirs.parent / "link" / "kept" / "nothing"):
        assert (await ws.find_by_path(settings, path)).row == adopted
    assert (await ws.find_by_path(settings, ws.tree_of(settings, empty) / "deep" / "down")).row == empty
    with pytest.raises(UnknownWorkspace):
        await ws.find_by_path(settings, house.theirs.parent)
    with pytest.raises(UnknownWorkspace):
        await premises.store.workspace("nothing")
    with pytest.raises(UnknownWorkspace):
        await premises.store.workspace("")


@pytest.mark.scenario("WSM-06")
async def test_workspaces_survive_a_restart(house: House) -> None:
    async with house.open() as premises:
        row = await ws.create(premises, Wish(persistent=True))
        await shell(premises, row, "echo work > made")
    async with house.open() as premises:
        assert [(found.id, found.status) for found in await premises.store.workspaces()] == [(row.id, S.READY)]
        assert await shell(premises, row, "cat made") == (0, b"work\n")


# --- commands ---


async def test_a_command_has_the_callers_streams_and_status(premises: Premises) -> None:
    row = await ws.create(premises, Wish())
    content = os.urandom(3 << 20)

    assert await inside(premises, row, "cat", stdin=content) == (0, content)
    assert await shell(premises, row, "exit 7") == (7, b"")
    assert await shell(premises, row, "kill -9 $$") == (137, b"")
    assert (await inside(premises, row, "no-such-command"))[0] == 127
    assert await inside(premises, row, "true", stdin=content) == (0, b"")


@pytest.mark.scenario("LIF-15", only="local")
async def test_each_command_moves_the_end_of_a_workspace(premises: Premises) -> None:
    row = await ws.create(premises, Wish())
    await shell(premises, row, "true")

    used = await premises.store.workspace(row.id)

    assert used.used > row.used
    assert used.expires == used.used + 30 * DAY * SECOND


@pytest.mark.scenario("WSM-20")
async def test_files_that_policy_forbids_are_named_before_the_lease(premises: Premises) -> None:
    row = await ws.create(premises, Wish())
    tree = ws.tree_of(premises.settings, row)
    (tree / "link").symlink_to("/usr")
    (tree / ".env").write_text("KEY=1")

    with pytest.raises(ForbiddenFiles, match=r"\.env: forbidden:\*\*/\.env"):
        await shell(premises, row, "true")

    assert (await premises.store.lease(row.id)).fence == 1, "it was made with the first, and there was no other"
    (tree / ".env").unlink()
    assert (await shell(premises, row, "true"))[0] == 0, "a link out of the tree does no harm in a sandbox"


@pytest.mark.scenario("WSM-18", only="without allowNetwork")
async def test_the_policy_of_the_base_commit_holds_and_not_that_of_the_work_tree(
    premises: Premises, house: House
) -> None:
    (house.theirs / ".agentgate").mkdir()
    (house.theirs / ".agentgate" / "policy.yaml").write_text('forbiddenPatterns: ["**/*.pem"]\n')
    git(house.theirs, "init", "-q")
    git(house.theirs, "add", "-A")
    git(house.theirs, "commit", "-qm", "first")
    row = await ws.create(premises, Wish(path=house.theirs))
    (house.theirs / ".env").write_text("KEY=1")
    (house.theirs / ".agentgate" / "policy.yaml").write_text("forbiddenPatterns: []\n")

    assert (await shell(premises, row, "true"))[0] == 0
    (house.theirs / "key.pem").touch()
    with pytest.raises(ForbiddenFiles, match=r"key\.pem"):
        await shell(premises, row, "true")


# --- leases ---


@pytest.mark.scenario("WSM-08")
@pytest.mark.scenario("WSM-10")
@pytest.mark.scenario("WSM-14")
async def test_who_has_a_workspace_is_shown_and_nobody_else_can_write(premises: Premises) -> None:
    row = await ws.create(premises, Wish())
    async with occupy(premises, row, "exec"):
        lease = await lease_of(premises, row.id)
        assert lease is not None
        assert [lease] == await list_leases(premises)
        assert (lease.workspace, lease.holder, lease.state) == (row.id, f"exec {os.getpid()}", "live")
        assert (lease.refreshed, lease.expires) == (lease.acquired, lease.acquired + 3_600 * SECOND)
        for verb in (ws.stop, ws.destroy, ws.delete, release):
            with pytest.raises(LeaseHeld, match=lease.holder):
                await verb(premises, row.id)
        with pytest.raises(LeaseHeld):
            await shell(premises, row, "true")
        assert (await premises.store.workspace(row.id)).status is S.READY

    assert await lease_of(premises, row.id) is None
    assert await release(premises, row.id) == f"workspace {row.id} is free"
    assert (await shell(premises, row, "true"))[0] == 0


@pytest.mark.scenario("WSM-12")
async def test_a_command_that_takes_long_refreshes_its_lease(
    premises: Premises, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert REFRESH == 5 * 60
    monkeypatch.setattr("runner.runtime.lease_holder.REFRESH", 0.2)
    row = await ws.create(premises, Wish())

    assert (await shell(premises, row, "sleep 2"))[0] == 0

    assert len([event for event in await events(premises, row) if isinstance(event, LeaseRefreshed)]) >= 2


@pytest.mark.scenario("WSM-11")
async def test_the_lease_of_a_dead_holder_is_taken_over_with_a_warning(premises: Premises, house: House) -> None:
    """Its lock is free, so nobody has to wait until its time is over."""
    row = await ws.create(premises, Wish())
    dead = Tenancy(premises, row, "exec 1")
    await dead.tenure.acquire(dead.write)
    lease = await lease_of(premises, row.id)
    assert lease is not None
    assert lease.state == "dead"

    assert (await shell(premises, row, "true"))[0] == 0

    assert house.advice == ["lease.taken-over"]
    assert any(getattr(event, "code", "") == "lease.taken-over" for event in await events(premises, row))


async def test_what_a_dead_holder_ran_has_ended_when_nobody_hears_of_the_takeover(premises: Premises) -> None:
    """The reader of what is said may have gone: then nothing goes on, and the lease of the dead is no more."""

    def unheard(advice: RunnerError) -> None:
        raise BrokenPipeError

    row = await ws.create(premises, Wish())
    dead = Tenancy(premises, row, "exec 1")
    await dead.tenure.acquire(dead.write)
    provider, handle = await premises.find(row)
    assert handle is not None

    async def unheard_of() -> None:
        async with provider.open(handle, SandboxSpec()) as left:
            with pytest.raises(BrokenPipeError):
                await shell(replace(premises, advise=unheard), row, "true")
            await left.run(["true"])

    with pytest.raises(WorkspaceLost):
        await unheard_of()


async def test_releasing_ends_a_dead_lease_and_breaking_a_live_one(premises: Premises) -> None:
    row = await ws.create(premises, Wish())
    dead = Tenancy(premises, row, "exec 1")
    await dead.tenure.acquire(dead.write)
    assert "`exec 1` had it" in await release(premises, row.id)
    with pytest.raises(WorkspaceState, match="nothing to break"):
        await break_lease(premises, row.id, sure=True)

    async def broken() -> None:
        async with occupy(premises, row, "exec") as tenancy:
            with pytest.raises(UsageError, match="kills all"):
                await break_lease(premises, row.id, sure=False)
            await break_lease(premises, row.id, sure=True)
            assert await lease_of(premises, row.id) is None
            async with occupy(premises, row, "another"):
                pass
            await tenancy.write(WorkspaceStatusChanged(S.STOPPING))

    with pytest.raises(LeaseLost):
        await broken()

    assert (await premises.store.workspace(row.id)).status is S.READY


async def test_only_the_process_that_holds_the_lock_is_asked_to_end(premises: Premises) -> None:
    """The number in a lease may be that of another process by now."""
    row = await ws.create(premises, Wish())
    lock = take(premises.lock(row.id))
    assert lock is not None
    async with trio.open_nursery() as nursery:
        other: trio.Process = await nursery.start(trio.run_process, ["sleep", "100"])
        another = Tenancy(premises, row, f"exec {other.pid}")
        await another.tenure.acquire(another.write)

        with pytest.raises(LeaseHeld):
            await ws.destroy(premises, row.id)

        await trio.sleep(0.05)
        assert other.poll() is None
        nursery.cancel_scope.cancel()
    os.close(lock)
    assert (await premises.store.workspace(row.id)).status is S.READY


async def test_a_directory_that_another_store_uses_is_refused(premises: Premises, house: House) -> None:
    row = await ws.create(premises, Wish(path=house.theirs))
    async with house.another().open() as others:
        theirs = await ws.create(others, Wish(path=house.theirs))
        async with occupy(premises, row, "exec"):
            with pytest.raises(LeaseHeld, match="another process"):
                await shell(others, theirs, "true")
            assert (await others.store.lease(theirs.id)).id == ""
        assert (await shell(others, theirs, "true"))[0] == 0
        await ws.destroy(others, theirs.id)


# --- stopping ---


@pytest.mark.scenario("LIF-11", only="local")
@pytest.mark.scenario("LIF-12", only="local")
async def test_a_stopped_workspace_keeps_its_files_until_it_is_resumed(premises: Premises) -> None:
    row = await ws.create(premises, Wish())
    await shell(premises, row, "echo work > made")
    used = await premises.store.workspace(row.id)
    stopped = await ws.stop(premises, row.id)

    assert stopped.status is S.STOPPED
    assert stopped.used > used.used > row.used
    assert await ws.stop(premises, row.id) == stopped
    with pytest.raises(WorkspaceState) as refused:
        await shell(premises, row, "true")
    assert "workspace resume" in str(refused.value.hint)
    assert (await ws.resume(premises, row.id)).status is S.READY
    assert (await ws.resume(premises, row.id)).status is S.READY
    assert await shell(premises, row, "cat made") == (0, b"work\n")


# --- removing ---


@pytest.mark.scenario("WSM-05")
async def test_deleting_an_adopted_directory_forgets_it_and_leaves_every_file(premises: Premises, house: House) -> None:
    row = await ws.create(premises, Wish(path=house.theirs))
    await shell(premises, row, "echo work > made")
    before = everything(house.theirs)
    async with occupy(premises, row, "exec"):
        with pytest.raises(LeaseHeld):
            await ws.delete(premises, row.id)

    removed = await ws.delete(premises, row.id)

    assert removed.tree == str(house.theirs)
    assert everything(house.theirs) == before
    assert await premises.store.workspaces() == []
    with pytest.raises(UnknownWorkspace):
        await ws.delete(premises, row.id)
    await ws.create(premises, Wish(path=house.theirs))


@pytest.mark.scenario("BEY-08")
@pytest.mark.scenario("LIF-08", only="local")
@pytest.mark.scenario("LIF-10", only="local")
@pytest.mark.parametrize("stopped", [False, True])
async def test_work_is_saved_before_a_workspace_is_destroyed(premises: Premises, stopped: bool) -> None:
    row = await ws.create(premises, Wish())
    await shell(premises, row, "echo work > made; printf '\\377\\000' > binary; mkdir -p a/b; ln -s made a/b/link")
    if stopped:
        await ws.stop(premises, row.id)

    removed = await ws.destroy(premises, row.id)

    assert removed.saved == premises.settings.home / "saved" / row.id
    assert removed.saved_work is not None
    assert removed.saved_work.changed == 3
    again = premises.settings.home.parent / "again"
    again.mkdir()
    git(again, "init", "-q")
    git(again, "apply", str(removed.saved / "work.patch"))
    assert (again / "made").read_text() == "work\n"
    assert (again / "binary").read_bytes() == b"\xff\0"
    names = git(removed.saved / "snapshot.git", "ls-tree", "-r", "--name-only", str(removed.saved_work.commit)).split()
    assert names == ["a/b/link", "binary", "made"]
    history = await events(premises, row)
    kinds = [type(event) if isinstance(event, WorkspaceSaved) else getattr(event, "status", None) for event in history]
    assert kinds.index(S.DESTROYING) < kinds.index(WorkspaceSaved) < kinds.index(S.DESTROYED)
    with pytest.raises(UnknownWorkspace):
        await ws.destroy(premises, row.id)


@pytest.mark.scenario("BEY-08")
async def test_work_that_cannot_be_saved_is_not_destroyed(premises: Premises) -> None:
    row = await ws.create(premises, Wish())
    await shell(premises, row, "echo KEY=1 > .env; mkfifo pipe")
    for verb in (ws.delete, ws.destroy):
        with pytest.raises(UnsavedWork, match=r"\.env.*pipe"):
            await verb(premises, row.id)
    assert (await premises.store.workspace(row.id)).status is S.READY
    assert ws.tree_of(premises.settings, row).joinpath(".env").exists()

    removed = await ws.destroy(premises, row.id, discard=True)

    assert (removed.saved, removed.saved_work) == (None, None)
    assert UnsavedWorkDiscarded() in await events(premises, row)
    assert not (premises.settings.home / "saved").exists()


async def test_unsaved_work_is_swept_only_by_who_gives_it_up(premises: Premises) -> None:
    row = await ws.create(premises, Wish())
    await shell(premises, row, "echo work > made")
    with pytest.raises(UnsavedWork, match="1 changed file"):
        await ws.delete(premises, row.id)

    await ws.delete(premises, row.id, discard=True)

    assert await premises.store.workspaces() == []
    assert not (premises.settings.home / "saved").exists()


# --- what was cut off ---


@pytest.mark.scenario("LIF-08", only="local")
async def test_destroying_finishes_what_was_cut_off(premises: Premises) -> None:
    """Once before the work was saved, and once after."""
    row = await ws.create(premises, Wish())
    await shell(premises, row, "echo work > made")
    dead = Tenancy(premises, row, "destroy 1")
    await dead.tenure.acquire(dead.write)
    await dead.write(WorkspaceStatusChanged(S.DESTROYING))

    removed = await ws.destroy(premises, row.id)

    assert removed.saved_work is not None
    assert removed.saved_work.changed == 1


async def test_recovering_finishes_what_the_dead_have_begun(premises: Premises, house: House) -> None:
    making = WorkspaceRow("4f2a-half-made", "local", S.CREATING, 0, 0)
    requested = WorkspaceRequested("local", "default", False, Limits(), 30.0)
    half = Tenancy(premises, making, "create 1")
    await half.write(requested)
    await half.tenure.acquire(half.write)
    stopping, destroying, used = [await ws.create(premises, Wish()) for _ in range(3)]
    await shell(premises, destroying, "echo work > made")
    for row, status in ((stopping, S.STOPPING), (destroying, S.DESTROYING)):
        dead = Tenancy(premises, row, "died 1")
        await dead.tenure.acquire(dead.write)
        await dead.write(WorkspaceStatusChanged(status))
    dead = Tenancy(premises, used, "exec 1")
    await dead.tenure.acquire(dead.write)
    (premises.settings.home / "workspaces" / "of-nobody").mkdir()

    assert len(await finish_all(premises, dry_run=True)) == 4
    async with occupy(premises, used, "exec"):
        assert len(await finish_all(premises, dry_run=True)) == 3, "what somebody has is not touched"
    dead = Tenancy(premises, used, "exec 1")
    await dead.tenure.acquire(dead.write)
    done = {one.workspace: one for one in await finish_all(premises, dry_run=False)}

    assert {one.left for one in done.values()} == {None}
    assert done[making.id].done == "was left creating, and is gone now"
    assert done[stopping.id].done == "was left stopping, and is stopped now"
    assert done[destroying.id].saved is not None
    assert done[used.id].done == "was left ready, and is ready now"
    assert {row.id for row in await premises.store.workspaces()} == {stopping.id, used.id}
    assert await premises.store.leases() == []
    assert await finish_all(premises, dry_run=False) == []
    assert [Path(path).name for path in await sweep(premises, dry_run=False)] == ["of-nobody"]


async def test_a_workspace_that_cannot_be_made_leaves_nothing(premises: Premises, house: House) -> None:
    """The directory is one of root's that others can enter, or of another user."""
    with pytest.raises(ProviderFailed):
        await ws.create(premises, Wish(path=Path("/usr/share/misc")))

    assert await premises.store.workspaces() == []
    assert await premises.store.leases() == []
    assert not Path("/usr/share/misc/.git").exists()


# --- what has had its time ---


def later(premises: Premises, seconds: float) -> Premises:
    """The same premises, at a later time."""
    now = premises.ports.now
    return replace(premises, ports=replace(premises.ports, now=lambda: now() + round(seconds * SECOND)))


@pytest.mark.scenario("LIF-13")
async def test_expired_workspaces_are_saved_and_removed_and_those_in_use_are_not(
    premises: Premises, house: House
) -> None:
    idle, used, stopped, forever = [await ws.create(premises, Wish(persistent=n == 3)) for n in range(4)]
    adopted = await ws.create(premises, Wish(path=house.theirs))
    await shell(premises, idle, "echo work > made")
    await ws.stop(premises, stopped.id)
    then = later(premises, 31 * DAY)
    assert await reap(premises, dry_run=False) == []
    assert len(await reap(then, dry_run=True)) == 4

    async with occupy(premises, used, "exec"):
        reaped = {one.workspace: one for one in await reap(then, dry_run=False)}

    assert {id for id, one in reaped.items() if one.left is None} == {idle.id, stopped.id, adopted.id}
    assert reaped[idle.id].saved == premises.settings.home / "saved" / idle.id
    assert reaped[used.id].in_use
    assert {row.id for row in await premises.store.workspaces()} == {used.id, forever.id}
    assert (house.theirs / "kept").exists()
    assert WorkspaceStatusChanged(S.DESTROYING, "its time was over") in await events(premises, idle)


@pytest.mark.scenario("LIF-13")
async def test_work_waits_a_second_for_what_is_removed_and_the_next_who_comes_finishes_it(house: House) -> None:
    class Slow:
        def __init__(self, provider: Provider) -> None:
            self._provider = provider

        def __getattr__(self, name: str) -> Any:
            return getattr(self._provider, name)

        async def destroy(self, handle: Handle) -> None:
            await trio.sleep_forever()

    async with house.open(WORKSPACE_TTL="1s") as premises:
        row = await ws.create(premises, Wish())
        await shell(premises, row, "echo work > made")
        await trio.sleep(1.1)
        ports = premises.ports
        slow = replace(premises, ports=replace(ports, provider=lambda name: cast(Any, Slow(ports.provider(name)))))

        moments = [trio.current_time()]
        async with reaping(slow):
            moments.append(trio.current_time())
        moments.append(trio.current_time())

        assert 1 <= moments[1] - moments[0] < 5
        assert moments[2] - moments[1] < 4
        assert (await premises.store.workspace(row.id)).status is S.DESTROYING
        with trio.fail_after(60):
            while await premises.store.workspaces():  # a busy machine may need more than one bounded second
                async with reaping(premises):
                    pass
        assert house.advice == ["workspace.expired"]
        assert "+work" in (premises.settings.home / "saved" / row.id / "work.patch").read_text()


@pytest.mark.parametrize("adopted", [False, True], ids=["own", "in place"])
async def test_a_clock_that_jumps_takes_no_workspace_from_who_works_in_it(
    house: House, monkeypatch: pytest.MonkeyPatch, adopted: bool
) -> None:
    """By that clock his lease has expired long ago. The first look ever sees the jump; the second is asked for."""
    async with house.open() as premises:
        row = await ws.create(premises, Wish(path=house.theirs if adopted else None))
        async with occupy(premises, row, "exec") as tenancy:
            real = time.time_ns
            monkeypatch.setattr(time, "time_ns", lambda: real() + 40 * DAY * 10**9)
            before = await premises.store.lease(row.id)
            assert not before.live(premises.ports.now())

            first, second = await collect(house.settings, dry_run=False), await collect(house.settings, dry_run=False)
            async with house.open() as others:
                for verb in (ws.destroy, ws.delete, ws.stop, release):
                    with pytest.raises(LeaseHeld):
                        await verb(others, row.id)
                assert await finish_all(others, dry_run=False) == []

            assert "forward by 3,456,000 s" in str(first.clock)
            assert second.clock is None
            assert [one.in_use for one in second.reaped] == [True]
            assert (await premises.store.lease(row.id)).id == before.id
            await tenancy.write(WorkspaceUsed(3_600.0, None))
            await tenancy.tenure.refresh(tenancy.write)
            assert (await premises.store.lease(row.id)).live(premises.ports.now())
        monkeypatch.setattr(time, "time_ns", real)
        assert (await premises.store.workspace(row.id)).status is S.READY
        assert (await premises.store.lease(row.id)).id == ""


async def test_a_greatest_age_ends_what_is_used_all_the_time(house: House) -> None:
    async with house.open() as premises:
        row, forever = await ws.create(premises, Wish()), await ws.create(premises, Wish(persistent=True))
    async with house.open(WORKSPACE_MAX_AGE="10d") as premises:
        assert await reap(later(premises, 9 * DAY), dry_run=True) == []
        (reaped,) = await reap(later(premises, 11 * DAY), dry_run=True)
        await shell(premises, row, "true")
        used, kept = await premises.store.workspace(row.id), await premises.store.workspace(forever.id)

    assert reaped.workspace == row.id
    assert used.expires == row.created + 10 * DAY * SECOND
    assert kept.expires is None


async def test_expired_work_that_cannot_be_saved_stays(premises: Premises) -> None:
    row = await ws.create(premises, Wish())
    await shell(premises, row, "echo KEY=1 > .env")

    (reaped,) = await reap(later(premises, 31 * DAY), dry_run=False)

    assert (reaped.in_use, ".env" in str(reaped.left)) == (False, True)
    assert await premises.store.workspaces() == [await premises.store.workspace(row.id)]


async def test_nothing_is_removed_right_after_the_clock_was_set(house: House) -> None:
    async with house.open(WORKSPACE_TTL="1s") as premises:
        row = await ws.create(premises, Wish())
        assert await unsteady(premises, dry_run=False) is None
        anchor = see_clock(premises.ports.now())
        await premises.store.set_anchor(replace(anchor, offset=anchor.offset - 3_600 * SECOND))
        assert "forward by 3,600 s" in str(await unsteady(premises, dry_run=True))

    settings = premises.settings
    collection = await collect(settings, dry_run=False)
    assert "forward by 3,600 s" in str(collection.clock)
    assert collection.clean
    collection = await collect(settings, dry_run=True)

    assert collection.clock is None
    assert row.id in {one.row.id for one in await ws.list_workspaces(settings)}


async def test_what_belongs_to_no_run_is_not_collected_for_its_age(house: House) -> None:
    """Its tree is old, and its id is none of a run's."""
    async with house.open(WORKSPACE_TTL="1000d", RUN_RETENTION="1s") as premises:
        row = await ws.create(premises, Wish(persistent=True))
        os.utime(ws.tree_of(premises.settings, row), (0, 0))

        collection = await collect(premises.settings, dry_run=False)

        assert (collection.found, collection.reaped) == ((), ())
        assert (await shell(premises, row, "true"))[0] == 0
