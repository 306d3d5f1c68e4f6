"""A server for the tests of this room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.server import Served, serving
from tests.support.situations import Project


@pytest.fixture
def served(project: Project) -> Iterator[Served]:
    with serving(project) as server:
        yield server
