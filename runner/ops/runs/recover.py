"""Recover runs whose runner died: end them, and remove what they left on the host.

This is safe beside living runs and beside another recovery: only the process that locks a run's directory, and is named
in its row, touches it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from msgspec import Struct
from msgspec.structs import replace

from runner.artifacts.history import was_started
from runner.artifacts.layout import is_finished, write_copies
from runner.artifacts.run_lock import is_locked, try_lock
from runner.artifacts.stored_plan import read_plan
from runner.core.errors import BadPlanFile, Escaped, RunnerError, RunUnfinished, StoreDamaged
from runner.core.home import PLAN_FILE
from runner.core.model import Fence, Handle
from runner.core.nurseries import unwrapping_groups
from runner.core.settings import Settings
from runner.engine.recover import Recovered, belongings, recover, unsaved
from runner.events import events as ev
from runner.events.record import RunRecord, fold, replay
from runner.lifecycle.liveness import DEAD_AFTER
from runner.ops.host.liveness import Liveness, read_liveness
from runner.ops.host.state import has_history, open_state
from runner.ops.planning.facts import usable_providers
from runner.ops.pool.pool import clear_left
from runner.ops.runs.artifact_copy import Unsent, send_unsent
from runner.ops.runs.dependencies import dependencies_of
from runner.ops.runs.output_copy import copy_output
from runner.ops.runs.pending import is_pending
from runner.ops.runs.recover_pending import recover_pending
from runner.ops.runs.telemetry import tell_again
from runner.ops.runs.unrecorded import Unrecorded, find_unrecorded
from runner.ops.workspaces.maintenance import CompletedChange, complete_changes, sweep
from runner.ops.workspaces.workspace_lease import WorkspaceEnv
from runner.plan.model import RunPlan
from runner.ports.store import RunRow, Store
from runner.runtime.context import RunDependencies, RunPaths
from runner.runtime.incident_files import is_latest
from runner.safefs import trees
from runner.sandbox import mounts, processes
from runner.store import exists
from runner.store.sqlite import REBUILD_HINT

_SILENT = f"wait for its end, or until nothing was heard of it for {DEAD_AFTER:.0f} s"


class Recovery(Struct, frozen=True, kw_only=True):
    """Result of a recovery, or with ``dry_run`` its forecast; ``strays`` are directories of runs that never started.

    ``workspaces`` were held outside of runs, or kept warm, by a process that died. ``unknown`` is what the store does
    not know, and is left alone; ``damage`` is what is wrong with the store itself. ``sent`` are runs whose files went
    to the store of artifacts now, ``unsent`` the first that did not.
    """

    runs: tuple[Recovered, ...]
    strays: tuple[str, ...]
    dry_run: bool
    workspaces: tuple[CompletedChange, ...] = ()
    unknown: tuple[Unrecorded, ...] = ()
    damage: str | None = None
    sent: tuple[str, ...] = ()
    unsent: tuple[Unsent, ...] = ()

    @property
    def clean(self) -> bool:
        if self.unknown or self.damage is not None or (self.unsent and not self.dry_run):
            return False
        return not any(run.left for run in self.runs) and all(one.left is None for one in self.workspaces)


async def recover_store(settings: Settings, run: str | None, *, dry_run: bool) -> Recovery:
    """Recover one run of this ``RUNNER_HOME``, or all. Raises ``UnknownRun``, ``RunUnfinished`` for one that lives."""
    if run is None and not exists(settings.store_url) and not has_history(settings):
        return Recovery(runs=(), strays=(), dry_run=dry_run)
    try:
        async with open_state(settings) as store:
            with unwrapping_groups():
                deps = dependencies_of(settings, store)
                recovery = await recover_runs(settings, store, deps, usable_providers(), run, dry_run=dry_run)
                if run is not None:
                    return recovery
                sent, unsent = await send_unsent(settings, store, dry_run=dry_run)
                env = WorkspaceEnv(settings=settings, store=store, deps=deps)
                unknown = {one.id for one in recovery.unknown}
                workspaces = await complete_changes(env, unknown, dry_run=dry_run)
                workspaces += await clear_left(env, dry_run=dry_run)
                strays = (*recovery.strays, *await sweep(env, unknown, dry_run=dry_run))
                recovery = replace(recovery, sent=tuple(sent), unsent=tuple(unsent))
                return replace(recovery, workspaces=tuple(workspaces), strays=strays)
    except StoreDamaged as error:
        unknown_now = await find_unrecorded(None, None, settings)
        return Recovery(runs=(), strays=(), dry_run=dry_run, unknown=tuple(unknown_now), damage=error.message)


async def recover_runs(
    settings: Settings, store: Store, deps: RunDependencies, providers: Sequence[str], run: str | None, *, dry_run: bool
) -> Recovery:
    """Do what ``recover_store`` does to runs, with an open store and its dependencies."""
    unknown = await find_unrecorded(store, deps.nonce, settings)
    behind = {one.id for one in unknown}
    if run is not None:
        require_known(run, unknown)
    rows = [await store.find(run)] if run is not None else await store.runs()
    handles = [handle for name in providers for handle in await deps.provider(name).list_owned(deps.nonce)]
    workspaces = [*(handle.id for handle in handles), *(lease.workspace for lease in await store.leases())]
    done: list[Recovered] = []
    liveness = await read_liveness(store, settings.home)
    for row in reversed(rows):  # the oldest first
        paths = RunPaths(settings.home, row.id)
        host = _other_host(row, settings, paths, liveness)
        if row.id in behind or (row.ended is not None and (host or _is_whole(row, paths, workspaces))):
            continue
        if is_pending(row):
            found = await recover_pending(store, row, settings, dry_run=dry_run)
            if run is not None and not found:
                raise RunUnfinished(f"run `{row.id}` waits for its Job", hint=f"`runner runs cancel {row.id}` ends it")
            done += found
            continue
        if place := liveness.elsewhere(row.runner):
            if run is not None:
                raise RunUnfinished(f"run `{row.id}` is worked on by {place}", hint=_SILENT)
            continue
        try:
            async with _holding(row.id, paths.directory, dry_run):
                own = [handle for handle in handles if handle.id.rpartition("-")[0] == row.id]
                done += await _recover(row, paths, store, deps, own, dry_run=dry_run, host=host)
            if row.ended is None and not dry_run:
                await tell_again(settings, store, row.id)
        except RunUnfinished:
            if run is not None:
                raise
    strays = await _strays(settings.home, {row.id for row in rows}, store, dry_run) if run is None else []
    if not dry_run:
        mounts.remove_stale_stages()
    return Recovery(
        runs=tuple(done), strays=tuple(strays), dry_run=dry_run, unknown=tuple(unknown) if run is None else ()
    )


def require_known(run: str, unknown: Sequence[Unrecorded]) -> None:
    """Raise ``StoreDamaged`` for a run whose directory has more events than the store."""
    for one in unknown:
        if run and one.kind == "run" and one.id.startswith(run):
            raise StoreDamaged(f"run `{one.id}` is only partly in the store: {one.why}", hint=REBUILD_HINT)


def _other_host(row: RunRow, settings: Settings, paths: RunPaths, liveness: Liveness) -> str | None:
    """Name the host of a run that was started in another home; others may share the store."""
    if (paths.directory / PLAN_FILE).exists():
        return None
    return liveness.host(row.runner) or (None if settings.database_url is None else "that it ran on")


def _is_whole(row: RunRow, paths: RunPaths, workspaces: Sequence[str]) -> bool:
    """Tell whether an ended run needs nothing more."""
    copied = is_finished(paths.directory) or not paths.directory.exists()
    return copied and not any(workspace.startswith(f"{row.id}-") for workspace in workspaces)


@asynccontextmanager
async def _holding(run: str, directory: Path, dry_run: bool) -> AsyncIterator[None]:
    """Lock a run's directory for the block. Raises ``RunUnfinished`` while another process has the lock."""
    async with _locking(directory, dry_run) as held:
        if not held:
            raise RunUnfinished(f"a runner is still working on run `{run}`", hint=f"runner runs show {run}")
        yield


