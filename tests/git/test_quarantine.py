"""Bundles that mean harm, and what of a good one is kept."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from runner.core.errors import GitFailed, GitMissing, HostileTree, RemoteOverLimit, RunnerError
from runner.git.binary import GitBinary
from runner.git.dulwich import GitDulwich
from tests.conformance.test_git import User
from tests.support.folder_contents import put
from tests.support.needs import GIT

PROGRAM = shutil.which("git") or ""
pytestmark = GIT.mark
GIT = GitBinary(PROGRAM)


class Agent(User):
    """A repository with a base of two files, and the runner's private one of it."""

    base: str
    private: Path

    def bundle(self, *what: str) -> bytes:
        words = [*(what or (f"{self.base}..HEAD",))]
        return subprocess.run(
            [PROGRAM, "-C", str(self.top), "bundle", "create", "-q", "-", *words], capture_output=True, check=True
        ).stdout

    def write(self, path: str, text: str) -> None:
        put(self.top / path, text)

    def plumb(self, entries: str) -> str:
        """A commit on HEAD of a tree that no checkout makes; ``entries`` in the words of ``mktree``."""
        tree = self("mktree", "--missing", stdin=entries.encode())
        commit = self("commit-tree", tree, "-p", "HEAD", "-m", "x")
        self("update-ref", "HEAD", commit)
        return commit


@pytest.fixture
async def agent(tmp_path: Path) -> Agent:
    agent = Agent(tmp_path / "agent")
    agent.init()
    agent.write("a", "one\n")
    agent.write("src/b", "two\n")
    agent.base = agent.commit("base")
    agent.private = tmp_path / "private.git"
    await GIT.fetch(agent.top, agent.base, into=agent.private, depth=1)
    return agent


def objects(repository: Path) -> list[str]:
    return sorted(str(path.relative_to(repository)) for path in (repository / "objects").rglob("*"))


async def test_each_commit_is_told_with_what_it_has_that_no_parent_has(agent: Agent, tmp_path: Path) -> None:
    before = objects(agent.private)
    agent.write("c", "side\n")
    side = agent.commit("side")
    agent("checkout", "-q", "-b", "other", agent.base)
    agent.write("a", "changed\n")
    (agent.top / "link").symlink_to("a")
    main = agent.commit("main")
    agent("merge", "-q", "--no-commit", side)
    agent.write("d", "evil\n")
    tip = agent.commit("merged")

    found = await GIT.quarantine(agent.private, agent.bundle(), agent.base, into=tmp_path / "q")

    seen = {each.commit: [change.path for change in each.changes] for each in found}
    assert seen == {side: [b"c"], main: [b"a", b"link"], tip: [b"d"]}
    assert found[-1].commit == tip
    assert [each.links for each in found if each.links] == [((b"link", b"a"),)]
    assert objects(agent.private) == before
    assert await GIT.find_commit(agent.private, tip) is None


async def test_what_is_accepted_is_a_part_of_the_repository_and_a_bundle_of_just_that(
    agent: Agent, tmp_path: Path
) -> None:
    secret = agent.blob(b"nobody has judged this\n")
    agent.write("c", "mine\n")
    tip = agent.commit("mine")
    header, _, _ = agent.bundle().partition(b"\n\n")
    listed = agent("rev-list", "--objects", f"{agent.base}..HEAD").splitlines()
    names = "\n".join([*(line.split()[0] for line in listed), secret])
    pack = subprocess.run(
        [PROGRAM, "-C", str(agent.top), "pack-objects", "--stdout", "-q"], input=names.encode(), capture_output=True,
        check=True,
    ).stdout  # fmt: skip

    await GIT.quarantine(agent.private, header + b"\n\n" + pack, agent.base, into=tmp_path / "q")
    tree = await GIT.accept(agent.private, tmp_path / "q", agent.base, tip, to=tmp_path / "kept")

    assert tree == agent("rev-parse", "HEAD^{tree}")
    assert [entry.path for entry in await GIT.entries(agent.private, tip)] == [b"a", b"c", b"src/b"]
    other = User(tmp_path / "other").init()
    other("fetch", "-q", str(agent.private), agent.base)
    other("bundle", "verify", "-q", str(tmp_path / "kept"))
    other("fetch", "-q", str(tmp_path / "kept"), "HEAD:refs/heads/got")
    assert other("rev-parse", "got") == tip
    with pytest.raises(subprocess.CalledProcessError):
        other("cat-file", "-e", secret)
    User(agent.private)("fsck", "--strict")


