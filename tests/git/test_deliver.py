"""Work out of a private repository, with real git: what is taken, what is not, and that a refusal changes nothing."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
import trio

from runner.core import errors
from runner.core.settings import Settings
from runner.git import atomic_apply, source
from runner.git.deliver import ApplyResult, Delivery, PushResult, open_delivery
from runner.ports.git import Author, SnapshotOptions
from tests.support.folder_contents import everything, put
from tests.support.git_servers import Handler, https, sshd
from tests.support.needs import ROOT, SSHD
from tests.support.situations import git

Change = Callable[[Path], object]


@dataclass
class Work:
    """A user's repository, the private one with a snapshot built on its HEAD, and that snapshot's patch."""

    delivery: Delivery
    user: Path
    private: Path
    base: str
    commit: str
    tree: str
    patch: Path
    folder: Path

    async def apply(self, *, into: Path | None = None, check: bool = False) -> ApplyResult:
        scratch = self.folder / "scratch"
        scratch.mkdir()
        try:
            return await self.delivery.apply(
                self.patch, self.base, into=into or self.user, scratch=scratch, check=check
            )
        finally:
            shutil.rmtree(scratch)

    async def push(
        self, url: str, branch: str = "work", *, explicit: bool = True, person: dict[str, str] | None = None
    ) -> PushResult:
        env = {"PATH": os.environ["PATH"], "HOME": str(self.folder), **(person or {})}
        return await self.delivery.push(
            self.private, self.commit, url=url, branch=branch, explicit=explicit, person=env
        )


def fill(top: Path) -> None:
    """A tree with every kind of leaf."""
    (top / "README").write_text("".join(f"line {number}\n" for number in range(40)))
    put(top / "src" / "app.sh", "echo app\n")
    put(top / "src" / "deep" / "only", "only\n")
    put(top / "src" / "tool", "tool\n", 0o755)
    (top / "data").write_bytes(bytes(range(256)) * 40)
    (top / "link").symlink_to("README")
    (top / "kept").write_text("kept\n")
    (top / "to-folder").write_text("a file\n")
    put(top / "to-file" / "inner", "inner\n")


def rework(top: Path) -> None:
    """What an agent might do to ``fill``: every kind of change."""
    lines = (top / "README").read_text().splitlines(keepends=True)
    (top / "README").write_text("".join([*lines[:19], "changed\n", *lines[20:]]))
    shutil.rmtree(top / "src" / "deep")
    (top / "src" / "app.sh").chmod(0o755)
    (top / "src" / "tool").write_text("another tool\n")
    (top / "data").write_bytes(bytes(range(255, -1, -1)) * 40)
    (top / "link").unlink()
    (top / "link").write_text("no link any more\n")
    (top / "to-folder").unlink()
    put(top / "to-folder" / "inner", "below\n")
    shutil.rmtree(top / "to-file")
    (top / "to-file").write_text("a file now\n")
    put(top / "new" / "er" / "made", "made\n")
    (top / "new" / "with space\tand\ttab").write_text("odd\n")
    (top / "new" / "pointer").symlink_to("../README")


@pytest.fixture
async def work(tmp_path: Path) -> Work:
    return await work_of(tmp_path, rework)


async def work_of(folder: Path, change: Change, depth: int | None = None) -> Work:
    delivery = open_delivery(Settings.from_env({"PATH": os.environ["PATH"], "RUNNER_HOME": str(folder / "home")}))
    user, private, tree = folder / "user", folder / "private.git", folder / "tree"
    user.mkdir()
    fill(user)
    git(user, "init", "-q", "-b", "main")
    for number in (1, 2):
        (user / "number").write_text(f"{number}\n")
        git(user, "add", "-A")
        git(user, "commit", "-qm", f"commit {number}")
    base = git(user, "rev-parse", "HEAD")
    await delivery.fetch(user, base, into=private, depth=depth)
    tree.mkdir()
    await delivery.check_out(private, base, into=tree, branch="agent")
    change(tree)
    wanted = SnapshotOptions("work", Author("runner", "runner@localhost", 1_700_000_000))
    made = await delivery.snapshot(private, tree, base, wanted)
    await delivery.patch(private, base, made.commit, folder / "work.patch")
    return Work(
        delivery=delivery,
        user=user,
        private=private,
        base=base,
        commit=made.commit,
        tree=made.tree,
        patch=folder / "work.patch",
        folder=folder,
    )


def tree_of(user: Path) -> str:
    """The tree that committing everything would make, by an index of its own."""
    index = user.parent / "index"
    shutil.copyfile(user / ".git" / "index", index)
    env = {"PATH": os.environ["PATH"], "GIT_INDEX_FILE": str(index)}
    subprocess.run(["git", "-C", user, "add", "-A"], env=env, check=True)
    done = subprocess.run(["git", "-C", user, "write-tree"], env=env, check=True, capture_output=True, text=True)
    return done.stdout.strip()


# --- branch ----------------------------------------------------------------------------------------

OF_A_BRANCH = (".git/objects", ".git/refs/heads/runner", ".git/logs/refs/heads/runner")


async def test_a_branch_has_the_snapshot_and_its_history_and_nothing_else_moves(work: Work) -> None:
    before = everything(work.user, without=OF_A_BRANCH)

    done = await work.delivery.branch(work.private, work.commit, into=work.user / "src", name="runner/abc")

    assert (done.made, done.repository) == (True, work.user)
    assert everything(work.user, without=OF_A_BRANCH) == before
    assert git(work.user, "log", "--format=%s", "runner/abc").split("\n") == ["work", "commit 2", "commit 1"]
    assert git(work.user, "fsck", "--strict", "--no-dangling") == ""


async def test_the_same_branch_again_is_no_change(work: Work) -> None:
    await work.delivery.branch(work.private, work.commit, into=work.user, name="runner/abc")
    before = everything(work.user)

    done = await work.delivery.branch(work.private, work.commit, into=work.user, name="runner/abc")

    assert not done.made
    assert everything(work.user) == before


def unborn(user: Path) -> None:
    git(user, "symbolic-ref", "HEAD", "refs/heads/wanted")


BRANCHES: dict[str, tuple[str, Change, type[errors.RunnerError]]] = {
    "there with another commit": ("main", lambda user: None, errors.BranchTaken),
    "there with the base of the work": ("wanted", lambda user: git(user, "branch", "wanted"), errors.BranchTaken),
    "that HEAD waits for": ("wanted", unborn, errors.BranchTaken),
    "below a branch": ("main/wanted", lambda user: None, errors.BranchTaken),
    "above a branch": ("wanted", lambda user: git(user, "branch", "wanted/below"), errors.BranchTaken),
    "with a lock of another git": (
        "wanted",
        lambda user: (user / ".git" / "refs" / "heads" / "wanted.lock").touch(),
        errors.BranchTaken,
    ),
    "an option": ("--force", lambda user: None, errors.BadRef),
    "two dots": ("a..b", lambda user: None, errors.BadRef),
    "HEAD": ("HEAD", lambda user: None, errors.BadRef),
}


@pytest.mark.parametrize(("name", "situation", "kind"), BRANCHES.values(), ids=BRANCHES)
async def test_a_branch_that_can_not_be_is_refused_and_nothing_changes(
    work: Work, name: str, situation: Change, kind: type[errors.RunnerError]
) -> None:
    situation(work.user)
    before = everything(work.user, without=(".git/objects",))

    with pytest.raises(kind):
        await work.delivery.branch(work.private, work.commit, into=work.user, name=name)

    assert everything(work.user, without=(".git/objects",)) == before


async def test_no_hook_and_no_setting_of_the_repository_runs(work: Work) -> None:
    canary = work.folder / "canary"
    hooks = work.user / ".git" / "hooks"
    for name in ("pre-receive", "update", "post-receive", "post-update", "reference-transaction", "push-to-checkout"):
        put(hooks / name, f"#!/bin/sh\necho {name} >> {canary}\n", 0o755)
    git(work.user, "config", "receive.denyCurrentBranch", "updateInstead")
    git(work.user, "config", "core.fsmonitor", f"touch {canary}")

    await work.delivery.branch(work.private, work.commit, into=work.user, name="runner/abc")
    await work.apply()

    assert not canary.exists()


async def test_objects_that_git_refuses_do_not_get_in(work: Work) -> None:
    """A tree with `.git` in it, made behind our back."""
    blob = git(work.private, "hash-object", "-w", "--stdin")
    raw = work.folder / "raw"
    raw.write_bytes(b"100644 .git\0" + bytes.fromhex(blob))
    tree = git(work.private, "hash-object", "-t", "tree", "-w", "--literally", str(raw))
    commit = git(work.private, "commit-tree", "-p", work.base, "-m", "bad", tree)
    before = everything(work.user)

    with pytest.raises(errors.HostileTree, match="hasDotgit"):
        await work.delivery.branch(work.private, commit, into=work.user, name="runner/abc")

    assert everything(work.user) == before


async def test_a_shallow_history_goes_where_the_rest_is_and_nowhere_else(tmp_path: Path) -> None:
    work = await work_of(tmp_path, rework, depth=1)
    other = tmp_path / "other"
    git(tmp_path, "init", "-q", str(other))
    before = everything(other)

    with pytest.raises(errors.BaseMissing):
        await work.delivery.branch(work.private, work.commit, into=other, name="runner/abc")
    await work.delivery.branch(work.private, work.commit, into=work.user, name="runner/abc")

    assert everything(other) == before
    assert git(work.user, "rev-list", "--count", "runner/abc") == "3"
    assert not (work.user / ".git" / "shallow").exists()


# --- apply -----------------------------------------------------------------------------------------


async def test_all_kinds_of_changes_arrive_and_index_and_head_stay(work: Work) -> None:
    (work.user / "src" / "tool").chmod(0o750)
    (work.user / "kept").write_text("mine, not committed\n")
    (work.user / "untracked").write_text("mine too\n")
    before = everything(work.user / ".git")

    done = await work.apply()

    assert everything(work.user / ".git") == before
    assert stat.S_IMODE((work.user / "src" / "tool").stat().st_mode) == 0o750
    assert (work.user / "kept").read_text() == "mine, not committed\n"
    assert not (work.user / "src" / "deep").exists()
    (work.user / "untracked").unlink()
    git(work.user, "checkout", "--", "kept")
    assert tree_of(work.user) == work.tree
    assert "new/er/made" in done.paths


async def test_a_checkout_that_went_on_elsewhere_takes_the_patch(work: Work) -> None:
    text = (work.user / "README").read_text()
    (work.user / "README").write_text("new first line\n" + text)
    git(work.user, "commit", "-qam", "went on")

    await work.apply()

    assert (work.user / "README").read_text() == "new first line\n" + text.replace("line 19\n", "changed\n")


async def test_a_checkout_that_has_the_work_committed_is_left_alone(work: Work) -> None:
    await work.apply()
    git(work.user, "add", "-A")
    git(work.user, "commit", "-qm", "taken")
    before = everything(work.user)

    assert (await work.apply()).present

    assert everything(work.user) == before


def committing(change: Change) -> Change:
    def committed(user: Path) -> None:
        change(user)
        git(user, "add", "-A")
        git(user, "commit", "-qm", "another")

    return committed


def link_instead_of_folder(user: Path) -> None:
    (user / "src").rename(user.parent / "elsewhere")
    (user / "src").symlink_to(user.parent / "elsewhere")


def socket_at(path: Path) -> None:
    path.unlink()
    here = os.getcwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def without_the_base(user: Path) -> None:
    git(user, "checkout", "-q", "--orphan", "other")
    git(user, "commit", "-qm", "unrelated")


REFUSED: dict[type[errors.RunnerError], dict[str, Change]] = {
    errors.WouldOverwrite: {
        "a changed file": lambda user: (user / "README").write_text("mine\n"),
        "a file changed to the same length": lambda user: (user / "src" / "tool").write_text("loot\n"),
        "a removed file": lambda user: (user / "src" / "tool").unlink(),
        "a removed folder": lambda user: shutil.rmtree(user / "src"),
        "a file made executable": lambda user: (user / "src" / "app.sh").chmod(0o755),
        "a change that is staged": lambda user: (
            (user / "src" / "tool").write_text("staged\n"),
            git(user, "add", "-A"),
            (user / "src" / "tool").write_text("tool\n"),
        ),
        "a file taken out of the index": lambda user: git(user, "rm", "-q", "--cached", "src/tool"),
        "an untracked file where one is made": lambda user: (
            (user / "new" / "er").mkdir(parents=True),
            (user / "new" / "er" / "made").write_text("made\n"),
        ),
        "a link where one is made": lambda user: ((user / "new").mkdir(), (user / "new/pointer").symlink_to("/")),
        "another link": lambda user: ((user / "link").unlink(), (user / "link").symlink_to("data")),
    },
    errors.PatchConflict: {
        "a folder where a file is made": committing(
            lambda user: ((user / "new/er/made").mkdir(parents=True), (user / "new/er/made/x").touch())
        ),
        "a folder with a file of mine that becomes a file": lambda user: (user / "to-file/mine").write_text("mine\n"),
        "lines that others changed": committing(lambda user: (user / "README").write_text("all else\n")),
        "a binary file that others changed": committing(lambda user: (user / "data").write_bytes(b"\0x")),
        "a file that others removed": committing(lambda user: (user / "src" / "tool").unlink()),
        "a file that others made": committing(
            lambda user: ((user / "new").mkdir(), (user / "new" / "pointer").write_text("x"))
        ),
    },
    errors.UnsafePath: {
        "a file where a folder is needed": lambda user: (user / "new").write_text(""),
        "a folder behind a link": link_instead_of_folder,
        "a link that leads out, committed": committing(
            lambda user: (user / "new").symlink_to(user.parent / "private.git")
        ),
        "a FIFO": lambda user: ((user / "README").unlink(), os.mkfifo(user / "README")),
        "a socket": lambda user: socket_at(user / "README"),
        "a device": lambda user: ((user / "README").unlink(), os.mknod(user / "README", stat.S_IFCHR, 0x103)),
        "another repository": lambda user: ((user / "new").mkdir(), git(user / "new", "init", "-q")),
    },
    errors.BaseMissing: {
        "a HEAD without the base": without_the_base,
        "a HEAD before the base": lambda user: git(user, "checkout", "-q", "HEAD~1"),
        "no commit": lambda user: git(user, "checkout", "-q", "--orphan", "other"),
    },
    errors.BadSource: {
        "a bare repository": lambda user: (
            (user / ".git").rename(user.parent / "g"),
            shutil.rmtree(user),
            (user.parent / "g").rename(user),
        ),
    },
}


@pytest.mark.parametrize("check", [False, True], ids=["apply", "check"])
@pytest.mark.parametrize(
    ("situation", "kind"),
    [
        pytest.param(situation, kind, id=name, marks=ROOT.mark if name == "a device" else ())
        for kind, situations in REFUSED.items()
        for name, situation in situations.items()
    ],
)
async def test_what_can_not_be_applied_changes_nothing(
    work: Work, situation: Change, kind: type[errors.RunnerError], check: bool
) -> None:
    situation(work.user)
    before = everything(work.folder)

    with pytest.raises(kind):
        await work.apply(check=check)

    assert everything(work.folder) == before


async def test_a_check_says_what_would_change_and_changes_nothing(work: Work) -> None:
    before = everything(work.user)

    done = await work.apply(check=True)

    assert len(done.paths) == 13
    assert everything(work.user) == before


async def test_a_linked_work_tree_takes_a_patch_and_its_sibling_does_not_change(work: Work) -> None:
    git(work.user, "worktree", "add", "-q", "-b", "side", str(work.folder / "side"))
    before = everything(work.user)

    await work.apply(into=work.folder / "side")

    assert everything(work.user) == before
    assert (work.folder / "side" / "new" / "er" / "made").read_text() == "made\n"


# --- apply that is cut short -------------------------------------------------------------------------


async def cut_short(work: Work, stop: int) -> bool:
    """Carry the patch out until ``stop``, and leave it there as a kill would; whether that was before the end."""
    scratch = work.folder / "scratch"
    scratch.mkdir()
    place = source.find_repository(work.user)
    with atomic_apply.locked(place.git, place.top) as folder:
        _, changes = await work.delivery._attempt(work.patch, work.base, place, scratch)

        def part() -> bool:
            walk = atomic_apply.replace_stepwise(place.top, folder, scratch / "tree", changes)
            return sum(1 for _ in islice(walk, stop)) == stop

        unfinished = await trio.to_thread.run_sync(part)
    shutil.rmtree(scratch)
    return unfinished


async def test_a_kill_at_any_point_is_undone_by_the_next_apply(work: Work) -> None:
    before = everything(work.user)
    inodes = {path: (work.user / path).lstat().st_ino for path in before if not (work.user / path).is_dir()}
    stop = 1
    while await cut_short(work, stop):
        if (work.user / ".git" / atomic_apply.FOLDER / "journal.json").exists():
            with pytest.raises(errors.ApplyInterrupted):
                await work.apply(check=True)
        with atomic_apply.locked(work.user / ".git", work.user):
            pass
        assert everything(work.user) == before, stop
        assert {path: (work.user / path).lstat().st_ino for path in inodes} == inodes
        stop += 1

    assert stop > 20
    assert tree_of(work.user) == work.tree
    assert not (work.user / ".git" / atomic_apply.FOLDER).exists()


async def test_undoing_can_be_cut_short_as_well(work: Work) -> None:
    """What was undone already is seen as such."""
    before = everything(work.user)
    assert await cut_short(work, 20)
    journal = work.user / ".git" / atomic_apply.FOLDER / "journal.json"
    kept = journal.read_bytes()
    atomic_apply.roll_back(work.user, journal.parent)
    journal.write_bytes(kept)

    with atomic_apply.locked(work.user / ".git", work.user):
        pass

    assert everything(work.user) == before


async def test_what_somebody_changed_since_is_named_and_kept(work: Work) -> None:
    (before := everything(work.user)).pop("README")
    stop = 1
    while "changed\n" not in (work.user / "README").read_text():
        assert await cut_short(work, stop)
        if "changed\n" not in (work.user / "README").read_text():
            with atomic_apply.locked(work.user / ".git", work.user):
                pass
        stop += 1
    (work.user / "README").write_text("somebody else\n")

    for _ in range(2):
        with pytest.raises(errors.ApplyInterrupted, match="README"):
            await work.apply()

    assert (work.user / "README").read_text() == "somebody else\n"
    after = everything(work.user, without=(f".git/{atomic_apply.FOLDER}", "README"))
    assert after == before
    old = work.user / ".git" / atomic_apply.FOLDER / "old"
    assert any(
        file.read_text().startswith("line 0") for file in old.iterdir() if file.is_file() and file.stat().st_size < 1000
    )


async def test_a_file_changed_after_it_was_looked_at_undoes_everything(work: Work) -> None:
    place = source.find_repository(work.user)
    before = everything(work.user)
    scratch = work.folder / "scratch"
    scratch.mkdir()

    with atomic_apply.locked(place.git, place.top) as folder:
        _, changes = await work.delivery._attempt(work.patch, work.base, place, scratch)
        (work.user / "src" / "tool").write_text("mine\n")
        with pytest.raises(errors.WouldOverwrite):
            await trio.to_thread.run_sync(atomic_apply.replace_files, place.top, folder, scratch / "tree", changes)

    assert (work.user / "src" / "tool").read_text() == "mine\n"
    (work.user / "src" / "tool").write_text("tool\n")
    assert everything(work.user) == before


async def test_two_at_once_do_not_mix(work: Work) -> None:
    with (
        atomic_apply.locked(work.user / ".git", work.user),
        pytest.raises(errors.ApplyInterrupted, match="under way"),
    ):
        await work.apply()


async def test_a_cancelled_apply_leaves_everything_as_it_was(work: Work) -> None:
    before = everything(work.user)
    cancelled = 0
    for hundredth in range(1, 12):
        with trio.move_on_after(hundredth / 100) as scope:
            try:
                await work.apply()
            finally:
                shutil.rmtree(work.folder / "scratch", ignore_errors=True)
        if not scope.cancelled_caught:
            break
        cancelled += 1
        assert everything(work.user) == before
    assert cancelled


# --- push ------------------------------------------------------------------------------------------


@pytest.fixture
def remote(work: Work) -> Path:
    """A bare remote with the user's branch."""
    path = work.folder / "remote.git"
    git(work.folder, "clone", "-q", "--bare", str(work.user), str(path))
    return path


