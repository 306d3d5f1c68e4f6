"""``runner gc``: what ended runs have kept is removed when it is older than ``RUN_RETENTION``. The journal stays.

Never what an unfinished run owns, whether its runner lives or not: recovering comes first. An age that no clock
can have gone through is a clock that jumped, and no reason to remove anything.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import trio

from runner import events as ev
from runner.app.apply import now_microseconds, plainly, ports_of
from runner.app.facts import provider_names
from runner.artifacts.owner import is_held, take
from runner.engine.recover import remove
from runner.errors import RunnerError
from runner.model import Handle
from runner.ports.store import RunRow, Store
from runner.settings import Settings
from runner.steps._run import Ports
from runner.store.sqlite import open_store

_LONGEST = 10 * 365 * 86_400.0  # seconds


class Verdict(StrEnum):
    STALE = "stale"
    YOUNG = "young"
    IN_USE = "in use"
    CLOCK = "the clock has jumped"


@dataclass(frozen=True)
class Kept:
    """Something of the runner's below ``RUNNER_HOME``; ``run`` is whose it is, if that can be told."""

    kind: str
    path: Path
    run: str | None
    verdict: Verdict
    age_seconds: float
    bytes: int = 0
    left: str | None = None  # why it could not be removed


@dataclass(frozen=True)
class Collection:
    """``found`` holds everything that is stale or a temporary directory, and whatever has an impossible age."""

    found: tuple[Kept, ...]
    dry_run: bool

    @property
    def bytes(self) -> int:
        return sum(kept.bytes for kept in self.found if kept.verdict is Verdict.STALE and kept.left is None)

    @property
    def clean(self) -> bool:
        return all(kept.left is None for kept in self.found)


def judge(age_seconds: float, retention: float) -> Verdict:
    if age_seconds < 0 or age_seconds > _LONGEST:
        return Verdict.CLOCK
    return Verdict.STALE if age_seconds > retention else Verdict.YOUNG


async def collect(settings: Settings, *, dry_run: bool) -> Collection:
    """Remove what is stale, or only say what is. What could not be removed says why."""
    path = settings.home / "state.db"
    if not path.exists():
        return Collection((), dry_run)
    async with open_store(path, now=now_microseconds, entropy=secrets.token_bytes) as store:
        with plainly():
            ports = ports_of(settings, store)
            handles = [h for name in provider_names() for h in await ports.provider(name).list_owned(ports.nonce)]
            found = _look(settings, await store.runs(), handles, now_microseconds() / 1e6)
            shown = [k for k in found if k.verdict in (Verdict.STALE, Verdict.CLOCK) or k.kind == "temporary"]
            done = shown if dry_run else [await _collected(kept, settings, handles, ports, store) for kept in shown]
    return Collection(tuple(done), dry_run)


def _look(settings: Settings, rows: Sequence[RunRow], handles: Sequence[Handle], now: float) -> list[Kept]:
    """Everything that a run or a mirror keeps, a run's own directory after what else it has."""
    home, known = settings.home, {row.id: row for row in rows}

    def kept(kind: str, path: Path, run: str | None, touched: float) -> Kept:
        row = known.get(run) if run is not None else None
        if row is not None and row.ended is not None:
            touched = row.ended / 1e6
        age = now - touched
        used = (row is not None and row.ended is None) or (run is not None and is_held(home / "runs" / run))
        verdict = Verdict.IN_USE if used else judge(age, settings.run_retention)
        return Kept(kind, path, run, verdict, age, _bytes(path) if verdict is Verdict.STALE else 0)

    ours = [handle for handle in handles if not handle.adopted]
    found = [kept("workspace", h.tree, h.id.rpartition("-")[0], _touched([h.tree])) for h in ours]
    found += [kept("temporary", p, p.name.partition("-")[0], _touched([p])) for p in sorted(home.glob("tmp/*"))]
    found += [kept("snapshot", p, p.stem, _touched([p])) for p in sorted(home.glob("snapshots/*.git"))]
    found += [kept("run", p, p.name, _touched([p])) for p in sorted(home.glob("runs/*")) if p.is_dir()]
    mirrors = [p for p in sorted(home.glob("mirrors/*")) if p.is_dir()]
    return found + [kept("mirror", p, None, _touched([p, *p.glob("ready/*")])) for p in mirrors]


def _touched(paths: Iterable[Path]) -> float:
    return max((path.lstat().st_mtime for path in paths), default=0.0)


def _bytes(top: Path) -> int:
    """What a tree takes on disk, links not followed."""
    return sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in _entries(top))


def _entries(top: Path) -> Iterator[os.DirEntry[str]]:
    waiting = [str(top)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    yield entry
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError:  # a file, or a tree so deep that its path is too long: this is a figure, not a proof
            continue


async def _collected(kept: Kept, settings: Settings, handles: Sequence[Handle], ports: Ports, store: Store) -> Kept:
    """Remove one stale thing while nobody can begin to use it."""
    if kept.verdict is not Verdict.STALE:
        return kept
    lock = _lock(kept, settings.home)
    if lock is None:
        return Kept(kept.kind, kept.path, kept.run, Verdict.IN_USE, kept.age_seconds)
    try:
        if kept.kind == "workspace":
            (handle,) = [handle for handle in handles if handle.tree == kept.path]
            await ports.provider(handle.provider).destroy(handle)
            await store.append(str(kept.run), [ev.EffectGone("", "workspace", handle.id)])
            return kept
        left = await trio.to_thread.run_sync(remove, kept.path)
        return _failing(kept, left) if left else kept
    except (RunnerError, OSError) as error:
        return _failing(kept, str(error))
    finally:
        os.close(lock)


def _failing(kept: Kept, left: str) -> Kept:
    return Kept(kept.kind, kept.path, kept.run, kept.verdict, kept.age_seconds, 0, left)


def _lock(kept: Kept, home: Path) -> int | None:
    """Hold what its users hold: a mirror by the file beside it, the rest by its run's directory."""
    if kept.kind != "mirror":
        directory = home / "runs" / str(kept.run)
        return take(directory) if directory.is_dir() else os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    held = os.open(kept.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        return None
    return held
