"""Send the files of runs to the store of artifacts that ``RUNNER_ARTIFACTS`` names, beside their work.

What a step prints is sent while it grows, so that other hosts can follow; all else when the run has ended. A store that
is away never slows or fails a run: its files stay in ``RUNNER_HOME``, marked as unsent, its record has a warning, and
the next ``recover`` or ``apply`` sends them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import trio
from msgspec import Struct

from runner.artifacts.layout import is_finished, rewrite_end
from runner.artifacts.run_copy import INPUTS, GrowingFiles, SentCopy, send_run
from runner.artifacts.run_lock import try_lock
from runner.artifacts.stores import open_artifacts
from runner.core.errors import ArtifactsUnreachable, HostRefused, RunnerError
from runner.core.home import SCRATCH, UNSENT
from runner.core.nurseries import open_services, unwrapping_groups
from runner.core.redact import Redactor
from runner.core.settings import Settings
from runner.events import events as ev
from runner.events.record import RunRecord, fold, replay
from runner.git import open_git
from runner.plan.model import RunPlan
from runner.ports.artifacts import ArtifactStore
from runner.ports.store import Store
from runner.runtime.context import RunPaths, read_input
from runner.safefs import trees
from runner.spec.preload import FILES
from runner.steps.preload.plan import PreloadBody

BUNDLE, SHALLOW = "repository.bundle", "repository.shallow"
SOONEST, LATEST = 1.0, 10.0  # seconds between looks at what steps print: soon at first, later less often
STILL = 120.0  # seconds without an object that has arrived, after which sending is given up
LEFTOVERS = 30.0  # seconds for what earlier processes have left, at the end of an ``apply``
_LAST_WORDS = 5.0  # seconds to tell of a copy that was cancelled
_KEPT = "its files are on this host only"


class Unsent(Struct, frozen=True):
    """A run whose files were not sent, and why; its directory has them."""

    run: str
    why: str


class RunCopy:
    """The copy of one run; as a sink, it hears which steps have ended."""

    def __init__(self, copies: ArtifactCopies, paths: RunPaths) -> None:
        self._copies, self.paths = copies, paths
        self._ended: list[str] = []
        self._news = trio.Event()

    def __call__(self, recorded: ev.Recorded) -> None:
        match recorded.event:
            case ev.StepEnded(step=step):
                self._ended.append(step)
                self._news.set()

    async def follow(self, artifacts: ArtifactStore, plan: RunPlan, redact: Redactor) -> None:
        """Send what grows, until it is cancelled."""
        growing = GrowingFiles(artifacts, self.paths.run, self.paths.directory)
        with suppress(RunnerError, OSError):
            await trio.to_thread.run_sync(_send_inputs, growing, plan, redact, abandon_on_cancel=True)
        pause = SOONEST
        while True:
            ended, self._ended = self._ended, []
            try:
                await trio.to_thread.run_sync(growing.send, ended, abandon_on_cancel=True)
            except (RunnerError, OSError):  # the end of the run will say so, if it is still so then
                self._ended = [*ended, *self._ended]
            with trio.move_on_after(pause):
                await self._news.wait()
            self._news = trio.Event()
            pause = min(LATEST, pause * 1.1)

    def discard(self) -> None:
        """Forget a run that was never started."""
        _mark(self.paths).unlink(missing_ok=True)

    def finish(self, record: RunRecord) -> None:
        """Send the rest of a run that has ended, beside what comes next; nothing of one that was discarded."""
        if record.id == self.paths.run:
            self._copies.finish(self, record)


class ArtifactCopies:
    """The copies of the runs of one process. Without a store of artifacts it does nothing."""

    def __init__(
        self, settings: Settings, store: Store, redact: Redactor, artifacts: ArtifactStore | None, nursery: trio.Nursery
    ) -> None:
        self._settings, self._store, self._redact, self._artifacts = settings, store, redact, artifacts
        self._nursery = nursery
        self.failed = False

    @asynccontextmanager
    async def of(self, plan: RunPlan, paths: RunPaths) -> AsyncIterator[RunCopy]:
        """Send what grows in the files of a run while the block runs."""
        copy = RunCopy(self, paths)
        if self._artifacts is None:
            yield copy
            return
        _mark(paths).parent.mkdir(exist_ok=True, mode=0o700)
        _mark(paths).touch(mode=0o600)
        async with open_services() as services:
            services.start_soon(copy.follow, self._artifacts, plan, self._redact)
            yield copy

    def finish(self, copy: RunCopy, record: RunRecord) -> None:
        """Start to send the rest of a run."""
        if self._artifacts is not None:
            self._nursery.start_soon(self._finish, self._artifacts, copy.paths, record)

    async def _finish(self, artifacts: ArtifactStore, paths: RunPaths, record: RunRecord) -> None:
        if await send_ended(self._settings, self._store, artifacts, paths, record) is not None:
            self.failed = True


@asynccontextmanager
async def open_copies(settings: Settings, store: Store, redact: Redactor) -> AsyncIterator[ArtifactCopies]:
    """Open the copies of a process; the end of the block waits until all that it may send is sent, or has failed.

    Raises ``BadArtifactsUrl`` before the block.
    """
    artifacts = open_artifacts(settings.artifacts) if settings.artifacts is not None else None
    with unwrapping_groups():
        async with trio.open_nursery() as nursery:
            copies = ArtifactCopies(settings=settings, store=store, redact=redact, artifacts=artifacts, nursery=nursery)
            yield copies
    if artifacts is not None and not copies.failed:
        with trio.move_on_after(LEFTOVERS):
            await send_unsent(settings, store)


async def send_unsent(settings: Settings, store: Store, *, dry_run: bool = False) -> tuple[list[str], list[Unsent]]:
    """Send the runs of this home that have ended and were not sent; return those that were, and the others.

    Ends at the first that a store of artifacts does not take.
    """
    runs = await trio.to_thread.run_sync(_marked, settings.home)
    if settings.artifacts is None or not runs:
        return [], []
    artifacts = open_artifacts(settings.artifacts)
    sent: list[str] = []
    for run in runs:
        paths = RunPaths(settings.home, run)
        record = replay(run, await store.events(run))
        if record.ended is None or not is_finished(paths.directory):
            continue
        why = "not sent yet" if dry_run else await send_ended(settings, store, artifacts, paths, record)
        if why is not None:
            return sent, [Unsent(run, why)]
        sent.append(run)
    return sent, []


def _marked(home: Path) -> list[str]:
    """List the runs that are marked as unsent and still have a directory."""
    found = []
    for mark in sorted((home / UNSENT).glob("*")):
        if RunPaths(home, mark.name).directory.is_dir():
            found.append(mark.name)
        else:  # collected, or never begun
            mark.unlink(missing_ok=True)
    return found


async def send_ended(
    settings: Settings, store: Store, artifacts: ArtifactStore, paths: RunPaths, record: RunRecord
) -> str | None:
    """Send a run that has ended, and tell its journal, record and report; return why it could not be sent.

    Does nothing while another process works on it.
    """
    held = await trio.to_thread.run_sync(try_lock, paths.directory)
    if held is None:
        return None
    try:
        try:
            sent = await _send(settings, artifacts, paths, record)
        except (RunnerError, OSError) as error:
            fault = error if isinstance(error, RunnerError) else HostRefused.of(error)
            await _tell(store, paths, record, ev.WarningIssued(fault.code, f"{_KEPT}: {fault.message}"))
            return fault.message
        except trio.Cancelled:
            with trio.CancelScope(shield=True), trio.move_on_after(_LAST_WORDS), suppress(RunnerError, OSError):
                warning = ev.WarningIssued(ArtifactsUnreachable.code, f"{_KEPT}: sending was interrupted")
                await _tell(store, paths, record, warning)
            raise
        told = ev.ArtifactsCopied(
            url=artifacts.url, files=len(sent.contents.files), bytes=sent.contents.size, sha256=sent.sha256
        )
        await _tell(store, paths, record, told)
        _mark(paths).unlink(missing_ok=True)
    finally:
        os.close(held)
    return None


async def _tell(store: Store, paths: RunPaths, record: RunRecord, event: ev.Event) -> None:
    if isinstance(event, ev.WarningIssued) and (event.code, event.message) in record.warnings:
        return
    recorded = await store.append(record.id, [event])
    for one in recorded:
        fold(record, one)
    await trio.to_thread.run_sync(rewrite_end, paths.directory, recorded, record)


async def _send(settings: Settings, artifacts: ArtifactStore, paths: RunPaths, record: RunRecord) -> SentCopy:
    """Send the files of a run. Raises ``ArtifactsUnreachable`` when nothing arrives for ``STILL`` seconds."""
    stopped, token = threading.Event(), trio.lowlevel.current_trio_token()
    scratch = settings.home / SCRATCH / f"{paths.run}-copy"
    await trio.to_thread.run_sync(trees.remove, scratch)
    await trio.to_thread.run_sync(partial(scratch.mkdir, parents=True, mode=0o700))

    def extend() -> None:
        scope.deadline = trio.current_time() + STILL

    try:
        added = await _bundled(settings, paths, record, scratch)
        work = partial(send_run, artifacts, paths.run, paths.directory, added, stopped=stopped.is_set)
        work = partial(work, moved=partial(token.run_sync_soon, extend))
        with trio.move_on_after(STILL) as scope:
            return await trio.to_thread.run_sync(work, abandon_on_cancel=True)
    finally:
        stopped.set()
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(trees.remove, scratch)
    raise ArtifactsUnreachable(f"{artifacts.url} took nothing for {STILL:.0f} s")


async def _bundled(settings: Settings, paths: RunPaths, record: RunRecord, scratch: Path) -> dict[str, Path]:
    """Bundle what the run's private repository has of its work; return the files by their names in the copy."""
    saved = record.saved_work.commit if record.saved_work is not None else None
    published = record.snapshot.commit if record.snapshot is not None else None
    commits = list(dict.fromkeys(commit for commit in (published, saved) if commit is not None))
    if not commits or not await trio.to_thread.run_sync(paths.repository.is_dir):
        return {}
    await open_git(settings).bundle(paths.repository, commits, scratch / BUNDLE)
    shallow = paths.repository / "shallow"
    return {BUNDLE: scratch / BUNDLE, **({SHALLOW: shallow} if shallow.is_file() else {})}


def _send_inputs(growing: GrowingFiles, plan: RunPlan, redact: Redactor) -> None:
    """Send what the agent is told of an incident."""
    body = plan.body(PreloadBody)
    for part, file in body.files if body is not None else ():
        growing.send_text(f"{INPUTS}/{FILES[part]}", redact.clean(read_input(file)))


def _mark(paths: RunPaths) -> Path:
    return paths.home / UNSENT / paths.run
