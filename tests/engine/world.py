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

from runner import events as ev
from runner.engine.recover import recover
from runner.engine.run import Control, carry_out
from runner.errors import LeaseHeld, LeaseLost, RunnerError, StoreBusy, StoreFailed
from runner.lifecycle.lease import TTL, LeaseEvent
from runner.model import Fence, Handle, IsolationClass, Lease, Limits, Outcome, Receipt, succeeded
from runner.plan.model import RunPlan, Step
from runner.ports.provider import KILL_GRACE, Opening, Probe
from runner.record import replay
from runner.steps._lease import Tenure, keep
from runner.steps._run import Places, Ports, Run
from runner.store.memory import MemoryStore

MINUTE, HOUR = 60.0, 3_600.0
NOWHERE = Path("/nonexistent")
STOP_BUDGET = 30.0  # seconds


class Died(BaseException):
    """The process is no more. Nothing of it catches this."""


@dataclass(eq=False)
class Process:
    """A runner. Whatever it does to the world passes its gate, where it waits while it is paused."""

    name: str
    paused_until: float = -math.inf
    dead: bool = False
    over: bool = False
    woken: trio.Event = field(default_factory=trio.Event)
    held: set[str] = field(default_factory=set)  # workspaces that it knows it has

    async def gate(self) -> None:
        while not self.dead and trio.current_time() < self.paused_until:
            with trio.move_on_after(self.paused_until - trio.current_time()):
                await self.woken.wait()
        if self.dead:
            raise Died

    def pause(self, seconds: float) -> None:
        self.paused_until = trio.current_time() + seconds

    def resume(self) -> None:
        self.paused_until = -math.inf
        self.woken.set()
        self.woken = trio.Event()

    def die(self) -> None:
        self.dead = True
        self.resume()


@dataclass
class Owner:
    process: Process
    lease: str
    number: int
    expires: int


@dataclass
class Watcher:
    """Who may write, as a person would reckon it from what was acknowledged; what breaks that goes to ``broken``."""

    owners: dict[str, Owner] = field(default_factory=dict)
    highest: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

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
                self.highest[workspace] = number
                self.owners[workspace] = Owner(process, lease, number, at + round(TTL * 1e6))
            case ev.LeaseRefreshed(workspace=workspace):
                self.owners[workspace].expires = at + round(TTL * 1e6)
            case ev.LeaseReleased(workspace=workspace):
                self.owners.pop(workspace)
            case ev.RunEnded():
                self.ended[journal] += 1


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
        self.workspaces: dict[str, str] = {}  # and the run of each
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
        owner = self.watcher.owners.get(workspace)
        mine = owner is not None and owner.process is process
        others = [s for s in self.sandboxes.get(workspace, ()) if s.process is not process and not s.late]
        if mine and others:
            self.watcher.broken.append(f"{process.name} began in {workspace}, where {others[0].process.name} runs")
        sandbox = Sandbox(process, late=not mine)
        self.sandboxes.setdefault(workspace, set()).add(sandbox)
        self.say(process.name, f"sandbox in {workspace}{' (late)' if sandbox.late else ''}")
        return sandbox

    def evict(self, process: Process, workspace: str) -> None:
        self.say(process.name, f"evicts {workspace}")
        self.sandboxes.pop(workspace, None)

    async def sleep(self, process: Process, seconds: float) -> None:
        await trio.sleep(seconds)
        await process.gate()


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
        await self._travel()
        if world.unlucky(0.03):
            world.say(process.name, f"busy: {what}")
            raise StoreBusy("another process keeps the store locked")
        for event in events:
            if isinstance(event, ev.LeaseReleased):
                process.held.discard(event.workspace)
        try:
            recorded = await append(journal, events, fence=fence)
        except RunnerError as refusal:
            world.say(process.name, f"{refusal.code}: {what}")
            await self._travel()
            raise
        world.say(process.name, what)
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
        slow = self._world.unlucky(0.05)
        await trio.sleep(self._world.luck.uniform(0, 20.0 if slow else 0.02))
        await self._process.gate()


def _short(event: ev.Event) -> str:
    step = getattr(event, "step", "") or getattr(event, "message", "")
    return f"{type(event).__name__}{f' {step}' if step else ''}"
