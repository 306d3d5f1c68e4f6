"""End a run whose runner has died, from its journal alone. No step of it runs again.

Each part can be killed and repeated. Resources outside the store are found by the intents in the journal, and struck
off only after their absence was checked. First the processes are ended, then the work is saved by the run's own plan,
then everything is removed, and the terminal event comes last. The caller holds the run's lock.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import trio
from msgspec import Struct
from msgspec.structs import replace

from runner.core.errors import HostRefused, LeaseHeld, RunnerError, first_leaf
from runner.core.model import Handle, Outcome, Reason, RunHolder, Status, failed, succeeded
from runner.core.nurseries import open_services
from runner.engine.outcomes import exit_code
from runner.engine.run import Append
from runner.events import events as ev
from runner.events.record import RunRecord, fold
from runner.plan.model import RunPlan
from runner.ports.git import Snapshot
from runner.ports.provider import Provider
from runner.runtime.context import EventBuffer, RunContext, RunDependencies, RunPaths
from runner.runtime.incident_files import is_latest
from runner.runtime.lease_holder import LeaseHolder, renew_until_released
from runner.runtime.run_workspace import RunWorkspace
from runner.runtime.sandbox_session import SandboxSession
from runner.safefs import trees
from runner.steps.clone.plan import CloneBody
from runner.steps.provision.plan import ProvisionBody
from runner.steps.save.plan import SaveBody
from runner.steps.save.run import perform as save

KILLED = Outcome(status=Status.UNKNOWN, reason=Reason.UNKNOWN, message="its runner died while it ran")


class Recovered(Struct, frozen=True, kw_only=True):
    """The result of recovering a run, or a forecast of it. ``kept`` is evidence, ``left`` is what could not be removed
    and why, ``outputs`` are the delivered files of its agent."""

    run: str
    name: str
    outcome: str
    saved: str | None = None
    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


def has_work(record: RunRecord) -> bool:
    """Tell whether there may be unsaved work: the agent's tree was complete, so steps may have run in it."""
    if record.saved_work is not None:
        return False
    kinds = {step.kind: step.status for step in record.steps.values()}
    return kinds.get("clone", kinds.get("provision")) is Status.SUCCEEDED


def belongings(record: RunRecord, paths: RunPaths) -> list[Path]:
    """List the files that are removed with a run: temporary directories, and a repository without work."""
    found = [*paths.home.glob(f"tmp/{record.id}-*"), *paths.home.glob(f"sandboxes/.{record.id}-*.part")]
    kept = record.snapshot is not None or (record.saved_work is not None and record.saved_work.commit is not None)
    if kept:
        found += paths.repository.glob("tmp*")  # an index that git was using
    elif not unsaved(record):
        found += paths.home.glob(f"snapshots/{record.id}.git")
    return sorted(found)


def unsaved(record: RunRecord) -> bool:
    """Tell whether a workspace holds work that exists nowhere else."""
    return has_work(record) and any(kind == "workspace" for kind, _ in record.resources)


async def recover(
    record: RunRecord,
    plan: RunPlan | str,
    *,
    paths: RunPaths,
    deps: RunDependencies,
    append: Append,
    take: Callable[[], Awaitable[None]] | None = None,
    host: str | None = None,
) -> Recovered:
    """End a run that has lost its runner.

    Of a run that had ended, save and remove what was left then; it does not end again. ``take`` makes this process its
    runner for other hosts, or raises.

    What it has on another ``host`` stays for a recovery there. ``plan`` may be the reason why its work cannot be saved
    by it; then its tree is kept. Nothing is done while anyone but the run, or a recovery of it, holds the workspace's
    live lease. Raises what the store raises. Cancelling leaves the rest for the next time.
    """
    ending = _Ending(record=record, plan=plan, paths=paths, deps=deps, append=append, host=host)
    await ending.temporary()
    if take is not None:
        await take()
    try:
        await ending.lease()
    except LeaseHeld as held:
        return replace(ending.result(), left=(held.message,))
    async with open_services() as services:
        services.start_soon(ending.keep_lease)
        await ending.emit(*(ev.StepEnded(name, KILLED) for name in record.unfinished()))
        for kind, name in list(record.resources):
            if kind == "workspace":
                await ending.workspace(name, record.resources[kind, name])
        await ending.remove_own_paths()
        await ending.lease_holder.release(ending.emit)
    if record.ended is None:
        outcome = Outcome(status=Status.UNKNOWN, reason=Reason.UNKNOWN, message=_because(record))
        await ending.emit(ev.RunEnded(outcome, exit_code(outcome)))
    return ending.result()


