"""Turn rows into values. A bit that flips in SQLite's file may change the type of a column's value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


def as_rows(kind: type[T], found: Iterable[Sequence[object]]) -> Iterator[T]:
    """Make values of rows. Raises ``TypeError``, which the store reports as damage, for a column of another type."""
    kinds = _kinds(kind)  # type: ignore[arg-type]  # classes are hashable
    for values in found:
        for (name, wanted), value in zip(kinds.items(), values, strict=True):
            if not isinstance(value, wanted):
                raise TypeError(f"`{name}` is {value!r}")
        yield kind(**dict(zip(kinds, values, strict=True)))


@cache
def _kinds(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def where(*conditions: tuple[str, Sequence[Any] | None]) -> tuple[str, list[Any]]:
    """Return the clause that joins the conditions that have values, and these."""
    asked = [(condition, values) for condition, values in conditions if values is not None]
    clause = f"WHERE {' AND '.join(condition for condition, _ in asked)}" if asked else ""
    return clause, [value for _, values in asked for value in values]


def storable(path: str) -> str:
    """Return a path as text that SQLite takes, whatever bytes it has."""
    return path.encode(errors="backslashreplace").decode()
