"""Files of runs of other hosts, from the store of artifacts, in a place of their own below ``RUNNER_HOME``.

That is a copy which may be removed at any time. It never counts as a directory of a run of this home.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import trio

from runner.artifacts.run_copy import GrowingCopy, Interrupted, fetch_files, read_contents
from runner.artifacts.stores import open_artifacts
from runner.core.errors import ArtifactsMissing, RunnerError
from runner.core.nurseries import open_services
from runner.core.settings import Settings
from runner.events import events as ev
from runner.git import open_git
from runner.ops.host.state import make_home
from runner.ops.runs.artifact_copy import BUNDLE, SHALLOW
from runner.ops.runs.history import StoredRun, is_here
from runner.ports.artifacts import ArtifactStore
from runner.safefs import trees

LOOK = 1.0  # seconds between looks at what a run elsewhere prints
_LATE = 20.0  # seconds that what a step has printed may take to arrive, after its end
_WORK = (BUNDLE, SHALLOW, "output/")  # what only those need who deliver or continue


async def read_back(stored: StoredRun, settings: Settings, *, whole: bool = False) -> None:
    """Fetch the files of a run that are not on this host; with ``whole`` its output and its private repository too.

    Every file is checked against the digests that the journal vouches for. Does nothing for a run of this home, and
    without a store of artifacts. Raises ``ArtifactsMissing`` when there is no whole copy of a run that has ended,
    ``ArtifactsDamaged``, and what the store raises.
    """
    if settings.artifacts is None or is_here(settings, stored.record.id):
        return
    make_home(settings)
    artifacts = open_artifacts(settings.artifacts)
    if stored.record.ended is None:
        growing = GrowingCopy(artifacts, stored.record.id, stored.directory)
        await _in_thread(lambda _: growing.fetch())
        return
    try:
        await _fetch(artifacts, stored, whole=whole)
    except ArtifactsMissing as error:
        message = f"the files of run `{stored.record.id}` are not in {artifacts.url}: its host has not sent them"
        raise ArtifactsMissing(message, hint="run `runner recover` on the host that it ran on") from error
    if whole and not stored.repository.exists():
        await _unbundle(stored, settings)


async def _fetch(artifacts: ArtifactStore, stored: StoredRun, *, whole: bool) -> None:
    copied = stored.record.artifacts
    expected = copied.sha256 if copied is not None else None

    def work(stopped: Callable[[], bool]) -> None:
        contents = read_contents(artifacts, stored.record.id, expected)
        wanted = (lambda _: True) if whole else (lambda name: not name.startswith(_WORK))
        fetch_files(artifacts, contents, stored.directory, wanted, stopped=stopped)
        if whole:  # which a resumed run looks for
            (stored.directory / "output").mkdir(exist_ok=True, mode=0o700)

    await _in_thread(work)


async def _in_thread(work: Callable[[Callable[[], bool]], None]) -> None:
    """Do blocking work that can be cancelled; what it does then is thrown away."""
    stopped = threading.Event()
    try:
        await trio.to_thread.run_sync(partial(work, stopped.is_set), abandon_on_cancel=True)
    except Interrupted:  # nobody waits for it
        await trio.lowlevel.checkpoint()
    finally:
        stopped.set()


async def _unbundle(stored: StoredRun, settings: Settings) -> None:
    bundle, shallow = stored.directory / BUNDLE, stored.directory / SHALLOW
    if not bundle.is_file():
        return
    half = stored.repository.with_name(f".{stored.repository.name}.part")
    await trio.to_thread.run_sync(trees.remove, half)
    await open_git(settings).unbundle(bundle, shallow if shallow.is_file() else None, into=half)
    half.rename(stored.repository)


class Follower:
    """Brings what a run elsewhere prints to this host, while it is followed."""

    def __init__(self, growing: GrowingCopy) -> None:
        self._growing = growing
        self._fetching = trio.Lock()
        self._ended: set[str] = set()
        self._silent = False  # its host sends nothing

    async def keep(self) -> None:
        """Fetch what is new again and again, until cancelled."""
        while True:
            await self.look()
            await trio.sleep(LOOK)

    async def look(self) -> None:
        async with self._fetching:
            with suppress(RunnerError, OSError):  # it may be there the next time
                await _in_thread(lambda _: self._growing.fetch())

    async def arrive(self, recorded: ev.Recorded) -> None:
        """Wait, for a moment at most, until all is here that a step has printed when it ended."""
        match recorded.event:
            case ev.StepEnded(step=step) if not self._silent and step not in self._ended:
                with trio.move_on_after(_LATE) as late:
                    while not await self._has_ended(step):  # noqa: ASYNC110  # another host tells, by nothing but this
                        await trio.sleep(LOOK / 4)
                await self.look()
                self._silent = late.cancelled_caught

    async def _has_ended(self, step: str) -> bool:
        with suppress(RunnerError, OSError):
            await _in_thread(lambda _: self._ended.update(self._growing.ended()))
        return step in self._ended


@asynccontextmanager
async def following(stored: StoredRun, settings: Settings) -> AsyncIterator[Follower | None]:
    """Fetch what a run elsewhere prints while the block runs; ``None`` for one whose files are here, or nowhere."""
    if settings.artifacts is None or is_here(settings, stored.record.id):
        yield None
        return
    growing = GrowingCopy(open_artifacts(settings.artifacts), stored.record.id, stored.directory)
    follower = Follower(growing)
    await follower.look()
    async with open_services() as services:
        services.start_soon(follower.keep)
        yield follower
