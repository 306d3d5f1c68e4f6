"""The incident that a saved plan brings to a host which does not have it: its files, in a directory of the home."""

from __future__ import annotations

import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path, PurePosixPath
from secrets import token_hex

from runner.core.errors import BadPlanFile
from runner.core.sanitize import excerpt
from runner.ops.planning.plan_file import SavedPlan
from runner.safefs import trees

INCIDENTS = "incidents"  # in the home; `runner gc` removes what has had its time


def carried_incident(saved: SavedPlan) -> Path | None:
    """Return where the incident was, if the plan of one run brings it along and it is not here."""
    for name, wanted in saved.wanted.items():
        place, facts = wanted.incident, saved.facts.get(name)
        if place is None or facts is None or os.path.lexists(place) or len(saved.wanted) > 1:
            continue
        files = (facts.incident_files or {}).values()
        if all(file.sha256 in saved.texts for file in files):
            return place
    return None


def unpack_incident(saved: SavedPlan, home: Path) -> Path:
    """Make the directory of the incident, unless it is there already, and return it. Raises ``BadPlanFile``."""
    place = home / INCIDENTS / f"plan-{saved.content.removeprefix('sha256:')[:32]}"
    half = place.with_name(f".{place.name}.{token_hex(4)}")
    half.mkdir(mode=0o700, parents=True)
    try:
        for name, content in _contents(saved):
            file = half / name
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.write_bytes(content)
        if not place.exists():
            half.rename(place)
    finally:
        trees.remove(half)
    return place


def _contents(saved: SavedPlan) -> Iterator[tuple[str, bytes]]:
    for facts in saved.facts.values():
        for name, file in (facts.incident_files or {}).items():
            content = saved.texts[file.sha256].encode()
            parts = PurePosixPath(name).parts
            if ".." in parts or PurePosixPath(name).is_absolute() or sha256(content).hexdigest() != file.sha256:
                raise BadPlanFile(f"the plan brings a file `{excerpt(name)}` that no plan has", hint="plan again")
            yield name, content