def _because(record: RunRecord) -> str:
    during = [name for name, step in record.steps.items() if step.outcome == KILLED]
    return f"its runner died while {', '.join(during)} ran" if during else "its runner died"


class _Ending:
    def __init__(
        self,
        record: RunRecord,
        plan: RunPlan | str,
        paths: RunPaths,
        deps: RunDependencies,
        append: Append,
        *,
        host: str | None,
    ) -> None:
        self._record, self._plan, self._paths, self._deps, self._host = record, plan, paths, deps, host
        self._append = append
        self.lease_holder = LeaseHolder(record.workspace, RunHolder(record.id, recovering=True), deps.lease)
        self._removed: list[str] = []
        self._kept: list[str] = []
        self._left: list[str] = []
        self._unwritten: RunnerError | None = None  # why the journal takes no more: then nothing goes on

    async def emit(self, *events: ev.Event) -> None:
        if not events:
            return
        with trio.CancelScope(shield=True):
            try:
                written = await self._append(self._record.id, events, self.lease_holder.fence)
            except RunnerError as error:
                self._unwritten = error
                raise
            for recorded in written:
                fold(self._record, recorded)

    def result(self) -> Recovered:
        record, saved_work = self._record, self._record.saved_work
        saved = None if saved_work is None else saved_work.patch or "no change"
        return Recovered(
            run=record.id,
            name=record.name,
            outcome=record.status.value,
            saved=saved,
            removed=tuple(self._removed),
            kept=tuple(self._kept),
            left=tuple(self._left),
            outputs=saved_work.outputs if saved_work is not None else (),
        )

    async def temporary(self) -> None:
        """Remove temporary files before anything is written, since the disk may be full of them."""
        for path in sorted(self._paths.home.glob(f"tmp/{self._record.id}-*")):
            if await trio.to_thread.run_sync(remove, path) is None:
                self._removed.append(str(path))

    async def lease(self) -> None:
        """Acquire the lease, if anything needs it or has it.

        A lease of the run itself, or of another recovery of it, is taken by force: its holder is dead, since the caller
        holds the run's lock. Raises ``LeaseHeld``.
        """
        row = await self._deps.lease(self.lease_holder.workspace)
        if row.id or any(kind in ("lease", "workspace") for kind, _ in self._record.resources):
            dead = isinstance(row.holder, RunHolder) and row.holder.run == self._record.id
            await self.lease_holder.acquire(self.emit, forced=dead)

    async def keep_lease(self) -> None:
        """Refresh the lease while a large tree is saved. Once it is lost, nothing can be written."""

        async def write(*events: ev.Event) -> None:
            for recorded in await self._append(self._record.id, events, self.lease_holder.fence):
                fold(self._record, recorded)

        async def warn(message: str) -> None:
            await write(ev.WarningIssued("lease.refresh-failed", message))

        await renew_until_released(self.lease_holder, write, margin=0, warn=warn)

    async def workspace(self, name: str, place: str) -> None:
        """End what runs in a workspace, save its work, and remove it unless the work could not be saved."""
        try:
            await self._workspace(name, place)
        except* (RunnerError, OSError) as group:
            if self._unwritten is not None:
                raise self._unwritten from group
            self._left.append(f"workspace {name} {place}: {_words(group)}")

    async def _workspace(self, name: str, place: str) -> None:
        provider = self._deps.provider(place)
        # A loss of power may have taken the record of a workspace that was had warm: then its slot's is there.
        names = {name, self._record.slot} if name == self._record.workspace else {name}
        handles = [handle for handle in await provider.list_owned(self._deps.nonce) if handle.id in names]
        if not handles and self._host is not None:
            self._left.append(f"workspace {name} {place}: run `runner recover` on the host {self._host}")
            return
        for handle in handles:
            await provider.evict(handle)
            if has_work(self._record) and name == self._record.workspace:
                outcome = await self._step("save", partial(self._save, provider, handle))
                if self._record.saved_work is None:
                    self._kept.append(f"{self._paths.name_of(handle)}: {outcome.message}")
                    return
            await self.emit(ev.ResourceRemovalStarted("", "workspace", name))
            outcome = await self._step("teardown", partial(_tear_down, provider, handle))
            if not outcome.ok:
                self._left.append(f"workspace {name} {place}: {outcome.message}")
                return
            self._removed.append(f"workspace {name} {place}")
        await self.emit(ev.ResourceRemoved("", "workspace", name))

    async def _step(self, kind: str, perform: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """Perform the run's step of a kind once more. A failure is an outcome, as it is in a run."""
        unfinished = self._record.ended is None
        names = [name for name, step in self._record.steps.items() if step.kind == kind and unfinished]
        await self.emit(*(ev.StepStarted(name) for name in names))
        try:
            outcome = await perform()
        except* (RunnerError, OSError) as group:
            if self._unwritten is not None:
                raise self._unwritten from group
            outcome = failed(Reason.PLATFORM, _words(group))
        await self.emit(*(ev.StepEnded(name, outcome) for name in names))
        return outcome

    async def _save(self, provider: Provider, handle: Handle) -> Outcome:
        plan, record = self._plan, self._record
        if isinstance(plan, str):
            return failed(Reason.PLATFORM, plan)
        body, provision, clone = plan.body(SaveBody), plan.body(ProvisionBody), plan.body(CloneBody)
        assert body is not None  # every plan saves
        assert provision is not None
        base = record.base or (clone.commit if clone is not None and not clone.include_dirty else None)
        inputs = (name for name, file in provision.incident if file.whole and provision.inputs_in_tree)
        if base is None and any(step.kind == "clone" for step in record.steps.values()):
            return failed(Reason.PLATFORM, "the journal does not say what the work is to be compared with")
        await trio.to_thread.run_sync(trees.remove, self._paths.directory / "output")  # half a copy of it
        async with trio.open_nursery() as services:
            started = [step for step in plan.steps if record.steps[step.id].started is not None]
            events = EventBuffer(self._emit_news)
            run = RunContext(
                id=record.id,
                plan=plan,
                digest=record.plan,
                paths=self._paths,
                deps=self._deps,
                events=events,
                lease_holder=self.lease_holder,
                workspace=RunWorkspace(
                    provider=provider,
                    handle=handle,
                    inputs=tuple(inputs),
                    injected_files=record.injected_files,
                    protected=record.protected,
                ),
                sandboxes=SandboxSession(services, events.emit),
                rehearsal=record.rehearsal,
                unchecked=tuple(dict.fromkeys(name for step in started for name in step.secret_names)),
            )
            if base is not None:
                run.workspace.cloned(base)
            if snapshot := record.snapshot:
                run.results.snapshot = Snapshot(
                    commit=snapshot.commit,
                    tree=snapshot.tree,
                    base=snapshot.base,
                    entries=snapshot.entries,
                    ignored=snapshot.ignored,
                )
            # By now the incident may have the output of a later run; then this one's stays here.
            latest = record.log is not None and await trio.to_thread.run_sync(is_latest, Path(record.log))
            if record.log is not None and not latest:
                self._kept.append(f"{run.paths.directory / 'output'}: another run has worked on the incident since")
            return await save(body if latest else replace(body, incident=None), run)

    async def _emit_news(self, *events: ev.Event) -> None:
        """Emit all but violations that the journal has already."""
        known = set(self._record.violations)
        await self.emit(*(e for e in events if not (isinstance(e, ev.ViolationsFound) and known >= {*e.violations})))

    async def remove_own_paths(self) -> None:
        """Remove the run's own files, and strike off the checkout."""
        for path in belongings(self._record, self._paths):
            left = await trio.to_thread.run_sync(remove, path)
            if left:
                self._left.append(f"{path}: {left}")
            else:
                self._removed.append(str(path))
        for kind, name in list(self._record.resources):
            if kind == "checkout" and not (self._paths.checkout.parent / name).exists():
                await self.emit(ev.ResourceRemoved("", kind, name))


async def _tear_down(provider: Provider, handle: Handle) -> Outcome:
    await provider.destroy(handle)
    return succeeded("nothing left")


def remove(path: Path) -> str | None:
    """Remove a tree or a file. Returns the reason when something of it remains."""
    try:
        if path.is_dir() and not path.is_symlink():
            return next(iter(trees.remove(path)), None)
        path.unlink(missing_ok=True)
    except OSError as error:
        return error.strerror
    return None


def _words(group: BaseExceptionGroup[RunnerError | OSError]) -> str:
    error = first_leaf(group)
    if isinstance(error, OSError):
        error = HostRefused.of(error)
    assert isinstance(error, RunnerError)
    return error.message
