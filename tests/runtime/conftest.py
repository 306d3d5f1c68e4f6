"""Who lists the directories of a scan: Python, programs, or Python until programs are worth their start."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from runner.core import compiled_programs
from runner.runtime import tree_scan
from runner.runtime.tree_scan import OpenLister
from runner.safefs import listing


@pytest.fixture(scope="session")
def openers() -> Iterator[dict[str, OpenLister]]:
    """Each by its name. The program lies where an ordinary user reaches it."""
    found = compiled_programs.find("lister")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        program = Path(shutil.copy(found.path, folder))

        def compiled(
            top: int, most: int, skipped: Sequence[str]
        ) -> AbstractContextManager[listing.Lister[tree_scan._Place]]:
            return listing.open_worker_lister(program, top, most, skipped)

        yield {"in Python": listing.open_in_process_lister, "compiled": compiled, "as installed": listing.open_lister}


@pytest.fixture(params=["in Python", "compiled"])
def scan(request: pytest.FixtureRequest, openers: dict[str, OpenLister]) -> partial[tree_scan.ScanResult]:
    return partial(tree_scan.scan, open_lister=openers[request.param])