@asynccontextmanager
async def _locking(directory: Path, dry_run: bool) -> AsyncIterator[bool]:
    """Lock a run's directory for the block, and yield whether that worked; a dry run only looks."""
    if dry_run:
        yield not is_locked(directory)
        return
    held = await trio.to_thread.run_sync(try_lock, directory)
    try:
        yield held is not None
    finally:
        if held is not None:
            os.close(held)


async def _recover(
    row: RunRow,
    paths: RunPaths,
    store: Store,
    deps: RunDependencies,
    own: Sequence[Handle],
    *,
    dry_run: bool,
    host: str | None,
) -> list[Recovered]:
    """Recover one run, which may be of another ``host``.

    ``own`` are its workspaces on this host, which a rebuilt journal may lack.
    """
    try:
        history = await store.events(row.id)
        record = replay(row.id, history)
    except (StoreDamaged, KeyError) as error:
        message = error.message if isinstance(error, RunnerError) else "its events do not fit together"
        return [Recovered(run=row.id, name=row.name, outcome=row.status, left=(message,))]
    if dry_run:
        return [_foreseen(record, paths)]
    if lacking := [handle for handle in own if ("workspace", handle.id) not in record.resources]:
        intents = [ev.ResourceIntended("", "workspace", handle.id, handle.provider) for handle in lacking]
        for recorded in await store.append(row.id, intents):
            history.append(recorded)
            fold(record, recorded)
    escaped, lost = await _kill_helpers(paths), record.ended is None

    async def append(run: str, events: Sequence[ev.Event], fence: Fence | None) -> Sequence[ev.Recorded]:
        return await store.append(run, events, fence=fence)

    async def take() -> None:
        if not await store.take_run(row.id, row.runner):
            hint = f"runner runs show {row.id}"
            raise RunUnfinished(f"another process has begun to recover run `{row.id}`", hint=hint)

    plan = _plan(record, paths)
    recovered = await recover(record, plan, paths=paths, deps=deps, append=append, take=take, host=host)
    news = await store.events(row.id, after=len(history))
    if record.ended is not None and (news or not is_finished(paths.directory)):
        await trio.to_thread.run_sync(write_copies, paths.directory, [*history, *news], record)
    behind = await trio.to_thread.run_sync(_hand_out, record, paths) if lost else []
    kept = (*recovered.kept, *(f"not copied: {what}" for what in behind))
    return [replace(recovered, kept=kept, left=(*escaped, *recovered.left))]


