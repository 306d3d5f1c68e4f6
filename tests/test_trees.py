"""Work on trees that an agent may have shaped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner import trees


def test_a_link_in_place_of_a_tree_changes_nothing_of_what_it_leads_to(tmp_path: Path) -> None:
    """``chmod`` by name follows a link: an agent that owns the parent could open any directory of the host."""
    (tmp_path / "outside").mkdir(mode=0o550)
    (tmp_path / "tmp").symlink_to("outside")

    with pytest.raises(NotADirectoryError):
        trees.remove(tmp_path / "tmp")

    assert (tmp_path / "outside").stat().st_mode & 0o777 == 0o550


def test_a_tree_of_closed_directories_and_links_out_is_removed_and_nothing_else(tmp_path: Path) -> None:
    top, outside = tmp_path / "top", tmp_path / "outside"
    (top / "a" / "b").mkdir(parents=True)
    outside.mkdir()
    (outside / "f").touch()
    outside.chmod(0o550)
    (top / "a" / "out").symlink_to(outside)
    (top / "a" / "b" / "out").symlink_to(outside)
    (top / "a" / "b").chmod(0)
    (top / "a").chmod(0)

    assert trees.remove(top) == []

    assert not top.exists()
    assert ([p.name for p in outside.iterdir()], outside.stat().st_mode & 0o777) == (["f"], 0o550)


def test_only_regular_files_are_copied_out(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "big").write_bytes(b"x" * 1000)
    (tmp_path / "from" / "small").write_bytes(b"y")
    os.mkfifo(tmp_path / "from" / "pipe")
    (tmp_path / "from" / "out").symlink_to("/etc/passwd")

    left = trees.copy_out(tmp_path / "from", tmp_path / "to")

    assert left == ["'out': not a regular file", "'pipe': not a regular file"]
    assert sorted(p.name for p in (tmp_path / "to").iterdir()) == ["big", "small"]