def refs(remote: Path) -> str:
    return git(remote, "show-ref")


async def test_a_new_branch_is_pushed_once(work: Work, remote: Path) -> None:
    url = f"file://{remote}"

    first = await work.push(url, "runner/abc", explicit=False)
    then = await work.push(url, "runner/abc", explicit=False)

    assert (first.moved, first.before, then.moved) == (True, None, False)
    assert git(remote, "rev-parse", "runner/abc^{tree}") == work.tree
    assert git(remote, "fsck", "--strict", "--no-dangling") == ""


async def test_a_branch_behind_is_moved_forward(work: Work, remote: Path) -> None:
    git(remote, "branch", "work", work.base + "~1")

    pushed = await work.push(str(remote))

    assert pushed.moved
    assert git(remote, "rev-parse", "work") == work.commit


async def test_a_shallow_history_is_pushed_where_the_rest_is(tmp_path: Path) -> None:
    work = await work_of(tmp_path, rework, depth=1)
    git(tmp_path, "clone", "-q", "--bare", str(work.user), str(tmp_path / "remote.git"))

    await work.push(str(tmp_path / "remote.git"))

    assert git(tmp_path / "remote.git", "rev-list", "--count", "work") == "3"


def ahead(remote: Path) -> None:
    commit = git(remote, "commit-tree", "-p", "main", "-m", "of somebody else", "main^{tree}")
    git(remote, "branch", "work", commit)


