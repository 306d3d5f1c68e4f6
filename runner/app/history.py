"""What happened: runs and their files, read from the journal without holding the store open for writing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from runner.app.state import read_state
from runner.artifacts.owner import is_held
from runner.errors import StoreDamaged, UnknownRun, nearest
from runner.model import Status
from runner.ports.store import RunRow
from runner.record import RunRecord, replay
from runner.settings import Settings


@dataclass(frozen=True)
class Past:
    """A run's record and the directory with its files."""

    record: RunRecord
    directory: Path


async def list_runs(settings: Settings) -> list[RunRow]:
    """Every run, newest first; ``lost`` is the status of one whose runner has died before its end."""
    async with read_state(settings) as store:
        rows = await store.runs()
        suspects = {row.id for row in rows if row.ended is None and not is_held(settings.home / "runs" / row.id)}
        if suspects:  # asked again, for a runner writes the end before it lets go
            rows = await store.runs()
        return [replace(r, status=Status.LOST) if r.id in suspects and r.ended is None else r for r in rows]


async def find_run(settings: Settings, run: str) -> Past:
    """The run that a unique prefix or ``last`` means, also when it is lost. Raises ``UnknownRun``."""
    async with read_state(settings) as store:
        row = await store.find(run)
        lives = is_held(settings.home / "runs" / row.id)
        history = await store.events(row.id)
    try:
        record = replay(row.id, history)
    except KeyError as error:
        raise StoreDamaged(f"the events of run `{row.id}` do not fit together", hint="run `runner recover`") from error
    if record.ended is None and not lives:
        record.status = Status.LOST
    return Past(record, settings.home / "runs" / row.id)


def logs_of(past: Past, step: str | None) -> list[Path]:
    """The log files of a step, or of every step in plan order, that are not empty. Raises ``UnknownRun``."""
    if step is not None and step not in past.record.steps:
        raise UnknownRun(f"run `{past.record.id}` has no step `{step}`", hint=nearest(step, past.record.steps))
    steps = [step] if step is not None else list(past.record.steps)
    files = [past.directory / "logs" / f"{name}.{stream}" for name in steps for stream in ("stdout", "stderr")]
    return [file for file in files if file.exists() and file.stat().st_size]


def patch_of(past: Past) -> Path:
    """The patch with the run's work. Raises ``UnknownRun`` when it changed nothing."""
    receipt = past.record.receipt
    if receipt is None or receipt.patch is None:
        raise UnknownRun(f"run `{past.record.id}` left no patch", hint=f"runner runs show {past.record.id}")
    path = past.directory / receipt.patch
    if not path.is_file():
        raise UnknownRun(f"the patch of run `{past.record.id}` is not there any more: `{path}`")
    return path
