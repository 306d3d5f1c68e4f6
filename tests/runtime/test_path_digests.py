"""What a digest of protected content notices, and that telling it follows nothing and holds little."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.runtime import path_digests
from runner.runtime.path_digests import digests


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "p" / "inner").mkdir(parents=True)
    (root / "p" / "file").write_text("one")
    (root / "p" / "inner" / "file").write_text("two")
    (root / "p" / "link").symlink_to("file")
    (root / "other").write_text("other")
    return root


def replaced_by_a_link(root: Path) -> None:
    (root / "p" / "file").unlink()
    (root / "p" / "file").symlink_to("/etc/hostname")


def moved(root: Path) -> None:
    (root / "p" / "inner" / "file").rename(root / "p" / "inner" / "gile")


def retargeted(root: Path) -> None:
    (root / "p" / "link").unlink()
    (root / "p" / "link").symlink_to("inner/file")


def behind_a_link(root: Path) -> None:
    (root / "p").rename(root / "q")
    (root / "p").symlink_to("q")


def a_name_that_is_no_text(root: Path) -> None:
    (root / "p" / os.fsdecode(b"\xff\n")).touch()


CHANGES: dict[str, Callable[[Path], object]] = {
    "content": lambda root: (root / "p" / "inner" / "file").write_text("owt"),
    "mode": lambda root: (root / "p" / "file").chmod(0o755),
    "mode of a directory": lambda root: (root / "p" / "inner").chmod(0o700),
    "new name": a_name_that_is_no_text,
    "moved": moved,
    "gone": lambda root: (root / "p" / "file").unlink(),
    "link for a file": replaced_by_a_link,
    "another target": retargeted,
    "a FIFO": lambda root: os.mkfifo(root / "p" / "fifo"),
    "link on the way": behind_a_link,
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_gives_another_digest(tree: Path, change: str) -> None:
    before = digests(tree, ["p/"])
    assert digests(tree, ["p/"]) == before
    CHANGES[change](tree)

    assert digests(tree, ["p/"]) != before


def test_what_is_beside_it_and_when_it_was_read_does_not_matter(tree: Path) -> None:
    before = digests(tree, ["p", "p/file"])
    (tree / "other").write_text("more")
    os.utime(tree / "p" / "file", (1, 1))

    assert digests(tree, ["p", "p/file"]) == before


def test_nothing_is_told_from_something_empty(tree: Path) -> None:
    assert digests(tree, ["gone", "gone/deeper", "gone/"]) == {"gone": "", "gone/deeper": "", "gone/": ""}
    (tree / "gone").touch()

    assert digests(tree, ["gone"])["gone"] != ""


def test_content_over_the_bound_is_told_by_when_it_changed(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_digests, "MAX_READ", 4)
    before = digests(tree, ["p"])
    assert digests(tree, ["p"]) == before
    (tree / "p" / "inner" / "file").write_text("owt")

    assert digests(tree, ["p"]) != before


def test_a_large_file_is_not_held_in_memory(tree: Path) -> None:
    with (tree / "p" / "large").open("wb") as file:
        file.truncate(64 << 20)
    tracemalloc.start()
    digests(tree, ["p"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 8 << 20


def test_it_can_be_stopped_at_each_entry(tree: Path) -> None:
    checked: list[int] = []
    digests(tree, ["p"], checkpoint=lambda: checked.append(1))

    assert len(checked) == 5