def refusing(remote: Path) -> None:
    hook = remote / "hooks" / "pre-receive"
    put(hook, "#!/bin/sh\necho no agents on Fridays >&2\nexit 1\n", 0o755)


def in_use(remote: Path) -> None:
    git(remote, "branch", "work")
    git(remote, "worktree", "add", "-q", str(remote.parent / "there"), "work")


PUSHES: dict[str, tuple[str, bool, Change, type[errors.RunnerError]]] = {
    "over commits of somebody else": ("work", True, ahead, errors.BranchTaken),
    "to the default branch": ("main", False, lambda remote: None, errors.DefaultBranch),
    "to another default branch": (
        "trunk",
        False,
        lambda remote: (git(remote, "branch", "trunk"), git(remote, "symbolic-ref", "HEAD", "refs/heads/trunk")),
        errors.DefaultBranch,
    ),
    "to what is usually the default branch": ("master", False, lambda remote: None, errors.DefaultBranch),
    "to a branch that is checked out there": ("work", True, in_use, errors.PushRejected),
    "to a server that refuses": ("work", True, refusing, errors.PushRejected),
    "below a branch": ("main/below", True, lambda remote: None, errors.PushRejected),
    "to what is no branch": ("--all", True, lambda remote: None, errors.BadRef),
    "to nothing": ("work", True, shutil.rmtree, errors.NoRepository),
}


