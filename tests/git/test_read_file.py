"""Reading one file of a commit, with both adapters: never the work tree, never through a link."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner.core.errors import BadSource, HostileTree, UnknownCommit
from runner.core.settings import Settings
from runner.git import open_git
from runner.ports.git import Git
from tests.support.situations import git as user

FILE = ".agentgate/policy.yaml"


@pytest.fixture(params=["git", "dulwich"])
def git(request: pytest.FixtureRequest) -> Git:
    found = open_git(Settings.from_env({"PATH": os.environ["PATH"] if request.param == "git" else ""}))
    assert found.name == request.param
    return found


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A repository whose work tree is not as its commit."""
    path = tmp_path / "repo"
    (path / ".agentgate").mkdir(parents=True)
    user(path, "init", "-q", "-b", "main")
    (path / FILE).write_text("committed\n")
    (path / "big").write_bytes(b"x" * 101)
    (path / "link").symlink_to("/etc/passwd")
    user(path, "add", "-A")
    user(path, "commit", "-qm", "first")
    (path / FILE).write_text("written by an agent\n")
    return path


async def test_a_file_is_read_as_it_was_committed(git: Git, top: Path) -> None:
    commit = user(top, "rev-parse", "HEAD")
    user(top, "worktree", "add", "-q", "-b", "side", "../side")

    assert await git.read_file(top, commit, FILE, limit=100) == b"committed\n"
    assert await git.read_file(top.parent / "side", commit, FILE, limit=100) == b"committed\n"


@pytest.mark.parametrize("name", ["nothing", ".agentgate/nothing", "big/nothing", "link/nothing"])
async def test_a_path_that_the_commit_does_not_have_is_none(git: Git, top: Path, name: str) -> None:
    assert await git.read_file(top, user(top, "rev-parse", "HEAD"), name, limit=100) is None


@pytest.mark.parametrize("name", ["link", ".agentgate", "big"], ids=["link", "directory", "too big"])
async def test_what_is_no_small_regular_file_is_refused(git: Git, top: Path, name: str) -> None:
    with pytest.raises(HostileTree, match=name):
        await git.read_file(top, user(top, "rev-parse", "HEAD"), name, limit=100)


async def test_a_missing_commit_or_repository_is_an_error(git: Git, top: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownCommit):
        await git.read_file(top, "0" * 39 + "1", FILE, limit=100)
    with pytest.raises(BadSource):
        await git.read_file(tmp_path / "nowhere", "0" * 40, FILE, limit=100)
