from __future__ import annotations

import pytest

from runner.core.errors import BadRef, HostileTree, UnknownCommit
from runner.git import tree
from runner.ports.git import Author, Change, SnapshotOptions, TreeEntry


def leaf(path: str | bytes, mode: int = tree.FILE, id: str = "a" * 40) -> TreeEntry:
    return TreeEntry(path.encode() if isinstance(path, str) else path, mode, id, 1)


@pytest.mark.parametrize(
    "name", ["main", "feature/auth", "v1.2", "a-b_c", "fix/#12", "übung", "a@b", "1", "c++", "f" * 39]
)
def test_ordinary_branch_names_are_taken(name: str) -> None:
    tree.check_branch(name)


@pytest.mark.parametrize(
    "name", ["", "-x", "a..b", "a.lock", "a.", "@{u}", "HEAD", "a b", "a\0", "a/.b", "e" * 64, "a\n"]
)
def test_anything_else_is_no_branch_name(name: str) -> None:
    with pytest.raises(BadRef):
        tree.check_branch(name)


@pytest.mark.parametrize("text", ["", "HEAD", "a" * 39, "A" * 40, "a" * 41, "g" * 40, "a" * 40 + "\n"])
def test_a_commit_id_is_40_or_64_lower_case_digits(text: str) -> None:
    tree.check_commit_id("a" * 40)
    tree.check_commit_id("0" * 64)
    with pytest.raises(UnknownCommit):
        tree.check_commit_id(text)


@pytest.mark.parametrize(
    "paths",
    [
        pytest.param(["a/x", "A/y"], id="folders"),
        pytest.param(["deep/a/x", "deep/A/y"], id="inner folders"),
        pytest.param(["a", "a/x"], id="leaf and folder"),
        pytest.param(["a/x", "a"], id="folder and leaf"),
        pytest.param(["a", "a"], id="twice"),
        pytest.param(["a/x", "b", "a/x"], id="twice, apart"),
        pytest.param(["a/x", "b/.git/y"], id="inside"),
        pytest.param(["/etc/passwd"], id="absolute"),
        pytest.param(["a" * 256], id="longer than a name can be"),
        pytest.param(["é" * 128], id="longer in bytes"),
        pytest.param(["/".join(["a" * 249] * 17)], id="longer than a path can be"),
    ],
)
def test_a_tree_that_no_disk_can_hold_is_refused(paths: list[str]) -> None:
    with pytest.raises(HostileTree):
        tree.check_names(map(leaf, paths))


def test_an_ordinary_tree_is_not_refused() -> None:
    tree.check_names(map(leaf, ["a/b/c", "a/b/d", "a/c", "b", b"\xff", b"\xfe", "a.b", "a-b"]))


def test_changes_are_told_apart() -> None:
    before = [leaf("same"), leaf("gone"), leaf("mode"), leaf("content"), leaf("type")]
    after = [
        leaf("same"),
        leaf("mode", tree.EXECUTABLE),
        leaf("content", id="b" * 40),
        leaf("type", tree.LINK),
        leaf("a new one"),
    ]

    assert tree.changes(before, after) == [
        Change(b"a new one", "A", after[4]),
        Change(b"content", "M", after[2]),
        Change(b"gone", "D", None),
        Change(b"mode", "M", after[1]),
        Change(b"type", "T", after[3]),
    ]


def test_a_folder_covers_what_is_below_it_and_no_namesake() -> None:
    covered = tree.covers(frozenset({b"a/b", b"c"}))

    assert [p for p in (b"a", b"a/b", b"a/b/x/y", b"a/bc", b"c", b"c/d", b"cd") if covered(p)] == [
        b"a/b",
        b"a/b/x/y",
        b"c",
        b"c/d",
    ]


def test_submodules_are_kept_unless_replaced() -> None:
    base = [
        leaf("kept", tree.GITLINK),
        leaf("now a file", tree.GITLINK),
        leaf("now a folder", tree.GITLINK),
        leaf("file"),
    ]
    wanted = SnapshotOptions("m", Author("n", "e", 0))

    assert tree.carried_over(base, [b"now a file", b"now a folder/x"], wanted) == base[:1]


def test_identity_cannot_add_lines_to_a_commit() -> None:
    author = Author("Eve <e@x>\nparent 0", "e@x>\n", 5)

    text = tree.commit_object("t" * 40, None, SnapshotOptions("m\0\n\n", author)).decode()

    who = "Eve e@xparent 0 <e@x> 5 +0000"
    assert text == f"tree {'t' * 40}\nauthor {who}\ncommitter {who}\n\nm\n"