@pytest.mark.parametrize(("branch", "explicit", "situation", "kind"), PUSHES.values(), ids=PUSHES)
async def test_a_push_that_is_refused_moves_nothing(
    work: Work, remote: Path, branch: str, explicit: bool, situation: Change, kind: type[errors.RunnerError]
) -> None:
    situation(remote)
    before = refs(remote) if remote.exists() else ""

    with pytest.raises(kind):
        await work.push(str(remote), branch, explicit=explicit)

    assert not before or refs(remote) == before


async def test_the_default_branch_is_pushed_to_when_it_is_named(work: Work, remote: Path) -> None:
    assert (await work.push(str(remote), "main", explicit=True)).before == work.base


async def test_what_the_server_said_is_a_hint(work: Work, remote: Path) -> None:
    refusing(remote)

    with pytest.raises(errors.PushRejected) as caught:
        await work.push(str(remote))

    assert caught.value.hint == "it said: no agents on Fridays"


async def test_hooks_of_the_user_do_not_run(work: Work, remote: Path) -> None:
    hooks = work.folder / "hooks"
    put(hooks / "pre-push", f"#!/bin/sh\ntouch {work.folder}/canary\n", 0o755)
    (work.folder / ".gitconfig").write_text(f"[core]\n\thooksPath = {hooks}\n")

    await work.push(str(remote))

    assert not (work.folder / "canary").exists()


