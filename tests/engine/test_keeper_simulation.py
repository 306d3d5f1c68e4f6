"""A keeper, its claimers and their deaths, with the luck of a seed: no slot is had twice, nothing is left for good.

Whatever a process does to the world passes its gate, which a dead one never leaves. What a dead keeper had running ends
by itself, since nobody listens to it any more.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from runner.core.errors import ProviderFailed, RunnerError
from runner.core.model import Handle, Limits, PoolMissReason, SlotKey
from runner.engine.pool import Keeper, clear
from runner.lifecycle.pool import BACK_OFF, name_of
from runner.ops.pool.handoff import discard
from runner.ports.provider import SandboxHandoff, SandboxSpec, WorkspaceRequest
from runner.ports.store import PoolRow
from runner.store.memory import MemoryStore
from tests.support.fake_provider import FakeProvider
from tests.support.quick_folder import quick_folder
from tests.support.simulated_world import Died

KEY = SlotKey(provider="fake", image=None, limits=Limits())
NAME = name_of(KEY)
HOUR = 3_600.0


@dataclass(eq=False)
class Process:
    dead: bool = False
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    def die(self) -> None:
        self.dead = True
        self.scope.cancel()

    def gate(self) -> None:
        if self.dead:
            raise Died

    def reaching(self, thing: Any) -> Any:
        """What it sees of a part of the world."""
        return Reached(thing, self)


class Reached:
    def __init__(self, thing: Any, process: Process) -> None:
        self._thing, self._process = thing, process

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._thing, name)
        if not iscoroutinefunction(found):
            return found

        async def through(*args: Any, **kwargs: Any) -> Any:
            self._process.gate()
            result = await found(*args, **kwargs)
            self._process.gate()
            return result

        return through


class Luck(Mapping[str, RunnerError]):
    """Faults of the provider that come and go."""

    def __init__(self, world: World) -> None:
        self._world = world

    def get(self, method: str, default: Any = None) -> Any:
        world = self._world
        bad = not world.calm and method in ("create", "open_slot", "ping", "assign") and world.luck.random() < 0.08
        return ProviderFailed(f"{method} has no luck") if bad else None

    def __getitem__(self, method: str) -> RunnerError:
        raise KeyError(method)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class World:
    def __init__(self, seed: int, home: Path) -> None:
        self.luck = random.Random(seed)
        self.calm = False
        self.store = MemoryStore(lambda: round(trio.current_time() * 1e6))
        self.provider = FakeProvider(home, faults=Luck(self))
        self.names = count(1)
        self.process = Process(dead=True)
        self.keeper: Keeper | None = None
        self.had: Counter[str] = Counter()  # how often each slot was had
        self.seen: Counter[str] = Counter()

    async def keep(self) -> None:
        """One keeper after the other, each until its death."""
        while True:
            self.process = process = Process()
            await clear(self.store, [self.provider])
            self.keeper = keeper = Keeper(
                process.reaching(self.store),
                lambda name, process=process: process.reaching(self.provider),  # type: ignore[misc]
                name="keeper",
                new_id=lambda: str(next(self.names)),
            )
            try:
                with process.scope:
                    await keeper.run()
            except* Died:
                self.seen["keeper died"] += 1
            self.keeper = None
            await trio.sleep(self.luck.uniform(0, 5))

    async def claim(self, id: str) -> None:
        """A run from its wish to its end, or to its recovery."""
        process, request = Process(), WorkspaceRequest(id=id, run="run", nonce=self.store.nonce)
        async with trio.open_nursery() as nursery:
            if self.luck.random() < 0.3:
                nursery.start_soon(self._die_later, process)
            try:
                with process.scope:
                    await self._use(process, request)
            except* (Died, RunnerError):
                self.seen["claimer failed"] += not process.dead
            self.seen["claimer died"] += process.dead
            nursery.cancel_scope.cancel()
        while not await self._removed(request):  # as its recovery does, until it succeeds
            await trio.sleep(1)

    async def _removed(self, request: WorkspaceRequest) -> bool:
        await discard(self.provider, request)
        await trio.sleep(2)  # a keeper may be about to find that nobody is there
        return request.id not in [handle.id for handle in await self.provider.list_owned(self.store.nonce)]

    async def _die_later(self, process: Process) -> None:
        await trio.sleep(self.luck.choice((0.0, 0.05, 5.0)) * self.luck.random())
        process.die()

    async def _use(self, process: Process, request: WorkspaceRequest) -> None:
        provider = process.reaching(self.provider)
        handle = await self._ask(process, request) or await provider.create(request)
        async with provider.open(handle, SandboxSpec()):
            await trio.sleep(self.luck.uniform(0, 20))
        await provider.destroy(handle)

    async def _ask(self, process: Process, request: WorkspaceRequest) -> Handle | None:
        got: list[Handle] = []

        async def deliver(handle: Handle, handoff: SandboxHandoff) -> bool:
            if not self.calm and self.luck.random() < 0.03:
                self.process.die()
            await trio.sleep(self.luck.choice((0.0, 0.0, 0.2)))
            if process.dead or self.process.dead:
                self.provider.running.discard(str(handle.slot))  # who has the descriptors is no more
                return False
            self.provider.receive(handle, handoff)
            self.had[str(handle.slot)] += 1
            got.append(handle)
            return True

        if self.keeper is None:
            return None
        try:
            missed = await self.keeper.claim(KEY, request, deliver)
        except Died:
            missed = PoolMissReason.NO_KEEPER
            process.gate()
            await discard(self.provider, request)
        self.seen[missed.value if missed else "hit"] += 1
        return got[0] if got else None

    async def trouble(self) -> None:
        while True:
            await trio.sleep(self.luck.uniform(1, 60))
            if self.luck.random() < 0.3:
                self.process.die()
            else:
                await self.store.resize_pools({NAME: self.luck.randrange(5)})


async def live(seed: int, home: Path, runs: int = 30) -> World:
    world = World(seed, home)
    await world.store.put_pools([PoolRow(NAME, KEY, 3)])
    async with trio.open_nursery() as keeping:
        keeping.start_soon(world.keep)
        async with trio.open_nursery() as runners:
            async with trio.open_nursery() as troubled:
                troubled.start_soon(world.trouble)
                for number in range(runs):
                    await trio.sleep(world.luck.choice((0.0, 0.1, 5.0, 30.0)))
                    runners.start_soon(world.claim, f"run-{number}")
                troubled.cancel_scope.cancel()
            world.calm = True
        size = world.luck.randrange(5)
        await world.store.resize_pools({NAME: size})
        await trio.sleep(60 + BACK_OFF[-1])
        slots = await world.store.slots()

        assert [slot.state.value for slot in slots] == ["ready"] * size
        assert world.provider.running == {slot.id for slot in slots}
        assert {handle.id for handle in await world.provider.list_owned(world.store.nonce)} == world.provider.running
        keeping.cancel_scope.cancel()
    assert await world.store.slots() == []
    assert await world.provider.list_owned(world.store.nonce) == []
    assert world.provider.running == set()
    assert not [slot for slot, times in world.had.items() if times > 1]
    return world


_MANY = {"hit", "empty", "dead", "no keeper", "keeper died", "claimer died", "claimer failed"}


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [
        pytest.param(range(2), {"hit", "claimer died"}, id="few"),
        *(
            pytest.param(range(at, at + 37), _MANY, id=f"many from {at}", marks=pytest.mark.nightly)
            for at in range(2, 150, 37)
        ),
    ],
)
def test_no_slot_is_had_twice_and_nothing_is_left(seeds: range, expected: set[str], tmp_path: Path) -> None:
    """A seed decides what happens when; directories are made in threads, so what comes of it may differ a little."""
    seen: Counter[str] = Counter()
    with quick_folder(tmp_path) as folder:
        for seed in seeds:
            try:
                world = trio.run(live, seed, folder / str(seed), clock=MockClock(autojump_threshold=0))
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
            seen += world.seen

    assert expected <= set(seen)
