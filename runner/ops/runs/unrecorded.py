"""Work in a ``RUNNER_HOME`` that its store does not know, or not to its end: the store is an older copy, or new.

Being unknown is no reason to remove anything; ``runner store rebuild`` adds it to the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from runner.artifacts.history import FILE, last_seq, was_started
from runner.artifacts.run_lock import is_locked
from runner.core.settings import Settings
from runner.lifecycle.pool import PREFIX
from runner.ports.store import Reader
from runner.sandbox.directories import WorkspaceTraces, find_workspace_traces


class Unrecorded(Struct, frozen=True, kw_only=True):
    """A run, or a workspace outside of runs, that the store lacks.

    ``directory`` has its events. Without one only ``there`` is left on this host: directories, volumes, mounts, loop
    devices.
    """

    id: str
    kind: str
    why: str
    directory: Path | None = None
    there: tuple[str, ...] = ()


async def find_unrecorded(store: Reader | None, nonce: str | None, settings: Settings) -> list[Unrecorded]:
    """List what the store does not know; ``store`` is ``None`` for one that is lost or damaged."""
    # Before the store is asked: what begins from here on is in neither.
    directories = [(kind, path, max(last_seq(path), 1)) for kind, path in started_directories(settings.home)]
    remains = find_workspace_traces(settings.home)
    counts = await store.counts() if store is not None else {}
    found = {}
    for kind, path, seq in directories:
        if (known := counts.get(path.name, 0)) < seq:
            why = f"the store has {known} of its {seq} events" if known else "the store does not know it"
            found[path.name] = Unrecorded(id=path.name, kind=kind, why=why, directory=path)
    for left in remains:
        owner = left.run or left.workspace
        if owner in found:
            found[owner] = replace(found[owner], there=(*found[owner].there, *left.places))
        elif not _knows(counts, nonce, left):
            why = "the store does not know it" if left.nonce == nonce else "it was made for another store"
            found[left.workspace] = Unrecorded(id=left.workspace, kind="workspace", why=why, there=left.places)
    return [found[id] for id in sorted(found)]


def _knows(counts: Mapping[str, int], nonce: str | None, left: WorkspaceTraces) -> bool:
    if left.nonce != nonce:
        return False
    return left.run in counts or left.workspace in counts or left.workspace.startswith(PREFIX)


def started_directories(home: Path) -> list[tuple[str, Path]]:
    """List the directories, with their kind, of runs and workspaces that were started and that nobody holds."""
    runs = [path for path in sorted(home.glob("runs/*")) if was_started(path) and not is_locked(path)]
    workspaces = [path.parent for path in sorted(home.glob(f"workspaces/*/{FILE}"))]
    free = [path for path in workspaces if not is_locked(path / "lease")]
    return [*(("run", path) for path in runs), *(("workspace", path) for path in free)]
