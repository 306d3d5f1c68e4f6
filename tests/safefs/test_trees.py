"""Work on trees that an agent may have shaped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner.safefs import trees


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


def test_a_name_that_a_terminal_obeys_or_that_is_no_text_is_not_copied_out(tmp_path: Path) -> None:
    """``ls`` in the directory of the user would obey it."""
    (tmp_path / "from" / "in" / "\x9b2J").mkdir(parents=True)
    for name in (b"a\x1b[31m\nb", b"\xff", "Ursache für 東京.md".encode(), b"in/\xe2\x80\xaegpj.md"):
        (tmp_path / "from" / os.fsdecode(name)).touch()

    left = trees.copy_out(tmp_path / "from", tmp_path / "to", to_people=True)

    assert [name.partition(": ")[0] for name in left] == [
        r"'a\x1b[31m\nb'",
        r"'in/\x9b2J'",
        r"'in/\u202egpj.md'",
        r"'\udcff'",
    ]
    assert {name.partition(": ")[2] for name in left} == {"its name is not plain text"}
    assert sorted(p.name for p in (tmp_path / "to").rglob("*")) == ["Ursache für 東京.md", "in"]


def test_names_of_the_runners_own_logs_are_not_copied_out(tmp_path: Path) -> None:
    """An agent that leaves one of a later day would be taken for the last run on the incident; one of now would be
    in the place of the real one."""
    later = "triage_x_20991231_235959.log"
    (tmp_path / "from" / "notes").mkdir(parents=True)
    (tmp_path / "from" / "triage_x_20991231_235958.log").mkdir()
    for name in (later, f"notes/{later}", "triage.log"):
        (tmp_path / "from" / name).touch()

    left = trees.copy_out(tmp_path / "from", tmp_path / "to", to_people=True)

    assert [name.partition(": ")[2] for name in left] == ["the runner's own logs have such names"] * 2
    copied = sorted(str(p.relative_to(tmp_path / "to")) for p in (tmp_path / "to").rglob("*") if p.is_file())
    assert copied == [f"notes/{later}", "triage.log"]
