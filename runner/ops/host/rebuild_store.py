"""Rebuild a store that is lost, damaged or an older copy, from the directories of its runs.

A store that can be read in full keeps its contents and gains what it lacks. Any other is renamed, never removed, and
replaced. The runs themselves do not change; recovering them is another command.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import trio

from runner.artifacts.history import FILE, Unreadable, last_seq, read_events
from runner.artifacts.run_lock import is_locked
from runner.core.errors import RunUnfinished, StoreDamaged, StoreFailed
from runner.core.home import RUNS, WORKSPACES
from runner.core.settings import Settings
from runner.events.events import Recorded
from runner.ops.pool.handoff import PLACE
from runner.ops.runs.unrecorded import started_directories
from runner.sandbox.directories import find_workspace_traces
from runner.store import open_to_restore, sqlite
from runner.store.sqlite import exists, place


@dataclass(frozen=True)
class RebuildResult:
    """Gain of a rebuilt store: the ``events`` of these ``runs`` and ``workspaces``.

    ``aside`` is where an unreadable store was moved, and ``unread`` what could not be read from directories, and why.
    """

    runs: tuple[str, ...]
    workspaces: tuple[str, ...]
    events: int
    aside: Path | None = None
    damage: str | None = None
    unread: tuple[str, ...] = ()


async def rebuild_store(settings: Settings) -> RebuildResult:
    """Rebuild the store. Raises ``StoreTooNew``, ``BadStoreUrl`` for one in memory, ``RunUnfinished`` while somebody
    uses a store that has to be replaced. Only a file is replaced: a damaged database is ``StoreDamaged``.
    """
    damage = aside = None
    if settings.store_url.startswith("sqlite:"):
        path = place(settings.store_url)
        damage = await _damage(path)
        if damage is not None or not exists(path):
            _require_unused(settings)
        if damage is not None:
            aside = await trio.to_thread.run_sync(_put_aside, path)
    nonce = _nonce(settings.home)

    def entropy(size: int) -> bytes:
        return nonce or secrets.token_bytes(size)

    settings.home.mkdir(parents=True, exist_ok=True, mode=0o700)
    async with open_to_restore(settings.store_url, entropy=entropy) as store:
        unread: list[str] = []
        added: dict[str, list[str]] = {"run": [], "workspace": []}
        events = 0
        for kind, id, history in _histories(settings.home, await store.counts(), unread):
            try:
                await (store.restore if kind == "run" else store.restore_workspace)(id, history)
            except StoreFailed as error:
                unread.append(f"{kind} {id}: {error.message}")
                continue
            added[kind].append(id)
            events += len(history)
    return RebuildResult(
        runs=tuple(added["run"]),
        workspaces=tuple(added["workspace"]),
        events=events,
        aside=aside,
        damage=damage,
        unread=tuple(unread),
    )


async def _damage(path: Path) -> str | None:
    """Say why the store is unusable; ``None`` also when there is none."""
    if not exists(path):
        return None
    try:
        async with sqlite.open_store(path, entropy=bytes, must_exist=True) as store:
            await store.check()
    except StoreDamaged as error:
        return error.message
    return None


def _require_unused(settings: Settings) -> None:
    """Raise ``RunUnfinished`` if somebody has the old store open, and would go on writing to it."""
    home, runs = settings.home, settings.home / RUNS
    for held in (*runs.glob("*"), *(home / WORKSPACES).glob("*/lease"), home / PLACE):
        if held.is_dir() and is_locked(held):
            what = f"a runner is still working on run `{held.name}`" if held.parent == runs else f"`{held}` is in use"
            raise RunUnfinished(f"{what}, and uses the store that is to be replaced", hint="end it, or wait")


def _put_aside(store: Path) -> Path:
    number = 1
    while (to := store.with_name(f"{store.name}.damaged-{number}")).exists():
        number += 1
    for suffix in ("-wal", "-shm", ""):  # itself last: until then all of this is done again
        file = store.with_name(store.name + suffix)
        if file.exists():
            file.rename(to.with_name(to.name + suffix))
    return to


def _nonce(home: Path) -> bytes | None:
    """Return the nonce that most leftovers carry, so that the new store recognises them as its own."""
    found = Counter(left.nonce for left in find_workspace_traces(home))
    try:
        return next((bytes.fromhex(nonce) for nonce, _ in found.most_common(1)), None)
    except ValueError:
        return None


def _histories(home: Path, counts: Mapping[str, int], unread: list[str]) -> Iterator[tuple[str, str, list[Recorded]]]:
    """Yield the events that the store lacks, for each run and workspace, oldest first."""
    found = []
    for kind, directory in started_directories(home):
        known = counts.get(directory.name, 0)
        try:
            history = read_events(directory, directory.name)
        except (Unreadable, OSError) as error:
            if not known or last_seq(directory) > known:
                unread.append(f"{directory / FILE}: {error}")
            continue
        if not history and not known:
            unread.append(f"{directory}: it has no events, so only its files are known")
        found.append((kind, directory.name, history[known:]))
    return ((kind, id, lacking) for kind, id, lacking in sorted(found, key=_begin) if lacking)


def _begin(found: tuple[str, str, list[Recorded]]) -> int:
    return found[2][0].at if found[2] else 0
