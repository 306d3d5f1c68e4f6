"""What may have changed in a tree is told by its stamps alone, on a tree without a layer over it, too."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.ports.git import TreeEntry
from runner.runtime.file_states import Untouched


def to_link(top: Path) -> None:
    (top / "src").rename(top / "was")
    (top / "src").symlink_to("was")


@pytest.mark.parametrize(
    ("act", "written"),
    [
        pytest.param(lambda top: (top / "src" / "built").write_text("x"), False, id="a file beside"),
        pytest.param(lambda top: (top / "out").mkdir(), False, id="a folder beside"),
        pytest.param(lambda top: (top / "src" / "a").write_text("two"), True, id="as long as before"),
        pytest.param(lambda top: (top / "src" / "a").unlink(), True, id="removed"),
        pytest.param(lambda top: (top / "src" / "a").chmod(0o755), True, id="of another mode"),
        pytest.param(to_link, True, id="its folder a link to where it was"),
    ],
)
def test_what_was_written_is_told_from_what_is_beside(
    tmp_path: Path, act: Callable[[Path], object], written: bool
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a").write_text("one")
    tree = os.open(tmp_path, os.O_PATH)
    with Untouched(tree, [TreeEntry(b"src/a", 0o100644, "", 3)]) as own:
        os.close(tree)
        assert not own.written()
        time.sleep(0.02)  # the kernel's stamps are some milliseconds apart; a sandbox takes longer to start
        act(tmp_path)
        assert own.written() is written
        assert not own.written()
