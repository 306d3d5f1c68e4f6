"""Garbage collection: remove leftovers of ended runs older than ``RUN_RETENTION``, and expired workspaces.

The journal stays, and so does all that an unfinished run owns: recover it first. An impossible age means that the clock
jumped, and removes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path

import trio
from msgspec import Struct

from runner.artifacts.run_lock import is_locked, try_lock
from runner.core.clock import now_microseconds
from runner.core.errors import RunnerError
from runner.core.home import FETCHED, LAYERS, MIRRORS, SANDBOXES, run_directory
from runner.core.model import Handle
from runner.core.nurseries import unwrapping_groups
from runner.core.settings import Settings
from runner.engine.recover import remove
from runner.events import events as ev
from runner.git import mirror
from runner.lifecycle.pool import PREFIX
from runner.ops.host.state import has_history, open_state
from runner.ops.planning.carried_incident import INCIDENTS
from runner.ops.planning.facts import usable_providers
from runner.ops.planning.uploads import MANIFESTS, PLANS
from runner.ops.runs.collect_copies import StoredCopy, collect_copies
from runner.ops.runs.dependencies import dependencies_of
from runner.ops.runs.unrecorded import Unrecorded, find_unrecorded
from runner.ops.workspaces.maintenance import ReapedWorkspace, reap, unsteady
from runner.ops.workspaces.workspace_lease import WorkspaceEnv
from runner.ports.store import RunRow, Store
from runner.runtime.context import RunDependencies
from runner.safefs import trees
from runner.store import exists

_WORK = ("workspace", "snapshot")  # nobody makes these for a run before the store has it
_LONGEST = 10 * 365 * 86_400.0  # seconds


class GcVerdict(StrEnum):
    STALE = "stale"
    OVER_LIMIT = "over the limit"
    YOUNG = "young"
    IN_USE = "in use"
    CLOCK = "the clock has jumped"
    UNKNOWN = "the store does not know its run"

    @property
    def goes(self) -> bool:
        return self in (GcVerdict.STALE, GcVerdict.OVER_LIMIT)


class StoredItem(Struct, frozen=True, kw_only=True):
    """A file or directory of the runner below ``RUNNER_HOME``, and its ``run`` if that is known."""

    kind: str
    path: Path
    run: str | None
    verdict: GcVerdict
    age_seconds: float
    bytes: int = 0
    left: str | None = None  # why it could not be removed


class Collection(Struct, frozen=True, kw_only=True):
    """Result of a collection: ``found`` has everything stale, temporary or of impossible age, ``reaped`` the expired
    workspaces.

    ``copies`` are of old runs, in the store of artifacts, unless ``artifacts_fault`` says why nobody could look.
    ``clock`` says why ages were not trusted, and ``unknown`` what the store does not know; in both cases nothing is
    examined.
    """

    found: tuple[StoredItem, ...]
    dry_run: bool
    reaped: tuple[ReapedWorkspace, ...] = ()
    copies: tuple[StoredCopy, ...] = ()
    artifacts_fault: str | None = None
    clock: str | None = None
    unknown: tuple[Unrecorded, ...] = ()

    @property
    def bytes(self) -> int:
        gone = sum(kept.bytes for kept in self.found if kept.verdict.goes and kept.left is None)
        return gone + sum(copy.bytes for copy in self.copies)

    @property
    def count(self) -> int:
        """Count what is removed, or would be."""
        gone = [kept for kept in self.found if kept.verdict.goes and kept.left is None]
        copies = [copy for copy in self.copies if copy.left is None]
        return len(gone) + len(copies) + sum(reaped.left is None for reaped in self.reaped)

    @property
    def clean(self) -> bool:
        if self.unknown or any(kept.verdict is GcVerdict.UNKNOWN for kept in self.found):
            return False
        if self.artifacts_fault is not None or any(copy.left is not None for copy in self.copies):
            return False
        return all(kept.left is None for kept in self.found) and all(r.left is None or r.in_use for r in self.reaped)


def judge(age_seconds: float, retention: float) -> GcVerdict:
    if age_seconds < 0 or age_seconds > _LONGEST:
        return GcVerdict.CLOCK
    return GcVerdict.STALE if age_seconds > retention else GcVerdict.YOUNG


async def collect(settings: Settings, *, dry_run: bool) -> Collection:
    """Remove what is stale, or with ``dry_run`` only list it. Items that could not be removed say why."""
    if not exists(settings.store_url) and not has_history(settings):
        return Collection(found=(), dry_run=dry_run)
    async with open_state(settings) as store:
        with unwrapping_groups():
            deps = dependencies_of(settings, store)
            env = WorkspaceEnv(settings=settings, store=store, deps=deps)
            unknown = await find_unrecorded(store, deps.nonce, settings)
            if behind := [one for one in unknown if one.directory is not None]:
                return Collection(found=(), dry_run=dry_run, unknown=tuple(behind))
            if why := await unsteady(env, dry_run=dry_run):
                return Collection(found=(), dry_run=dry_run, clock=why)
            own = {row.id for row in await store.workspaces() if row.run is None}
            owned = [h for name in usable_providers() for h in await deps.provider(name).list_owned(deps.nonce)]
            handles = [handle for handle in owned if handle.id not in own and not handle.id.startswith(PREFIX)]
            rows, now = await store.runs(), await store.now()
            found = _look(settings, rows, handles, now)
            said = (GcVerdict.CLOCK, GcVerdict.UNKNOWN)
            shown = [k for k in found if k.verdict.goes or k.verdict in said or k.kind == "temporary"]
            done = shown if dry_run else [await _collected(kept, settings, handles, deps, store) for kept in shown]
            reaped = await reap(env, dry_run=dry_run)
            copies, fault = await collect_copies(settings, rows, now, dry_run=dry_run)
    return Collection(
        found=tuple(done), dry_run=dry_run, reaped=tuple(reaped), copies=tuple(copies), artifacts_fault=fault
    )


def _look(settings: Settings, rows: Sequence[RunRow], handles: Sequence[Handle], now: int) -> list[StoredItem]:
    """List everything that is kept; the directory of a run follows its other items.

    ``now`` is the store's, which dated the ends of runs; this host dated its files.
    """
    home, known = settings.home, {row.id: row for row in rows}
    over = mirror.over_limit(home / MIRRORS, settings.mirror_limit)
    over += mirror.over_limit(home / LAYERS, settings.dependencies_limit)

    def kept(kind: str, path: Path, run: str | None, touched: float) -> StoredItem:
        row = known.get(run) if run is not None else None
        age = now_microseconds() / 1e6 - touched
        if row is not None and row.ended is not None:
            age = (now - row.ended) / 1e6
        used = (row is not None and row.ended is None) or (run is not None and is_locked(run_directory(home, run)))
        verdict = GcVerdict.IN_USE if used else judge(age, settings.run_retention)
        if run is not None and row is None and kind in _WORK and verdict.goes:
            verdict = GcVerdict.UNKNOWN
        if verdict is GcVerdict.YOUNG and path in over:
            verdict = GcVerdict.OVER_LIMIT
        return StoredItem(
            kind=kind,
            path=path,
            run=run,
            verdict=verdict,
            age_seconds=age,
            bytes=trees.bytes_on_disk(path) if verdict.goes else 0,
        )

    ours = [handle for handle in handles if not handle.adopted]
    found = [kept("workspace", h.tree, h.id.rpartition("-")[0], _touched(_signs(home, h))) for h in ours]
    found += [kept("temporary", p, p.name.partition("-")[0], _touched([p])) for p in sorted(home.glob("tmp/*"))]
    found += [kept("snapshot", p, p.stem, _touched([p])) for p in sorted(home.glob("snapshots/*.git"))]
    found += [kept("run", p, p.name, _touched([p])) for p in sorted(home.glob("runs/*")) if p.is_dir()]
    found += [kept("manifest", p, None, _touched([p])) for p in sorted(home.glob("triage/*.runner.yaml"))]
    found += [kept("manifest", p, None, _touched([p])) for p in sorted(home.glob(f"{MANIFESTS}/*"))]
    found += [kept("incident", p, None, _touched([p])) for p in sorted(home.glob(f"{INCIDENTS}/*"))]
    found += [kept("fetched", p, None, _touched([p])) for p in sorted(home.glob(f"{FETCHED}/*"))]
    found += [kept("plan", p, None, _touched([p])) for p in sorted(home.glob(f"{PLANS}/*.json"))]
    mirrors = [p for p in sorted(home.glob("mirrors/*")) if p.is_dir()]
    found += [kept("mirror", p, None, mirror.last_used(p)) for p in mirrors]
    layers = [p for p in sorted(home.glob(f"{LAYERS}/*")) if p.is_dir()]
    return found + [kept(LAYERS, p, None, mirror.last_used(p)) for p in layers]


def _signs(home: Path, handle: Handle) -> list[Path]:
    """Return the paths whose age tells that of a workspace, which may be incomplete."""
    return [path for path in (handle.tree, home / SANDBOXES / f"{handle.id}.json") if path.exists()]


def _touched(paths: Iterable[Path]) -> float:
    return max((path.lstat().st_mtime for path in paths), default=0.0)


async def _collected(
    kept: StoredItem, settings: Settings, handles: Sequence[Handle], deps: RunDependencies, store: Store
) -> StoredItem:
    """Remove one stale item while nobody can start to use it."""
    if not kept.verdict.goes:
        return kept
    lock = _lock(kept, settings.home)
    if lock is None:
        return StoredItem(
            kind=kept.kind, path=kept.path, run=kept.run, verdict=GcVerdict.IN_USE, age_seconds=kept.age_seconds
        )
    try:
        if kept.kind == "workspace":
            (handle,) = [handle for handle in handles if handle.tree == kept.path]
            await deps.provider(handle.provider).destroy(handle)
            await store.append(str(kept.run), [ev.ResourceRemoved("", "workspace", handle.id)])
            return kept
        left = await trio.to_thread.run_sync(remove, kept.path)
        return _failing(kept, left) if left else kept
    except (RunnerError, OSError) as error:
        return _failing(kept, str(error))
    finally:
        os.close(lock)


def _failing(kept: StoredItem, left: str) -> StoredItem:
    return StoredItem(
        kind=kept.kind,
        path=kept.path,
        run=kept.run,
        verdict=kept.verdict,
        age_seconds=kept.age_seconds,
        bytes=0,
        left=left,
    )


def _lock(kept: StoredItem, home: Path) -> int | None:
    """Take the lock of the item's users: for mirrors and dependencies the file beside it, else the run's directory."""
    if kept.kind not in ("mirror", LAYERS):
        directory = run_directory(home, str(kept.run))
        return try_lock(directory) if directory.is_dir() else os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    return mirror.try_lock(kept.path)
