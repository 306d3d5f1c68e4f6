"""Rows of parametrized tests that are for the night."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def nightly(*values: object, id: str | None = None) -> ParameterSet:
    return pytest.param(*values, id=id, marks=pytest.mark.nightly)


def rows(table: Mapping[str, Any], *, by_day: Collection[str]) -> list[ParameterSet]:
    """The rows of a table, by name; all but those ``by_day`` are for the night. A tuple is several values."""
    made = {name: row if isinstance(row, tuple) else (row,) for name, row in table.items()}
    return [pytest.param(*row, id=name) if name in by_day else nightly(*row, id=name) for name, row in made.items()]
