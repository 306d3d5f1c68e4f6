"""The pages of the reference that are made from the program are those of this program."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path

import pytest

from tests.support.page_situations import ROOT

PAGES: dict[Path, str] = run_path(str(ROOT / "docs" / "write_reference.py"))["pages"]()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT / "docs")))
def test_a_page_of_the_reference_is_fresh(path: Path) -> None:
    assert path.read_text() == PAGES[path], "make docs writes it anew"
