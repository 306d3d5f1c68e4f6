"""Safe reads below a directory that somebody else changes meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.safefs.safe_open import Opener, open_beneath, open_by_name, open_in_kernel, read_beneath
from tests.runtime.test_tree_scan import tree

openers = pytest.mark.parametrize("opener", [open_in_kernel, open_by_name], ids=["kernel", "by name"])


@openers
@pytest.mark.parametrize("path", ["link", "dirlink/f", "d/up/f", "d/absolute"])
@pytest.mark.scenario("WSM-15")
def test_no_opener_follows_a_link_anywhere_in_a_path(tmp_path: Path, opener: Opener, path: str) -> None:
    tree(tmp_path, "f", "d/f")
    for name, target in (("link", "f"), ("dirlink", "d"), ("d/up", ".."), ("d/absolute", "/etc/passwd")):
        (tmp_path / name).symlink_to(target)
    top = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match=r"symbolic link|Not a directory"):
            opener(top, path, os.O_RDONLY | os.O_NOFOLLOW)
        os.close(opener(top, "d/f", os.O_RDONLY | os.O_NOFOLLOW))
    finally:
        os.close(top)


@openers
def test_no_read_gets_outside_while_a_directory_and_a_link_change_places(tmp_path: Path, opener: Opener) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    tree(root, "d/f")
    tree(outside, "f")
    (outside / "f").write_text("OUTSIDE")
    (root / "other").symlink_to(outside)
    swapped = threading.Event()

    def swap() -> None:
        for _ in range(2_000):
            for old, new in (("d", "kept"), ("other", "d"), ("d", "other"), ("kept", "d")):
                os.rename(root / old, root / new)
        swapped.set()

    swapping = threading.Thread(target=swap)
    swapping.start()
    top = os.open(root, os.O_RDONLY)
    read = set()
    while not swapped.is_set():
        try:
            with open(opener(top, "d/f", os.O_RDONLY | os.O_NOFOLLOW)) as file:
                read.add(file.read())
        except OSError:
            continue
    swapping.join()
    os.close(top)

    assert read <= {"x"}


def test_a_report_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "report.md").write_bytes(b"y" * 3_000_000)

    assert read_beneath(tmp_path, "a/report.md", 3_000_000) == b"y" * 3_000_000


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_bytes(b"z" * 101), "longer than 100 bytes"),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.mkdir(), "not a regular file"),
        (lambda path: path.symlink_to("/etc/passwd"), "symbolic link"),
        (lambda path: None, "No such file"),
    ],
    ids=["too long", "FIFO", "directory", "link", "missing"],
)
def test_a_report_that_is_no_readable_file_is_an_error_at_once(
    tmp_path: Path, make: Callable[[Path], object], words: str
) -> None:
    make(tmp_path / "r")

    with pytest.raises(OSError, match=words):
        read_beneath(tmp_path, "r", 100)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x"])
@pytest.mark.scenario("WSM-15")
def test_a_report_path_outside_its_root_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(OSError, match="leaves its root"):
        open_beneath(tmp_path, path)


def test_a_root_that_was_replaced_by_a_link_is_refused(tmp_path: Path) -> None:
    tree(tmp_path, "outside/f")
    (tmp_path / "output").symlink_to("outside")

    with pytest.raises(OSError, match="Not a directory"):
        read_beneath(tmp_path / "output", "f", 100)
