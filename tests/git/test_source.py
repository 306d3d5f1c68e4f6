from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import trio

from runner.core.errors import GitFailed
from runner.core.settings import Settings
from runner.git import open_git
from runner.git._run import run
from runner.git.binary import GitBinary
from runner.ports.git import Author, SnapshotOptions
from tests.support.folder_contents import put
from tests.support.needs import GIT

PROGRAM = shutil.which("git") or ""
NEEDS_GIT = GIT.mark


def settings(path: str) -> Settings:
    return Settings.from_env({"PATH": path, "RUNNER_HOME": "/nowhere"})


def script(folder: Path, text: str) -> Path:
    put(folder / "git", f"#!/bin/sh\n{text}\n", 0o755)
    return folder


@NEEDS_GIT
def test_a_git_of_the_host_is_taken() -> None:
    assert open_git(settings(os.path.dirname(PROGRAM))).name == "git"


@pytest.mark.parametrize(
    "text", ["echo git version 2.31.8", "echo something else", "exit 1"], ids=["too old", "not git", "broken"]
)
def test_without_a_git_that_will_do_the_library_serves(tmp_path: Path, text: str) -> None:
    assert open_git(settings(str(script(tmp_path / "bin", text)))).name == "dulwich"


@pytest.mark.parametrize("path", ["", "/nowhere", ".", "bin"])
def test_a_git_in_a_relative_folder_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    script(tmp_path, "echo git version 2.50.0")
    script(tmp_path / "bin", "echo git version 2.50.0")
    monkeypatch.chdir(tmp_path)

    assert open_git(settings(path)).name == "dulwich"


async def test_nothing_of_the_hosts_environment_reaches_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_EXEC_PATH", "/nowhere")
    monkeypatch.setenv("SECRET", "x")
    folder = script(tmp_path / "bin", f"env > {tmp_path}/env; pwd >> {tmp_path}/env; exit 3")

    with pytest.raises(GitFailed, match="ended with 3"):
        await GitBinary(str(folder / "git")).tree_entries(tmp_path, "a" * 40)

    seen = (tmp_path / "env").read_text().splitlines()
    names = {line.partition("=")[0] for line in seen[:-1]}
    assert {name for name in names if not name.startswith("GIT_")} <= {"HOME", "LC_ALL", "PWD", "SHLVL", "_", "PATH"}
    assert "GIT_EXEC_PATH" not in names
    assert seen[-1] == "/"


@pytest.mark.parametrize("deaf", [False, True], ids=["listens", "deaf to TERM"])
async def test_cancelling_ends_the_whole_group(tmp_path: Path, deaf: bool) -> None:
    trap = "trap '' TERM" if deaf else ":"
    pids = tmp_path / "pids"
    text = f"{trap}; (trap '' TERM; sleep 60) & echo $! $$ > {pids}.new; mv {pids}.new {pids}; wait"
    children: list[int] = []

    async def cancel_when_running(scope: trio.CancelScope) -> None:
        while not pids.exists():
            await trio.sleep(0.01)
        children.extend(map(int, pids.read_text().split()))
        scope.cancel()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as scope:
                nursery.start_soon(cancel_when_running, scope)
                await run(["/bin/sh", "-c", text], env={"PATH": os.defpath})

    assert scope.cancelled_caught
    assert len(children) == 2
    with trio.fail_after(30):  # a kill is certain, but the kernel takes its moment
        while any(map(_alive, children)):
            await trio.sleep(0.01)


def _alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return False


async def test_words_are_bounded_and_output_is_not() -> None:
    text = "head -c 300000 /dev/zero | tr '\\0' x; head -c 300000 /dev/zero | tr '\\0' y >&2; cat; exit 7"

    ended = await run(["/bin/sh", "-c", text], env={"PATH": os.defpath}, stdin=b"in")

    assert (ended.code, len(ended.stdout), ended.stdout[-2:], len(ended.stderr)) == (7, 300_002, b"in", 4096)


@NEEDS_GIT
async def test_git_is_started_for_nothing_that_needs_no_git(tmp_path: Path) -> None:
    """Most triages change nothing in their workspace, and each process costs milliseconds."""
    log = tmp_path / "log"
    counting = script(tmp_path / "bin", f'echo "$1" >> {log}; exec {PROGRAM} "$@"')
    git = GitBinary(str(counting / "git"))
    tree, repository = tmp_path / "tree", tmp_path / "repository"
    tree.mkdir()

    await git.create_empty(repository)
    snapshot = await git.snapshot(repository, tree, None, SnapshotOptions("nothing", Author("a", "a@b", 1)))
    assert not log.exists()
    assert await git.changes(repository, None, snapshot.commit) == []
    shown = await run([PROGRAM, "cat-file", "commit", snapshot.commit], env={"GIT_DIR": str(repository)})
    assert shown.stdout.decode().splitlines()[0] == f"tree {snapshot.tree}"

    (tree / "new").write_text("x")
    log.write_text("")
    more = await git.snapshot(repository, tree, snapshot.commit, SnapshotOptions("more", Author("a", "a@b", 2)))
    assert log.read_text().split() == ["ls-tree", "update-index", "write-tree"]

    log.write_text("")
    await git.patch(repository, snapshot.commit, more.commit, tmp_path / "work.patch")
    assert log.read_text().split() == ["diff-tree"]
