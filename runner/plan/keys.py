"""Content keys: what decides the result of each step, in named parts, so that what differs can be said.

A part is a short value as it is, or else a digest. What never decides a result is in no part: deadlines, the place
where something was written, the ids of runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from runner.core.codec import canonical, digest
from runner.core.ids import is_commit_id
from runner.core.sanitize import excerpt
from runner.plan.model import Step

Parts = Mapping[str, str]
Keys = Mapping[str, Parts]

_SHORT = 80  # characters of a value that is kept as it is


def parts(values: Mapping[str, object]) -> dict[str, str]:
    """The parts of named values; those that are ``None`` are left out."""
    return {name: _part(value) for name, value in values.items() if value is not None}


def _part(value: object) -> str:
    text = canonical(value).decode()
    return text if isinstance(value, str | int | float) and len(text) <= _SHORT else digest(value)


def digests(steps: Sequence[Step], keys: Keys) -> dict[str, str]:
    """One key a step, over its parts and the keys of what it needs, for steps that come after those."""
    found: dict[str, str] = {}
    for step in steps:
        found[step.id] = digest([keys.get(step.id, {}), [found[need] for need in step.needs]])
    return found


def differences(old: Parts, new: Parts) -> Iterator[str]:
    """Name the parts of a step that differ, in words."""
    for name in (*new, *(name for name in old if name not in new)):
        was, becomes = old.get(name), new.get(name)
        if was is None or becomes is None:
            yield f"{name} is {'new' if was is None else 'gone'}"
        elif was != becomes:
            short = not any(part.startswith("sha256:") for part in (was, becomes))
            yield f"{name} changed" + (f" from {_word(was)} to {_word(becomes)}" if short else "")


def _word(part: str) -> str:
    value = json.loads(part)
    if isinstance(value, str):
        return value[:12] if is_commit_id(value) else excerpt(value)
    return part
