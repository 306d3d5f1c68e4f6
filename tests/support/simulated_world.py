"""A simulated world of runners that share a store and workspaces, whose time, luck and faults come from a seed.

Runs are the engine's own, from their first event to their last, with steps that have no files. Every other part of the
world is played: processes that are paused and that die, a store that is slow, busy and loses answers, a wall clock
that jumps. Each write goes past a watcher, which keeps its own idea of who may write and knows nothing of the rules.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import trio

from runner.core.errors import LeaseHeld, ProviderFailed, RunnerError, StoreBusy, StoreFailed
from runner.core.model import CommandHolder, Fence, Handle, IsolationClass, Lease, Outcome, SavedWork, succeeded
from runner.engine.recover import recover
from runner.engine.run import execute_run
from runner.engine.stopping import RunCancellation
from runner.events import events as ev
from runner.events.record import replay
from runner.gateway.gateway import ModelGateway
from runner.lifecycle.lease import TTL, LeaseEvent
from runner.plan.model import RunPlan, Step
from runner.ports.provider import KILL_GRACE, Probe, SandboxSpec
from runner.runtime.context import RunContext, RunDependencies, RunPaths
from runner.runtime.lease_holder import LeaseHolder, renew_until_released
from runner.store.memory import MemoryStore
from tests.support.small_plans import small_run, small_step

MINUTE, HOUR = 60.0, 3_600.0
NOWHERE = Path("/nonexistent")
STOP_BUDGET = 30.0  # seconds
SHARED = "w"  # a workspace that belongs to no run


class Died(BaseException):
    """The process is no more. Nothing of it catches this."""


@dataclass(eq=False)
class Process:
    """A runner. Whatever it does to the world passes its gate, where it waits while it is paused."""

    name: str
    paused_until: float = -math.inf
    cut_until: float = -math.inf  # until when the store refuses most of what it writes
    away: float = -math.inf  # when it was paused last, or its clock was not everybody's
    dead: bool = False
    over: bool = False
    woken: trio.Event = field(default_factory=trio.Event)
    held: set[str] = field(default_factory=set)  # workspaces that it knows it has
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    async def gate(self) -> None:
        while not self.dead and trio.current_time() < self.paused_until:
            with trio.move_on_after(self.paused_until - trio.current_time()):
                await self.woken.wait()
        if self.dead:
            raise Died

    def pause(self, seconds: float) -> None:
        self.paused_until = self.away = trio.current_time() + seconds

    def resume(self) -> None:
        self.paused_until = -math.inf
        self.woken.set()
        self.woken = trio.Event()

    def die(self) -> None:
        self.dead, self.away = True, math.inf
        self.resume()
        self.scope.cancel()


@dataclass
class Owner:
    process: Process
    lease: str
    number: int
    expires: int
    since: float  # when it was acquired or refreshed last, by its own clock


@dataclass
class Watcher:
    """Who may write, as a person would reckon it from what was acknowledged; what breaks that goes to ``broken``."""

    owners: dict[str, Owner] = field(default_factory=dict)
    lasts: dict[str, Process] = field(default_factory=dict)  # who acquired each the last time
    highest: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    def sees(self, process: Process, journal: str, events: Sequence[ev.Event], fence: Fence | None, at: int) -> None:
        """A write that was accepted."""
        if fence is not None:
            owner = self.owners.get(fence.workspace)
            if owner is None or (owner.lease, owner.number) != (fence.lease, fence.number) or at >= owner.expires:
                self.broken.append(f"{process.name} wrote with {fence}, but {owner} has the workspace")
        elif process.held and not all(isinstance(event, LeaseEvent) for event in events) and not _last(events):
            self.broken.append(f"{process.name} has {process.held} and wrote without a fence: {events}")
        for event in events:
            self._follows(process, journal, event, at)

    def _follows(self, process: Process, journal: str, event: ev.Event, at: int) -> None:
        match event:
            case ev.LeaseAcquired(workspace=workspace, lease=lease, fence=number):
                before = self.owners.get(workspace)
                if before is not None and at < before.expires and not event.forced:
                    self.broken.append(f"{process.name} took {workspace} from {before}")
                if number <= self.highest[workspace]:
                    self.broken.append(f"the fence of {workspace} fell from {self.highest[workspace]} to {number}")
                last = self.lasts.get(workspace)
                if workspace in process.held and last is not process:
                    self.broken.append(
                        f"{process.name} took {workspace} again, which {last.name if last else None} had"
                    )
                self.lasts[workspace] = process
                if before is not None:
                    how = "forced" if event.forced else "expired"
                    self.seen["regained" if before.process is process else how] += 1
                self.highest[workspace] = number
                self.owners[workspace] = Owner(process, lease, number, at + round(TTL * 1e6), trio.current_time())
            case ev.LeaseRefreshed(workspace=workspace):
                owner = self.owners[workspace]
                owner.expires, owner.since = at + round(TTL * 1e6), trio.current_time()
            case ev.LeaseReleased(workspace=workspace):
                self.owners.pop(workspace)
            case ev.RunEnded(outcome=outcome):
                self.ended[journal] += 1
                self.seen[f"run {outcome.reason.value if outcome.reason else 'succeeded'}"] += 1


def _leaves(group: BaseExceptionGroup[Any]) -> list[BaseException]:
    nested = (_leaves(error) if isinstance(error, BaseExceptionGroup) else [error] for error in group.exceptions)
    return [leaf for leaves in nested for leaf in leaves]


def _last(events: Sequence[ev.Event]) -> bool:
    return isinstance(events[-1], ev.RunEnded)


@dataclass(eq=False)
class Sandbox:
    """Something that runs in a workspace. ``late``: its holder had lost the lease, and could not know yet."""

    process: Process
    late: bool


@dataclass(frozen=True)
class Body:
    world: World
    process: Process


class World:
    def __init__(self, seed: int) -> None:
        self.luck = random.Random(seed)
        self.trace: list[str] = []
        self.watcher = Watcher()
        self.jumped = 0.0  # seconds by which the wall clock is ahead of everybody's own
        self.store = MemoryStore(self.now)
        self.workspaces = {SHARED}
        self.sandboxes: dict[str, set[Sandbox]] = {}
        self.processes: list[Process] = []
        self.runs: dict[str, Process] = {}  # who carries each out or recovers it, or did last
        self.calm = False

    def now(self) -> int:
        return round((10 * HOUR + trio.current_time() + self.jumped) * 1e6)

    def say(self, who: str, what: object) -> None:
        self.trace.append(f"{trio.current_time():10.1f} {self.jumped:+8.0f}  {who:12} {what}")

    # --- what processes reach ---

    def connect(self, process: Process) -> Connection:
        return Connection(self, process)

    def start(self, process: Process, workspace: str) -> Sandbox:
        """Begin something in a workspace. Raises ``ProviderFailed`` when that is gone."""
        if workspace not in self.workspaces:
            raise ProviderFailed(f"there is no workspace {workspace}")
        owner = self.watcher.owners.get(workspace)
        mine = owner is not None and owner.process is process
        others = [s for s in self.sandboxes.get(workspace, ()) if s.process is not process and not s.late]
        if mine and others:
            self.watcher.broken.append(f"{process.name} began in {workspace}, where {others[0].process.name} runs")
        sandbox = Sandbox(process, late=not mine)
        self.sandboxes.setdefault(workspace, set()).add(sandbox)
        self.say(process.name, f"sandbox in {workspace}{' (late)' if sandbox.late else ''}")
        return sandbox

    def check_left(self, event: ev.LeaseAcquired) -> None:
        """Whoever was there all the time has ended what it ran before its lease did, whatever the store refused it."""
        before = self.watcher.owners.get(event.workspace)
        if before is None or event.forced or before.process.away >= before.since:
            return
        if any(sandbox.process is before.process for sandbox in self.sandboxes.get(event.workspace, ())):
            self.watcher.broken.append(f"{before.process.name} was there, and ran on in {event.workspace}")

    def evict(self, process: Process, workspace: str) -> None:
        self.say(process.name, f"evicts {workspace}")
        self.sandboxes.pop(workspace, None)

    async def end(self, sandbox: Sandbox, workspace: str) -> None:
        await sandbox.process.gate()
        if sandbox in self.sandboxes.get(workspace, ()):
            self.sandboxes[workspace].remove(sandbox)

    async def work(self, process: Process) -> None:
        await trio.sleep(self.luck.choice((1.0, 10 * MINUTE, 1.2 * HOUR)))
        await process.gate()

    def refuses(self, process: Process, events: Sequence[ev.Event]) -> bool:
        return self.unlucky(0.7 if trio.current_time() < process.cut_until else 0.02)

    def unlucky(self, chance: float) -> bool:
        return not self.calm and self.luck.random() < chance

    # --- who lives in it ---

    async def live(self, process: Process, action: Callable[[Process], Awaitable[None]]) -> None:
        """One process from beginning to end, which may be its death."""
        self.processes.append(process)
        try:
            with process.scope:
                await action(process)
        except* (RunnerError, Died) as group:
            self.say(process.name, f"gives up: {[str(error) for error in _leaves(group)]}")
        process.over = True
        left = [s for sandboxes in self.sandboxes.values() for s in sandboxes if s.process is process]
        if left and not process.dead:
            self.watcher.broken.append(f"{process.name} has ended, and what it began runs on")

    async def run(self, process: Process, id: str) -> None:
        """A run, as ``runner apply`` carries it out."""
        self.runs[id] = process
        connection = self.connect(process)
        record = await execute_run(
            plan_of(Body(self, process)),
            "sha256:0",
            id=id,
            paths=RunPaths(NOWHERE, id),
            deps=self.deps(process),
            append=connection.append,
            control=RunCancellation(stop_budget_seconds=STOP_BUDGET),
        )
        self.say(process.name, f"exit {record.exit_code}")

    async def use(self, process: Process, workspace: str) -> None:
        """A command in a workspace, outside of any run."""
        connection = self.connect(process)
        lease_holder = LeaseHolder(workspace, CommandHolder(process.name, 7), connection.lease)

        async def emit(*events: ev.Event) -> None:
            await connection.append_to_workspace(workspace, events, lease_holder.fence)

        for patience in (20 * MINUTE, 20 * MINUTE, 20 * MINUTE, 0):
            try:
                before = await lease_holder.acquire(emit)
                break
            except LeaseHeld:
                if not patience:
                    raise
                await trio.sleep(patience)
        if before.id:
            await process.gate()
            self.evict(process, workspace)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep, lease_holder, emit, nursery.cancel_scope)
                await self._command(process, lease_holder, emit)
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await lease_holder.release(emit)

    async def _keep(self, lease_holder: LeaseHolder, emit: Any, work: trio.CancelScope) -> None:
        async def warn(message: str) -> None:
            await emit(ev.WarningIssued("lease.refresh-failed", message))

        await renew_until_released(lease_holder, emit, margin=KILL_GRACE, warn=warn)
        work.cancel()

    async def _command(self, process: Process, lease_holder: LeaseHolder, emit: Any) -> None:
        for number in range(self.luck.randint(1, 3)):
            await process.gate()
            lease_holder.require()
            sandbox = self.start(process, lease_holder.workspace)
            try:
                await self.work(process)
                await emit(ev.WarningIssued("x.work", str(number)))
            finally:
                with trio.CancelScope(shield=True):
                    await self.end(sandbox, lease_holder.workspace)

    async def break_(self, process: Process, workspace: str) -> None:
        """``runner lease break``."""
        connection = self.connect(process)
        lease_holder = LeaseHolder(workspace, CommandHolder("break", 7), connection.lease)

        async def emit(*events: ev.Event) -> None:
            await connection.append_to_workspace(workspace, events, lease_holder.fence)

        await lease_holder.acquire(emit, forced=True)
        await process.gate()
        self.evict(process, workspace)
        await lease_holder.release(emit)

    async def recover(self, process: Process, id: str) -> None:
        """``runner recover`` of one run, which does nothing while another process holds that.

        Now and then it is deceived, as by a file system whose locks are not everybody's: leases must do then, from
        when there is a workspace.
        """
        await process.gate()
        holder = self.runs[id]
        deceived = f"{id}-1" in self.workspaces and self.unlucky(0.2)
        if not (holder.dead or holder.over or deceived):
            return
        self.runs[id] = process
        record = replay(id, await self.store.events(id))
        leased = {lease.workspace for lease in await self.store.leases()}
        if record.ended is not None and not record.left_behind and f"{id}-1" not in {*leased, *self.workspaces}:
            return
        connection = self.connect(process)
        if record.started:
            done = await recover(
                record, "no plan", paths=RunPaths(NOWHERE, id), deps=self.deps(process), append=connection.append
            )
            self.say(process.name, f"{done.outcome}, left {done.left}")

    def deps(self, process: Process) -> RunDependencies:
        return RunDependencies(
            provider=lambda name: cast(Any, Place(self, process)),
            git=cast(Any, None),
            agent=cast(Any, None),
            sub_runner=cast(Any, None),
            gateway=ModelGateway(cast(Any, None)),
            cluster=cast(Any, None),
            open_egress=cast(Any, None),
            mcp=cast(Any, None),
            model_key=cast(Any, None),
            model_url=cast(Any, None),
            lease=self.connect(process).lease,
            nonce="world",
            now=self.now,
            chance=lambda: 1.0,
        )

    # --- its fate ---

    async def unfold(self, actions: int = 16) -> None:
        """Runs begin, all kinds of things happen, then all is calm: who lives comes to an end, and all is recovered."""
        async with trio.open_nursery() as nursery:
            for number in range(self.luck.randint(1, 3)):
                self._begin(nursery, f"run{number}", self.run, f"r{number}")
            for number in range(actions):
                await trio.sleep(self.luck.expovariate(1 / (6 * MINUTE)))
                self._happen(nursery, number)
            self.calm = True
            for process in self.processes:
                process.resume()
                process.cut_until = -math.inf
        self.jumped += 3 * HOUR  # the leases of those who died expire
        for id in self.runs:
            await self.live(Process(f"last-{id}"), lambda process, id=id: self.recover(process, id))
        await self.live(Process("next"), lambda process: self.use(process, SHARED))

    def _begin(
        self, nursery: trio.Nursery, name: str, what: Callable[[Process, str], Awaitable[None]], of: str
    ) -> None:
        nursery.start_soon(self.live, Process(name), lambda process: what(process, of))

    def _happen(self, nursery: trio.Nursery, number: int) -> None:
        luck, living = self.luck, [process for process in self.processes if not (process.over or process.dead)]
        runs, workspaces = list(self.runs), sorted(self.workspaces)
        match luck.choices(("pause", "cut", "die", "suspend", "use", "break", "recover"), (4, 4, 1, 3, 4, 1, 3))[0]:
            case "cut" if living:
                process, seconds = luck.choice(living), luck.choice((MINUTE, 20 * MINUTE, 1.5 * HOUR))
                self.say(process.name, f"hardly reaches the store for {seconds}")
                process.cut_until = trio.current_time() + seconds
            case "pause" if living:
                process, seconds = luck.choice(living), luck.choice((10.0, 10 * MINUTE, 1.2 * HOUR, 3 * HOUR))
                self.say(process.name, f"is paused for {seconds}")
                process.pause(seconds)
            case "die" if living:
                process = luck.choice(living)
                self.say(process.name, "dies")
                process.die()
            case "suspend":
                self.jumped += luck.choice((-MINUTE, MINUTE, 0.5 * HOUR, 2 * HOUR))
                for process in living:
                    process.away = max(process.away, trio.current_time())
            case "use":
                workspace = luck.choice(workspaces)
                for one in "ab"[: luck.randint(1, 2)]:
                    self._begin(nursery, f"use{number}{one}", self.use, workspace)
            case "break":
                workspace = luck.choice(workspaces)
                for one in "ab"[: luck.randint(1, 2)]:
                    self._begin(nursery, f"break{number}{one}", self.break_, workspace)
            case "recover" if runs:
                self._begin(nursery, f"recover{number}", self.recover, luck.choice(runs))

    async def flaws(self) -> list[str]:
        """What must not be so at the end."""
        found = list(self.watcher.broken)
        for id in self.runs:
            if (await self.store.events(id)) and self.watcher.ended[id] != 1:
                found.append(f"run {id} has ended {self.watcher.ended[id]} times")
        found += [f"lease {lease}" for lease in await self.store.leases()]
        found += [f"workspace {workspace}" for workspace in sorted(self.workspaces - {SHARED})]
        found += [f"sandbox in {workspace}" for workspace, sandboxes in self.sandboxes.items() if sandboxes]
        return found


class Connection:
    """The store as one process sees it."""

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process

    async def append(self, run: str, events: Sequence[ev.Event], fence: Fence | None) -> Sequence[ev.Recorded]:
        return await self._write(self._world.store.append, run, events, fence)

    async def append_to_workspace(
        self, workspace: str, events: Sequence[ev.Event], fence: Fence | None
    ) -> Sequence[ev.Recorded]:
        return await self._write(self._world.store.append_to_workspace, workspace, events, fence)

    async def lease(self, workspace: str) -> Lease:
        await self._travel()
        row = await self._world.store.lease(workspace)
        await self._travel()
        return row

    async def _write(
        self,
        append: Callable[..., Awaitable[Sequence[ev.Recorded]]],
        journal: str,
        events: Sequence[ev.Event],
        fence: Fence | None,
    ) -> Sequence[ev.Recorded]:
        world, process = self._world, self._process
        what = f"{[_short(event) for event in events]} behind {fence.number if fence else None}"
        for event in events:
            if isinstance(event, ev.LeaseReleased):
                process.held.discard(event.workspace)
        await self._travel()
        if world.refuses(process, events):
            world.say(process.name, f"busy: {what}")
            raise StoreBusy("another process keeps the store locked")
        try:
            recorded = await append(journal, events, fence=fence)
        except RunnerError as refusal:
            world.say(process.name, f"{refusal.code}: {what}")
            world.watcher.seen[refusal.code] += 1
            await self._travel()
            raise
        world.say(process.name, what)
        for event in events:
            if isinstance(event, ev.LeaseAcquired):
                world.check_left(event)
        world.watcher.sees(process, journal, events, fence, world.now())
        await self._travel()
        if world.unlucky(0.01):
            world.say(process.name, f"answer lost: {what}")
            raise StoreFailed("the answer was lost")
        for event in events:
            if isinstance(event, ev.LeaseAcquired):
                process.held.add(event.workspace)
        return recorded

    async def _travel(self) -> None:
        await self._process.gate()
        if self._world.unlucky(0.1):
            await trio.sleep(self._world.luck.uniform(0, 20.0))
            await self._process.gate()
        else:
            await trio.lowlevel.checkpoint()


def _short(event: ev.Event) -> str:
    step = getattr(event, "step", "") or getattr(event, "message", "")
    return f"{type(event).__name__}{f' {step}' if step else ''}"


# --- what a run is made of ------------------------------------------------------------------------


class Place:
    """The provider of this world, as one process reaches it."""

    name = "place"

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process

    async def _reach(self) -> None:
        await trio.lowlevel.checkpoint()
        await self._process.gate()

    async def create(self, id: str) -> Handle:
        await self._reach()
        self._world.workspaces.add(id)
        return _handle(id)

    @asynccontextmanager
    async def open(self, handle: Handle, spec: SandboxSpec) -> AsyncIterator[None]:
        await trio.lowlevel.checkpoint()
        sandbox = self._world.start(self._process, handle.id)
        try:
            yield
        finally:
            with trio.CancelScope(shield=True):
                await self._world.end(sandbox, handle.id)

    async def list_owned(self, nonce: str) -> list[Handle]:
        await self._reach()
        return [_handle(id) for id in sorted(self._world.workspaces)]

    async def evict(self, handle: Handle) -> None:
        await self._reach()
        self._world.evict(self._process, handle.id)

    async def destroy(self, handle: Handle) -> None:
        await self._reach()
        self._world.evict(self._process, handle.id)
        self._world.workspaces.discard(handle.id)


def _handle(id: str) -> Handle:
    return Handle(provider="place", id=id, tree=NOWHERE, private=NOWHERE, uid=0)


async def making(body: Body, run: RunContext) -> Outcome:
    place = Place(body.world, body.process)
    await run.emit(ev.ResourceIntended("making", "workspace", run.workspace_id, place.name))
    handle = await place.create(run.workspace_id)
    run.workspace.attach(
        cast(Any, place), Probe(provider=place.name, available=True, isolation=IsolationClass.NONE), handle
    )
    await run.emit(ev.ResourceCreated("making", "workspace", run.workspace_id))
    return succeeded()


async def working(body: Body, run: RunContext) -> Outcome:
    world = body.world
    for number in range(world.luck.randint(1, 5)):
        await run.open_as(SandboxSpec())
        await world.work(body.process)
        await run.emit(ev.WarningIssued("x.work", str(number)))
    return succeeded()


async def saving(body: Body, run: RunContext) -> Outcome:
    if run.workspace.handle is not None:
        await run.sandboxes.close()
        run.results.saved_work = SavedWork(commit=None, patch=None, patch_sha256=None, patch_bytes=0, changed=0)
        await run.emit(ev.WorkSaved(run.results.saved_work))
    return succeeded()


STEPS = {f"runner.steps.{step.__name__}.run": SimpleNamespace(perform=step) for step in (making, working, saving)}


def plan_of(body: Body) -> RunPlan:
    def step(kind: str, phase: Any, *needs: str) -> Step:
        when: Any = "ended" if phase == "finalize" else "success"
        seconds = 20 * HOUR if phase == "work" else STOP_BUDGET
        return small_step(kind, *needs, phase=phase, deadline_seconds=seconds, body=body, when=when)

    steps = (
        step("lease", "work"),
        step("making", "work", "lease"),
        step("working", "work", "making"),
        step("saving", "finalize"),
        step("teardown", "finalize", "saving"),
        step("release", "finalize", "teardown"),
    )
    times = {"deadline_seconds": 20 * HOUR, "stop_budget_seconds": STOP_BUDGET}
    return small_run("work", *steps, providers=("place",), **times)
