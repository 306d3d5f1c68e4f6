"""Stored runs: list them, find one, and locate its logs and its patch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

from msgspec import Struct
from msgspec.structs import replace

from runner.core.errors import StoreDamaged, UnknownRun, nearest
from runner.core.home import FETCHED, PLAN_FILE, private_repository, run_directory
from runner.core.model import Reason, Status
from runner.core.settings import Settings
from runner.events.record import RunRecord, replay
from runner.ops.host.liveness import is_lost
from runner.ops.host.state import read_state, read_state_at_once
from runner.ports.store import Reader, RunRow
from runner.report.run_files import used


class StoredRun(Struct, frozen=True):
    """A run's record, the directory with its files, and its private repository.

    For a run of another host these are where ``read_back`` puts them.
    """

    record: RunRecord
    directory: Path
    repository: Path

    @property
    def evidence(self) -> Path | None:
        """The directory, if it is on this host."""
        return self.directory if self.directory.is_dir() else None


TIMED_OUT = "timed-out"  # how a listing calls a run that failed because its time was over
STATES = (*(status.value for status in Status), TIMED_OUT)
DEADLINE = 124  # the exit code of such a run


class RunFilter(Struct, frozen=True, kw_only=True):
    """Filter of a run list; fields that are ``None`` match every run.

    ``within`` is a directory that contains the manifests, and ``since`` microseconds since the epoch. ``name`` may
    contain ``*``; ``state`` is one of ``STATES``.
    """

    name: str | None = None
    state: str | None = None
    since: int | None = None
    within: Path | None = None
    limit: int | None = None

    @property
    def status(self) -> str | None:
        """The stored status of the runs in ``state``."""
        stored = {TIMED_OUT: Status.FAILED, Status.LOST: Status.RUNNING}
        return None if self.state is None else stored.get(self.state, self.state)


class RunSummary(Struct, frozen=True, kw_only=True):
    """A row of a run list; ``reason`` and ``message`` say why the run did not succeed, or for what it waits.

    ``cost_usd`` is ``None`` without a model, and when a price is unknown.
    """

    row: RunRow
    state: str
    reason: Reason | None = None
    message: str = ""
    cost_usd: float | None = None


class RunList(Struct, frozen=True):
    """Matching runs, newest first; ``more`` counts those beyond the limit, ``elsewhere`` those of other directories."""

    runs: Sequence[RunSummary]
    more: int
    elsewhere: int


def state_of(row: RunRow) -> str:
    return state_name(row.status, row.exit_code)


def state_name(status: str, exit_code: int | None) -> str:
    return TIMED_OUT if status == Status.FAILED and exit_code == DEADLINE else str(status)


def is_within(row: RunRow, directory: Path) -> bool:
    return row.manifests is not None and Path(row.manifests).is_relative_to(directory)


async def filter_runs(settings: Settings, wanted: RunFilter) -> RunList:
    """List the matching runs, newest first."""
    async with read_state(settings) as store:
        return await _filtered(store, settings, wanted)


def filter_runs_at_once(settings: Settings, wanted: RunFilter) -> RunList | None:
    """Do the same without a loop; ``None`` where the store is not a file of this host."""
    opened = read_state_at_once(settings)
    if opened is None:
        return None
    with opened as store:
        work = _filtered(store, settings, wanted)
        try:
            work.send(None)
        except StopIteration as end:
            return cast("RunList", end.value)
        raise AssertionError("this store waits")


async def _filtered(store: Reader, settings: Settings, wanted: RunFilter) -> RunList:
    anywhere = await _read_rows(store, settings, wanted)
    found = [row for row in anywhere if wanted.within is None or is_within(row, wanted.within)]
    runs = [await _listed(row, store) for row in found[: wanted.limit]]
    return RunList(runs, len(found) - len(runs), len(anywhere) - len(found))


async def _listed(row: RunRow, store: Reader) -> RunSummary:
    """Summarize a run from its events; a damaged journal is the message."""
    try:
        record = replay(row.id, await store.events(row.id))
    except (KeyError, TypeError, AttributeError, StoreDamaged):
        return RunSummary(row=row, state=state_of(row), message="its events are damaged: `runner store rebuild`")
    if record.status is Status.PENDING:
        return RunSummary(row=row, state=state_of(row), message=record.waits and f"waits: {record.waits}")
    outcome = record.outcome
    cost = used(record).cost_usd if record.models or record.reported_usage else None
    if outcome is None or outcome.status is Status.SUCCEEDED:
        return RunSummary(row=row, state=state_of(row), cost_usd=cost)
    return RunSummary(row=row, state=state_of(row), reason=outcome.reason, message=outcome.message, cost_usd=cost)


def not_ended(row: RunRow) -> bool:
    """Tell whether a run has begun and not ended."""
    return row.ended is None and row.status != Status.PENDING.value


async def _read_rows(store: Reader, settings: Settings, wanted: RunFilter) -> list[RunRow]:
    """Read the matching runs of any directory; status ``lost`` means that its runner died before its end."""
    read = partial(store.runs, status=wanted.status, name=wanted.name, since=wanted.since)
    rows = await read()
    suspects = {row.id for row in rows if not_ended(row) and await is_lost(store, settings.home, row)}
    if suspects:  # asked again, for a runner writes the end before it lets go
        rows = await read()
    rows = [replace(r, status=Status.LOST) if r.id in suspects and r.ended is None else r for r in rows]
    return [row for row in rows if wanted.state in (None, state_of(row))]


async def find_run(settings: Settings, run: str) -> StoredRun:
    """Find a run by unique prefix or ``last``; a lost one as well. Raises ``UnknownRun``."""
    async with read_state(settings) as store:
        row = await store.find(run)
        lost = row.ended is None and await is_lost(store, settings.home, row)
        history = await store.events(row.id)
    try:
        record = replay(row.id, history)
    except KeyError as error:
        raise StoreDamaged(f"the events of run `{row.id}` do not fit together", hint="run `runner recover`") from error
    if record.ended is None and lost:
        record.status = Status.LOST
    return locate(settings, record)


def locate(settings: Settings, record: RunRecord) -> StoredRun:
    """Return a run with the places of its files."""
    home, directory = settings.home, directory_of(settings, record.id)
    here = directory == run_directory(home, record.id)
    repository = private_repository(home, record.id) if here else directory.with_name("repository.git")
    return StoredRun(record, directory, repository)


def directory_of(settings: Settings, run: str) -> Path:
    """Return the directory with the files of a run, as far as they are on this host."""
    if settings.artifacts is None or is_here(settings, run):
        return run_directory(settings.home, run)
    return settings.home / FETCHED / run / "files"


def is_here(settings: Settings, run: str) -> bool:
    """Tell whether a run was started in this home, and its files are still here."""
    return (run_directory(settings.home, run) / PLAN_FILE).exists()


def logs_of(stored: StoredRun, step: str | None) -> list[Path]:
    """Return the log files of a step, or of every step in plan order, that are not empty. Raises ``UnknownRun``."""
    if step is not None and step not in stored.record.steps:
        raise UnknownRun(f"run `{stored.record.id}` has no step `{step}`", hint=nearest(step, stored.record.steps))
    steps = [step] if step is not None else list(stored.record.steps)
    files = [stored.directory / "logs" / f"{name}.{stream}" for name in steps for stream in ("stdout", "stderr")]
    return [file for file in files if file.exists() and file.stat().st_size]


def patch_of(stored: StoredRun) -> Path:
    """Return the patch of the run's work. Raises ``UnknownRun`` when there is none."""
    saved_work = stored.record.saved_work
    if saved_work is None or saved_work.patch is None:
        raise UnknownRun(f"run `{stored.record.id}` left no patch", hint=f"runner runs show {stored.record.id}")
    path = stored.directory / saved_work.patch
    if not path.is_file():
        raise UnknownRun(f"the patch of run `{stored.record.id}` is gone: `{path}`")
    return path