# --- over ssh, by a program that stands for it -------------------------------------------------------


def ssh(work: Work, script: str) -> dict[str, str]:
    """What the user's environment is when ``ssh`` is this script; ``$2`` of it is git's command."""
    folder = work.folder / "bin"
    put(folder / "ssh", f"#!/bin/sh\necho $$ >> {work.folder}/pids\n{script}\n", 0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "GIT_SSH_VARIANT": "simple"}


async def test_a_push_goes_over_the_ssh_of_the_user(work: Work, remote: Path) -> None:
    person = ssh(work, 'exec sh -c "$2"')

    await work.push(f"git@host.example:{remote}", person=person)

    assert git(remote, "rev-parse", "work") == work.commit


async def test_a_branch_that_moves_while_it_is_pushed_is_not_taken(work: Work, remote: Path) -> None:
    """Somebody pushes between our look and our push: compare and set, not the last one wins."""
    git(remote, "branch", "work", "main~1")
    moved = f'git -C {remote} update-ref refs/heads/work main; exec sh -c "$2"'
    person = ssh(work, f'case "$2" in *receive-pack*) {moved};; *) exec sh -c "$2";; esac')

    with pytest.raises(errors.BranchTaken, match="meanwhile"):
        await work.push(f"git@host.example:{remote}", person=person)

    assert git(remote, "rev-parse", "work") == work.base


