"""A patch as changed files."""

from __future__ import annotations

from runner.report.html.diff import FileDiff, files_of
from tests.support.pages import PATCH


def test_a_patch_is_split_into_files_and_a_line_like_a_header_is_a_change() -> None:
    text, binary = files_of(PATCH.splitlines())

    assert (text.name, text.added, text.removed) == ("src/app.py", 1, 2)
    assert ("removed", "--- a line that looks like a header") in text.lines
    assert binary == FileDiff("a picture.png", [("hunk", "new file mode 100644"), ("hunk", "binary, not shown")])