async def refused(agent: Agent, into: Path, bundle: bytes | None = None) -> RunnerError:
    before = objects(agent.private)
    with pytest.raises((HostileTree, RemoteOverLimit, GitFailed)) as caught:
        await GIT.quarantine(agent.private, bundle or agent.bundle(), agent.base, into=into)
    assert objects(agent.private) == before
    return caught.value


@pytest.mark.parametrize("what", ["two refs", "a branch", "no bundle", "nothing", "a filter", "cut", "other commit"])
async def test_a_bundle_is_head_and_nothing_else(agent: Agent, tmp_path: Path, what: str) -> None:
    agent.write("c", "mine\n")
    agent.commit("mine")
    good = agent.bundle()
    bundle = {
        "two refs": agent.bundle(f"{agent.base}..HEAD", "main"),
        "a branch": agent.bundle(f"{agent.base}..main"),
        "no bundle": b"#!/bin/sh\n" + good,
        "nothing": b"\n",
        "a filter": good.replace(b"# v2 git bundle\n", b"# v3 git bundle\n@filter=blob:none\n"),
        "cut": good[:-30],
        "other commit": good.replace(agent("rev-parse", "HEAD").encode(), b"1" * 40),
    }[what]

    await refused(agent, tmp_path / "q", bundle)


@pytest.mark.parametrize(
    ("mode", "kind", "name"),
    [
        ("100644", "blob", ".GIT"),
        ("040000", "tree", ".git "),
        ("100644", "blob", "A"),
        ("160000", "commit", "sub"),
        ("100644", "blob", ".."),
    ],
)
async def test_a_tree_that_must_not_reach_a_disk_is_refused_in_any_commit(
    agent: Agent, tmp_path: Path, mode: str, kind: str, name: str
) -> None:
    blob = agent("rev-parse", "HEAD:a")
    id = {"blob": blob, "tree": agent("rev-parse", "HEAD:src"), "commit": agent.base}[kind]
    agent.plumb(f"100644 blob {blob}\ta\n{mode} {kind} {id}\t{name}\n")
    agent("commit-tree", "HEAD^{tree}", "-p", "HEAD", "-m", "x")
    agent.plumb(f"100644 blob {blob}\ta\n")

    await refused(agent, tmp_path / "q")


async def test_commits_that_are_not_built_on_the_base_are_refused_though_it_is_among_them(
    agent: Agent, tmp_path: Path
) -> None:
    agent("checkout", "-q", "--orphan", "other")
    agent.write("x", "another history\n")
    agent.commit("orphan")
    agent("merge", "-q", "--allow-unrelated-histories", "-X", "ours", "-m", "m", agent.base)

    assert "built on" in (await refused(agent, tmp_path / "q")).message


async def test_an_object_that_is_missing_is_noticed(agent: Agent, tmp_path: Path) -> None:
    agent.plumb(f"100644 blob {'1' * 40}\ta\n")
    header = f"# v2 git bundle\n-{agent.base} \n{agent('rev-parse', 'HEAD')} HEAD\n\n".encode()
    names = "\n".join(agent("rev-parse", what) for what in ("HEAD", "HEAD^{tree}"))
    pack = subprocess.run(
        [PROGRAM, "-C", str(agent.top), "pack-objects", "--stdout", "-q"], input=names.encode(), capture_output=True,
        check=True,
    ).stdout  # fmt: skip

    await refused(agent, tmp_path / "q", header + pack)


async def test_a_tree_that_names_itself_a_billion_times_is_left(agent: Agent, tmp_path: Path) -> None:
    below = agent("rev-parse", "HEAD:a")
    for kind in ("100644", *["40000"] * 8):
        below = agent.tree(*((kind, below, b"%d" % n) for n in range(10)))
    commit = agent("commit-tree", below, "-p", "HEAD", "-m", "bomb")
    agent("update-ref", "HEAD", commit)

    await refused(agent, tmp_path / "q")


async def test_more_commits_than_a_person_would_read_are_too_many(agent: Agent, tmp_path: Path) -> None:
    stream = "".join(
        f"commit refs/heads/main\ncommitter a <a@b> {n} +0000\ndata 1\nx\n" + f"from {agent.base}\n" * (n == 0)
        for n in range(501)
    )
    agent("fast-import", "--quiet", "--force", stdin=stream.encode())

    assert (await refused(agent, tmp_path / "q")).message == "the agent made more than 500 commits"


async def test_the_library_takes_no_commits(agent: Agent, tmp_path: Path) -> None:
    with pytest.raises(GitMissing):
        await GitDulwich().quarantine(agent.private, b"", agent.base, into=tmp_path / "q")
