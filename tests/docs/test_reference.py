"""The pages of the reference that are made from the program are those of this program."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path

from tests.support.page_situations import ROOT


def test_the_pages_of_the_reference_are_fresh() -> None:
    pages: dict[Path, str] = run_path(str(ROOT / "docs" / "write_reference.py"))["pages"]()

    assert [path for path, text in pages.items() if path.read_text() != text] == [], "make docs writes them anew"