SAID: dict[str, tuple[str, type[errors.RunnerError]]] = {
    "an unknown key": ("git@host.example: Permission denied (publickey).", errors.RemoteDenied),
    "an unknown host key": ("Host key verification failed.", errors.RemoteDenied),
    "an unknown host": (
        "ssh: Could not resolve hostname host.example: Name or service not known",
        errors.RemoteUnreachable,
    ),
    "a host that is down": ("ssh: connect to host host.example port 22: Connection refused", errors.RemoteUnreachable),
}


@pytest.mark.parametrize(("words", "kind"), SAID.values(), ids=SAID)
async def test_what_ssh_says_is_said(work: Work, remote: Path, words: str, kind: type[errors.RunnerError]) -> None:
    person = ssh(work, f"echo '{words}' >&2; exit 255")

    with pytest.raises(kind):
        await work.push(f"git@host.example:{remote}", person=person)


async def test_a_push_that_stalls_ends_with_all_its_processes(work: Work, remote: Path) -> None:
    person = ssh(work, "trap '' TERM; sleep 600 & sleep 600")

    with trio.move_on_after(1) as scope:
        await work.push(f"git@host.example:{remote}", person=person)

    assert scope.cancelled_caught
    (pid,) = (work.folder / "pids").read_text().split()
    status = Path("/proc", pid, "stat")
    with trio.fail_after(60):
        while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
            await trio.sleep(0.01)


