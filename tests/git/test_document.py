"""The git operations of the workspace document that the runner does itself, on both adapters.

What is several operations there is one here, of which nothing can come between: staging and committing, making a
branch and checking it out. In a workspace each is had by itself: see ``tests/cli/test_workspace.py``.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from runner.core.errors import BadSource, GitFailed
from runner.git.binary import GitBinary
from runner.git.dulwich import GitDulwich
from runner.ports.git import Author, Git, SnapshotOptions
from tests.support.folder_contents import everything, folder
from tests.support.situations import git as run_git

AUTHOR = Author("somebody", "s@example.org", 1_700_000_000)


@pytest.fixture(params=["git", "dulwich"])
def git(request: pytest.FixtureRequest) -> Git:
    return GitBinary(str(shutil.which("git"))) if request.param == "git" else GitDulwich()


@pytest.fixture
def work(tmp_path: Path) -> Path:
    path = folder(tmp_path / "work")
    (path / "file").write_text("one\n")
    return path


async def commit(git: Git, repository: Path, tree: Path, base: str | None, message: str) -> str:
    """``stageAll`` and ``commit``."""
    return (await git.snapshot(repository, tree, base, SnapshotOptions(message, AUTHOR))).commit


@pytest.mark.scenario("WSM-07")
async def test_the_operations_of_the_document_work_one_after_the_other(git: Git, work: Path, tmp_path: Path) -> None:
    with pytest.raises(BadSource):  # isGitRepo
        await git.inspect(work)
    await git.initialise(work, branch="main")  # initRepo
    found = await git.inspect(work)
    assert (found.top, found.head, found.branch, found.dirty) == (work, None, "main", True)  # hasUncommittedChanges

    repository = tmp_path / "private.git"
    await git.create_empty(repository)
    first = await commit(git, repository, work, None, "first")
    (work / "file").write_text("two\n")
    second = await commit(git, repository, work, first, "second")
    assert [change.path for change in await git.changes(repository, first, second)] == [b"file"]  # getDiff
    await git.patch(repository, first, second, tmp_path / "patch")
    assert "-one\n+two\n" in (tmp_path / "patch").read_text()

    for name, sha in (("topic", first), ("main", second)):  # checkout, createBranch
        into = folder(tmp_path / name)
        await git.check_out(repository, sha, into=into, branch=name)
        assert await git.resolve(into, branch=None, commit=None) == sha  # getCurrentSha
        assert run_git(into, "rev-parse", "--abbrev-ref", "HEAD") == name
        assert (await git.inspect(into)).dirty is False
    (tmp_path / "main" / "file").write_text("three\n")
    assert (await git.inspect(tmp_path / "main")).dirty is True

    clone = tmp_path / "clone.git"  # cloneRepo
    await git.fetch(tmp_path / "topic", first, into=clone, depth=1)
    assert [entry.path for entry in await git.entries(clone, first)] == [b"file"]


async def test_a_new_repository_belongs_to_whom_its_directory_does_and_git_takes_it(git: Git, work: Path) -> None:
    if os.geteuid() == 0:
        os.chown(work, 4711, 4712)
    await git.initialise(work, branch="trunk")

    owner = work.stat()
    assert {(p.lstat().st_uid, p.lstat().st_gid) for p in (work / ".git").rglob("*")} == {(owner.st_uid, owner.st_gid)}
    os.chown(work, os.geteuid(), os.getegid())
    run_git(work, "-c", "safe.directory=*", "add", "-A")
    assert run_git(work, "-c", "safe.directory=*", "branch", "--show-current") == "trunk"


async def test_a_repository_that_is_there_meanwhile_stays(git: Git, work: Path) -> None:
    run_git(work, "init", "-q", "-b", "theirs")
    before = everything(work)

    await git.initialise(work, branch="main")

    assert everything(work) == before


async def test_a_directory_that_takes_no_repository_is_an_error(git: Git) -> None:
    with pytest.raises(GitFailed, match="cannot be made a repository"):
        await git.initialise(Path("/proc/sys"), branch="main")