def _hand_out(record: RunRecord, paths: RunPaths) -> list[str]:
    """Copy output as a triage would, unless a later run has written there."""
    latest = record.log is not None and is_latest(Path(record.log))
    return copy_output(paths.directory, record) if latest else []


def _plan(record: RunRecord, paths: RunPaths) -> RunPlan | str:
    """Read the run's plan, or say why it cannot be used."""
    try:
        stored = read_plan(paths.directory)
    except BadPlanFile as error:
        return error.message
    return stored.run if stored.digest == record.plan else "`plan.json` is not the plan of this run"


def _foreseen(record: RunRecord, paths: RunPaths) -> Recovered:
    """Describe what recovering would do."""
    workspaces = [
        f"workspace {name} {place}" for (kind, name), place in record.resources.items() if kind == "workspace"
    ]
    saved = "its work" if unsaved(record) else None
    found = [str(path) for path in belongings(record, paths)]
    status = "unknown" if record.ended is None else record.status.value
    return Recovered(run=record.id, name=record.name, outcome=status, saved=saved, removed=(*workspaces, *found))


async def _kill_helpers(paths: RunPaths) -> tuple[str, ...]:
    """Kill the processes of the run on the host itself, git and a sub-runner; return those that survive."""
    git = f"GIT_DIR={paths.repository}".encode()
    run = f"RUN_ID={paths.run}".encode()

    def belongs(pid: int) -> bool:
        words = processes.environment(pid).split(b"\0")
        return git in words or (run in words and any(word.startswith(b"AGENT_SCRIPT=") for word in words))

    try:
        await processes.kill_all(belongs, what=f"run `{paths.run}`")
    except Escaped as error:
        return (error.message,)
    return ()


async def _strays(home: Path, known: set[str], store: Store, dry_run: bool) -> list[str]:
    """Remove directories of runs whose runner died before the first event."""
    found = []
    for directory in _unknown(home, known):
        async with _locking(directory, dry_run) as held:
            if held and not await store.events(directory.name) and not was_started(directory):
                found.append(str(directory))
                if not dry_run:
                    await trio.to_thread.run_sync(trees.remove, directory)
    return found


def _unknown(home: Path, known: set[str]) -> list[Path]:
    return [path for path in sorted(home.glob("runs/*")) if path.name not in known and path.is_dir()]