@SSHD.mark
async def test_a_push_goes_to_a_real_ssh_server(work: Work, remote: Path) -> None:
    with sshd(work.folder / "sshd") as server:
        person = {"PATH": f"{server.folder}:{os.environ['PATH']}"}

        await work.push(f"{server.url}{remote}", person=person)

        (work.folder / "sshd" / "known_hosts").write_text("")
        with pytest.raises(errors.RemoteDenied, match="known hosts"):
            await work.push(f"{server.url}{remote}", "another", person=person)
    assert git(remote, "rev-parse", "work") == work.commit


# --- https -------------------------------------------------------------------------------------------


def asking_for_a_password(handler: Handler) -> bool:
    if handler.headers.get("Authorization") == f"Basic {b64encode(b'me:secret').decode()}":
        return False
    handler.start(401, WWW_Authenticate='Basic realm="shop"', Content_Length="0")
    return True


async def test_a_push_over_https_uses_the_credential_helper_of_the_user(work: Work, remote: Path) -> None:
    git(remote, "config", "http.receivepack", "true")
    with https(work.folder, work.folder) as server:
        server.server.answer = asking_for_a_password
        with pytest.raises(errors.RemoteDenied, match="does not let this user in"):
            await work.push(f"{server.url}/remote.git", person=server.env)
        helper = "!f() { echo username=me; echo password=secret; }; f"
        (work.folder / ".gitconfig").write_text(f'[credential]\n\thelper = "{helper}"\n')

        await work.push(f"{server.url}/remote.git", person=server.env)

        assert (await work.push(f"{server.url}/remote.git", person=server.env)).moved is False
    assert git(remote, "rev-parse", "work") == work.commit


