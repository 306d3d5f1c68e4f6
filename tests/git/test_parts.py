"""Submodules and files of LFS: fetched with their whole, placed in its trees, and never delivered in its place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.core import errors
from runner.core.settings import Settings
from runner.git import parts
from runner.git.binary import GitBinary
from runner.git.remote import RemoteAccess
from runner.ports.git import Author, PartsRequest, SnapshotOptions
from tests.conformance.test_git import User
from tests.support.git_servers import Handler, Https, https, lfs_pointer, lfs_server
from tests.support.needs import GIT, GIT_LFS

BIG = b"\0big\n" * 1000
OPTIONS = SnapshotOptions("work", Author("a", "a@b", 1))

pytestmark = GIT.mark


@pytest.mark.parametrize(
    ("url", "whole", "found"),
    [
        ("../b.git", "https://h.test/o/a", "https://h.test/o/b.git"),
        ("../b.git", "https://h.test/o/a.git/", "https://h.test/o/b.git"),
        ("./b", "https://h.test/o/a", "https://h.test/o/a/b"),
        ("../../p/b", "git@h.test:o/a", "git@h.test:p/b"),
        ("../b", "git@h.test:a", "git@h.test:b"),
        ("ssh://git@h.test/b", None, "ssh://git@h.test/b"),
        ("../b", None, None),
        ("../../../../b", "https://h.test/a", None),
        ("file:///etc", "https://h.test/a", None),
        ("/etc", None, None),
        ("ext::sh -c touch", None, None),
        ("-uhttps://h.test/a", None, None),
        ("https://user:word@h.test/a", None, None),
    ],
)
def test_the_url_of_a_submodule_is_held_to_the_rules_of_every_url(
    url: str, whole: str | None, found: str | None
) -> None:
    if found is not None:
        assert parts.resolve_link(url, whole) == found
        return
    with pytest.raises(errors.BadUrl):
        parts.resolve_link(url, whole)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (lfs_pointer(BIG), True),
        (lfs_pointer(BIG) + b"more", False),
        (lfs_pointer(BIG).replace(b"oid", b"ext-0-x sha256:0\noid"), False),
        (lfs_pointer(b""), False),
        (lfs_pointer(BIG).replace(b"\n", b"\r\n"), False),
    ],
)
def test_a_pointer_is_what_git_lfs_writes(content: bytes, found: bool) -> None:
    assert (parts.pointer_in(content) is not None) is found


def _lie(handler: Handler) -> bool:
    if not handler.path.startswith("/lfs/"):
        return False
    handler.start(200, Content_Type="application/octet-stream", Content_Length=str(len(BIG)))
    handler.wfile.write(BIG[::-1])
    return True


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Https]:
    with https(tmp_path / "served", tmp_path) as server:
        server.server.answer = lfs_server([BIG])
        yield server


def repository(tmp_path: Path, name: str, files: dict[str, bytes], submodules: dict[str, tuple[str, str]]) -> str:
    """Make a repository whose submodules are, by path, a URL and a commit."""
    user = User(tmp_path / "served" / name).init()
    listed = "".join(f'[submodule "{path}"]\n\tpath = {path}\n\turl = {url}\n' for path, (url, _) in submodules.items())
    for path, content in {**files, **({".gitmodules": listed.encode()} if submodules else {})}.items():
        (user.top / path).write_bytes(content)
    user("add", "--all")
    for path, (_, commit) in submodules.items():
        user("update-index", "--add", "--cacheinfo", f"160000,{commit},{path}")
    user("commit", "--quiet", "--message", "first")
    return user("rev-parse", "HEAD")


def adapter(tmp_path: Path, server: Https) -> GitBinary:
    env = {"PATH": os.environ["PATH"], "RUNNER_HOME": str(tmp_path / "state"), **server.env}
    return GitBinary(shutil.which("git") or "", RemoteAccess.of(Settings.from_env(env), env["PATH"]))


@GIT_LFS.mark
async def test_a_whole_with_submodules_in_each_other_and_files_of_lfs(tmp_path: Path, served: Https) -> None:
    """Fetched once, placed twice; a snapshot has the links and pointers, and changes in them are told."""
    inner = repository(tmp_path, "o/inner", {"deep": b"deep\n", "big.bin": lfs_pointer(BIG)}, {})
    lib = repository(tmp_path, "o/lib", {"code": b"code\n"}, {"vendor/inner": ("../inner", inner)})
    url = f"{served.url}/o/whole"
    files = {"own": b"own\n", "large.bin": lfs_pointer(BIG)}
    commit = repository(tmp_path, "o/whole", files, {"lib": (f"{served.url}/o/lib", lib)})
    git, private, tree = adapter(tmp_path, served), tmp_path / "private", tmp_path / "tree"
    await git.fetch_url(url, commit, into=private, depth=1)
    wanted = PartsRequest(url=url, path=None, submodules=True, lfs=True)

    found = await git.fetch_parts(private, commit, wanted)
    tree.mkdir()
    await git.check_out(private, commit, into=tree, branch="main", origin=url)

    assert [one.path for one in found.submodules] == [b"lib", b"lib/vendor/inner"]
    assert (tree / "lib/vendor/inner/deep").read_text() == "deep\n"
    assert (tree / "lib/vendor/inner/big.bin").read_bytes() == (tree / "large.bin").read_bytes() == BIG
    assert [*tree.rglob(".git")] == [tree / ".git"]
    assert User(tree)("status", "--porcelain") == ""
    asked = served.asked
    assert (await git.part_changes(private, tree)).new == 0
    again = await git.snapshot(private, tree, commit, OPTIONS)
    assert await git.changes(private, commit, again.commit) == []

    (tree / "own").write_text("changed\n")
    (tree / "lib/code").write_text("changed\n")
    (tree / "lib/new").write_text("new\n")
    (tree / "lib/vendor/inner/deep").unlink()
    (tree / "large.bin").write_bytes(BIG[::-1])
    changed = await git.part_changes(private, tree)
    snapshot = await git.snapshot(private, tree, commit, OPTIONS)
    clean = tmp_path / "clean"
    clean.mkdir()
    entries = await git.materialise(private, snapshot.commit, clean)

    assert changed.submodules == {b"lib/code": "content", b"lib/vendor/inner/deep": "missing"}
    assert changed.lfs == {b"large.bin": "content"}
    assert changed.new == 1
    assert [change.path for change in await git.changes(private, commit, snapshot.commit)] == [b"own"]
    assert (clean / "lib/code").read_text() == "code\n"
    assert (clean / "large.bin").read_bytes() == BIG
    assert b"lib/vendor/inner/deep" in {entry.path for entry in entries}
    assert await git.compare(private, snapshot.commit, clean) == {}
    assert served.asked == asked

    other = tmp_path / "other"
    await git.fetch_url(url, commit, into=other, depth=1)
    await git.fetch_parts(other, commit, wanted)
    assert served.asked == asked  # all of it was mirrored


@GIT_LFS.mark
async def test_content_that_a_server_makes_up_is_refused(tmp_path: Path, served: Https) -> None:
    url = f"{served.url}/o/whole"
    commit = repository(tmp_path, "o/whole", {"large.bin": lfs_pointer(BIG)}, {})
    git, private = adapter(tmp_path, served), tmp_path / "private"
    await git.fetch_url(url, commit, into=private, depth=1)
    served.server.answer = lambda handler: lfs_server([BIG])(handler) if "batch" in handler.path else _lie(handler)

    with pytest.raises(errors.RunnerError):
        await git.fetch_parts(private, commit, PartsRequest(url=url, path=None, lfs=True))
    with pytest.raises(errors.RemoteOverLimit):
        await git.fetch_parts(private, commit, PartsRequest(url=url, path=None, lfs=True, lfs_bytes=100))
