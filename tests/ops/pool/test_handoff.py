"""Having a workspace from a keeper over its socket, also when one of the two breaks off. On the fake provider."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from runner.core.errors import PoolKept
from runner.core.model import Handle, Limits, PoolMissReason, SlotKey
from runner.core.settings import Settings
from runner.engine.pool import Keeper
from runner.lifecycle.pool import name_of
from runner.ops.pool.handoff import PLACE, ask, listening, reaching, serve, warm
from runner.ops.pool.pool import open_pool
from runner.ops.workspaces.workspace_lease import open_workspace_env
from runner.ports.provider import SandboxHandoff, SandboxSpec, WorkspaceRequest
from runner.ports.store import PoolRow
from runner.store.memory import MemoryStore
from tests.support.fake_provider import FakeProvider

KEY = SlotKey(provider="fake", image=None, limits=Limits())
NAME = name_of(KEY)


class Kept:
    """A pool of fake slots, and the socket that is asked for them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.provider = FakeProvider(home)
        self.store = MemoryStore(lambda: round(trio.current_time() * 1e6))
        ids = count(1)
        self.keeper = Keeper(
            self.store,
            lambda name: self.provider,
            name="keeper",
            new_id=lambda: str(next(ids)),
            look=0.05,
        )

    def request(self, workspace: str) -> WorkspaceRequest:
        return WorkspaceRequest(id=workspace, run="run", nonce=self.store.nonce, project="shop")

    async def ready(self, *ids: str) -> None:
        with trio.fail_after(60):
            while [slot.id for slot in await self.store.slots() if slot.state.value == "ready"] != list(ids):
                await trio.sleep(0.005)

    async def owned(self) -> list[str]:
        return [handle.id for handle in await self.provider.list_owned(self.store.nonce)]

    def send(self, packet: bytes) -> None:
        """What one says who then breaks off."""
        with reaching(self.home) as path, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(path)
            connection.send(packet)


@asynccontextmanager
async def kept(home: Path, size: int = 1) -> AsyncIterator[Kept]:
    found = Kept(home)
    (home / PLACE).mkdir(parents=True)
    await found.store.put_pools([PoolRow(NAME, KEY, size)])
    with listening(home) as listener:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, listener, found.keeper, found.store.nonce)
            nursery.start_soon(found.keeper.run)
            await found.ready(*(f"slot-{number + 1}" for number in range(size)))
            yield found
            nursery.cancel_scope.cancel()


async def test_a_workspace_arrives_and_its_first_opening_starts_nothing(tmp_path: Path) -> None:
    home = tmp_path / ("long" * 50)  # longer than the path of a socket may be
    async with kept(home) as pool:
        started = len(pool.provider.started)
        handle = await warm(home, pool.provider, KEY, pool.request("run-1"))
        assert isinstance(handle, Handle)
        async with pool.provider.open(handle, SandboxSpec()) as workspace:
            assert (await workspace.run(["true"])).exit.ok

        assert (handle.id, handle.slot, handle.project) == ("run-1", "slot-1", "shop")
        assert pool.provider.started[:started].count("slot-1") == 1
        await pool.ready("slot-2")
        assert pool.provider.started.count("slot-1") == 1


async def test_a_miss_says_why(tmp_path: Path) -> None:
    async with kept(tmp_path) as pool:
        other = replace(KEY, limits=Limits(pids=3))

        assert await warm(tmp_path, pool.provider, other, pool.request("run-1")) is PoolMissReason.LIMITS
        await pool.store.resize_pools({NAME: 0})
        await pool.ready()
        assert await warm(tmp_path, pool.provider, KEY, pool.request("run-1")) is PoolMissReason.EMPTY


async def test_where_nobody_keeps_a_pool_there_is_no_answer(tmp_path: Path) -> None:
    assert await warm(tmp_path, FakeProvider(tmp_path), KEY, WorkspaceRequest(id="run-1", run="run", nonce="n")) is None
    async with kept(tmp_path / "home"):
        pass
    assert (
        await warm(tmp_path / "home", FakeProvider(tmp_path), KEY, WorkspaceRequest(id="run-1", run="run", nonce="n"))
        is None
    )


async def test_one_that_breaks_off_costs_a_slot_and_leaves_nothing(tmp_path: Path) -> None:
    async with kept(tmp_path) as pool:

        def unable(handle: Handle, handoff: SandboxHandoff) -> None:
            raise AssertionError

        with trio.move_on_after(0) as scope:
            await ask(tmp_path, KEY, pool.request("run-1"), unable)
        assert scope.cancelled_caught
        for packet in (b"", b"garbage", b"[]", b"{}", b'{"key": {"limits": {"x": 1}}}'):
            pool.send(packet)
        words = b'{"key": %s, "workspace": "run-2", "run": "run", "project": "default"}'
        key = b'{"provider": "fake", "image": null, "limits": {}, "toolchains": [], "protected": []}'
        pool.send(words % key)
        with trio.fail_after(60):
            while "slot-1" in await pool.owned() or "run-2" in await pool.owned():
                await trio.sleep(0.01)
            while not await pool.store.slots():
                await trio.sleep(0.01)
        (slot,) = await pool.store.slots()
        await pool.ready(slot.id)

        handle = await warm(tmp_path, pool.provider, KEY, pool.request("run-3"))
        assert isinstance(handle, Handle)
        assert handle.slot != "slot-1"


async def test_what_a_keeper_has_made_before_it_died_is_removed(tmp_path: Path) -> None:
    provider, request = FakeProvider(tmp_path), WorkspaceRequest(id="run-1", run="run", nonce="n")
    await provider.create(request)
    (tmp_path / PLACE).mkdir()
    with listening(tmp_path) as listener:

        async def die() -> None:
            connection, _ = await trio.socket.from_stdlib_socket(listener).accept()
            connection.close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(die)
            assert await warm(tmp_path, provider, KEY, request) is PoolMissReason.NO_KEEPER

    assert await provider.list_owned("n") == []


async def test_one_store_has_one_keeper(tmp_path: Path) -> None:
    settings = Settings.from_env({"RUNNER_HOME": str(tmp_path)})
    async with open_workspace_env(settings) as env, open_pool(env, [], lambda error: None):
        with pytest.raises(PoolKept, match=str(tmp_path)):
            async with open_pool(env, [], lambda error: None):
                pass