async def test_a_certificate_that_is_not_trusted_is_refused(work: Work, remote: Path) -> None:
    with https(work.folder, work.folder) as server, pytest.raises(errors.RemoteDenied, match="certificate"):
        await work.push(f"{server.url}/remote.git")


async def test_a_server_that_leads_to_another_protocol_is_not_followed(work: Work, remote: Path) -> None:
    def elsewhere(handler: Handler) -> bool:
        handler.start(302, Location=f"file://{remote}/info/refs?service=git-receive-pack", Content_Length="0")
        return True

    with https(work.folder, work.folder) as server:
        server.server.answer = elsewhere
        with pytest.raises(errors.PlatformError):
            await work.push(f"{server.url}/remote.git", person=server.env)
    assert "refs/heads/work" not in refs(remote)


async def test_https_to_nobody_is_unreachable(work: Work) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(errors.RemoteUnreachable):
            await work.push(f"https://127.0.0.1:{unused.getsockname()[1]}/shop")


# --- what a remote may be ------------------------------------------------------------------------------

URLS = {
    "https": ("https://git.example.org/shop.git", None),
    "ssh": ("ssh://git@git.example.org:2222/shop", None),
    "scp": ("git@git.example.org:team/shop", None),
    "file": ("file:///srv/shop.git", None),
    "path": ("/srv/a shop.git", None),
    "http": ("http://git.example.org/shop", errors.BadUrl),
    "git": ("git://git.example.org/shop", errors.BadUrl),
    "ext": ("ext::sh -c id", errors.BadUrl),
    "ext without spaces": ("ext::id", errors.BadUrl),
    "a descriptor": ("fd::17", errors.BadUrl),
    "an option": ("--upload-pack=id", errors.BadUrl),
    "an option as host": ("ssh://-oProxyCommand=id/x", errors.BadUrl),
    "a password": ("https://user:secret@git.example.org/shop", errors.BadUrl),
    "a token": ("https://token@git.example.org/shop", errors.BadUrl),
    "a password for ssh": ("ssh://git:secret@git.example.org/shop", errors.BadUrl),
    "a line break": ("https://git.example.org/shop\nx", errors.BadUrl),
    "two dots": ("https://git.example.org/../shop", errors.BadUrl),
    "a file elsewhere": ("file://host/srv/shop", errors.BadUrl),
    "nothing": ("", errors.BadUrl),
    "a remote that is not there": ("upstream", errors.BadRemote),
    "a remote with two URLs": ("two", errors.BadRemote),
    "a remote with a bad URL": ("bad", errors.BadUrl),
}


@pytest.mark.parametrize(("to", "kind"), URLS.values(), ids=URLS)
async def test_a_remote_is_of_the_protocols_that_are_spoken(
    work: Work, to: str, kind: type[errors.RunnerError] | None
) -> None:
    git(work.user, "remote", "add", "two", "/srv/a")
    git(work.user, "remote", "set-url", "--add", "two", "/srv/b")
    git(work.user, "remote", "add", "bad", "ext::id")
    if kind is None:
        assert await work.delivery.remote_url(to, repository=work.user) == to
        return

    with pytest.raises(kind) as caught:
        await work.delivery.remote_url(to, repository=work.user)

    assert "secret" not in f"{caught.value.message} {caught.value.hint}"


async def test_a_remote_by_name_is_where_it_is_pushed_to(work: Work) -> None:
    git(work.user, "remote", "add", "origin", "https://git.example.org/read")
    git(work.user, "remote", "set-url", "--push", "origin", "git@git.example.org:write")
    git(work.user, "remote", "add", "near", "../remote.git")

    assert await work.delivery.remote_url("origin", repository=work.user) == "git@git.example.org:write"
    assert os.path.realpath(await work.delivery.remote_url("near", repository=work.user)) == str(
        work.folder / "remote.git"
    )
    with pytest.raises(errors.BadRemote):
        await work.delivery.remote_url("origin", repository=None)
