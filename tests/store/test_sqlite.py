"""What only a file can get wrong: locks, versions, damage, kills and full disks."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, closing, contextmanager
from itertools import count
from pathlib import Path
from typing import cast

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from runner import __version__
from runner.core.errors import RunnerError, StoreBusy, StoreDamaged, StoreFailed, StoreTooNew, StoreTooOld, UnknownRun
from runner.core.model import CommandHolder, succeeded
from runner.events import events as ev
from runner.lifecycle.liveness import FORGET_AFTER
from runner.ports.store import EntryRow, RunnerRow
from runner.store._sql import _PROJECTED, Store, _project
from runner.store.sqlite import OLDEST, migrate, open_reader, open_store, scripts
from tests.support.needs import ROOT

STARTED = ev.RunStarted(name="fix", plan="sha256:1", runner="0.1.0", steps={}, deadline_seconds=60.0)


def store_in(folder: Path, hook: Callable[[str], None] = lambda point: None) -> AbstractAsyncContextManager[Store]:
    ticks = count(1_000)
    return open_store(folder / "state.db", now=lambda: next(ticks), entropy=lambda n: b"\x01" * n, hook=hook)


def rows(path: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


async def test_a_store_is_private_and_keeps_its_nonce(tmp_path: Path) -> None:
    home = tmp_path / "home"
    old = os.umask(0)
    try:
        async with store_in(home) as store:
            await store.append("a", [STARTED])
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (home, *home.iterdir())}
            nonce = store.nonce
    finally:
        os.umask(old)

    assert modes == {"home": 0o700, "state.db": 0o600, "state.db-wal": 0o600, "state.db-shm": 0o600}
    async with open_store(home / "state.db", now=lambda: 0, entropy=os.urandom) as store:
        assert store.nonce == nonce == "01" * 8
        assert [r.event for r in await store.events("a")] == [STARTED]


async def test_looking_by_name_waits_for_no_commit(tmp_path: Path) -> None:
    """A server looks a token up at each request, while runs wait for their disk."""
    begun, ended = threading.Event(), threading.Event()
    async with store_in(tmp_path, lambda point: None if point != "torn" or begun.set() else ended.wait()) as store:
        ended.set()
        await store.put_entry(EntryRow(kind="token", name="a", body="{}"))
        begun.clear()
        ended.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.append, "a", [STARTED])
            await trio.to_thread.run_sync(begun.wait)
            try:
                with trio.fail_after(5):
                    assert [found.body for found in await store.entries("token", name="a")] == ["{}"]
            finally:
                ended.set()
        await store.remove_entry("token", "a")
        assert await store.entries("token", name="a") == []


async def test_looking_by_name_sees_what_anybody_has_changed(tmp_path: Path) -> None:
    """What was seen stands for the next look only while nobody has written, be it here or in another process."""

    async def seen() -> list[str]:
        return [found.body for found in await store.entries("token", name="a")]

    async with store_in(tmp_path) as store, store_in(tmp_path) as another:
        found = [await seen(), await seen()]
        for one in (store, another) * 2:
            written = await one.put_entry(EntryRow(kind="token", name="a", body=f"{len(found)}"))
            found.append(await seen())
            assert written is not None
            await one.put_entry(replace(written, body=f"{len(found)}"))
            found.append(await seen())
            await one.remove_entry("token", "a")
            found.append(await seen())

    assert found == [[], [], ["2"], ["3"], [], ["5"], ["6"], [], ["8"], ["9"], [], ["11"], ["12"], []]


async def test_a_workspace_row_lives_from_intent_to_absence(tmp_path: Path) -> None:
    query = (
        "SELECT id, container_type, provider, lifecycle, status, created_at, expires_at, metadata FROM agent_workspaces"
    )
    seen = []
    async with store_in(tmp_path) as store:
        for event in (
            ev.ResourceIntended("provision", "workspace", "ws-1", "local"),
            ev.ResourceCreated("provision", "workspace", "ws-1"),
            ev.ResourceRemoved("teardown", "workspace", "ws-1"),
        ):
            await store.append("a", [STARTED, event])
            seen.append(rows(tmp_path / "state.db", query))

    (made,), (ready,), gone = seen
    assert made == ("ws-1", "agent_workspace", "local", "ephemeral", "creating", 1000, None, '{"run": "a"}')
    assert (ready[4], gone) == ("ready", [])


async def test_other_effects_make_no_workspace_row(tmp_path: Path) -> None:
    async with store_in(tmp_path) as store:
        await store.append("a", [STARTED, ev.ResourceIntended("verify", "checkout", "c", "/x")])

    assert rows(tmp_path / "state.db", "SELECT * FROM agent_workspaces") == []


async def test_a_snapshot_is_a_row(tmp_path: Path) -> None:
    async with store_in(tmp_path) as store:
        await store.append(
            "a",
            [
                STARTED,
                ev.SnapshotPublished(
                    commit="c" * 40, tree="t" * 40, base=None, branch="runner/a", entries=3, ignored=0, changed=1
                ),
            ],
        )

    assert rows(tmp_path / "state.db", "SELECT * FROM snapshots") == [("a", "c" * 40, "t" * 40, None, "runner/a", 1000)]


async def test_appends_that_wait_share_one_commit(tmp_path: Path) -> None:
    points: list[str] = []
    async with store_in(tmp_path, points.append) as store:
        await store.append("a", [STARTED])
        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(store.append, "a", [ev.WarningIssued("x.y", str(number))])

    assert len(points) <= 9, "the first, then at most one alone and the rest together"
    assert points[:3] == ["before", "torn", "after"]


async def test_what_settles_under_a_shield_is_still_written_after_a_cancel(tmp_path: Path) -> None:
    with trio.CancelScope() as outer:
        async with store_in(tmp_path) as store:
            await store.append("a", [STARTED])
            outer.cancel()
            with trio.fail_after(60), trio.CancelScope(shield=True):
                await store.append("a", [ev.RunEnded(succeeded(), 0)])

    assert rows(tmp_path / "state.db", "SELECT status FROM runs") == [("succeeded",)]


async def test_what_the_block_raises_comes_out_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(UnknownRun) as raised:
        async with store_in(tmp_path) as store:
            await store.find("last")

    assert raised.value.__cause__ is None


async def test_a_cancelled_append_leaves_the_others_whole(tmp_path: Path) -> None:
    async with store_in(tmp_path) as store:
        await store.append("a", [STARTED])
        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(store.append, "a", [ev.WarningIssued("x.y", str(number))] * 2)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

        recorded = await store.append("a", [ev.StepStarted("x")])

        history = await store.events("a")
        assert history[-1:] == recorded
        assert len(history) % 2 == 0, "the first, whole pairs, and the last"


async def test_two_open_stores_on_one_file_do_not_collide(tmp_path: Path) -> None:
    async with store_in(tmp_path) as one, store_in(tmp_path) as other, trio.open_nursery() as nursery:
        await one.append("a", [STARTED])
        for number in range(20):
            nursery.start_soon(one.append, "a", [ev.WarningIssued("x.y", str(number))])
            nursery.start_soon(other.append, "a", [ev.WarningIssued("x.y", str(number))])

    assert rows(tmp_path / "state.db", "SELECT count(*), max(seq) FROM events") == [(41, 41)]


async def test_processes_that_open_a_new_store_at_once_agree_on_it(tmp_path: Path) -> None:
    nonces = []

    async def one() -> None:
        async with open_store(tmp_path / "state.db", now=lambda: 1, entropy=os.urandom) as store:
            nonces.append(store.nonce)

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(one)

    assert len(nonces) == 8
    assert len(set(nonces)) == 1


@pytest.mark.slow
async def test_a_store_that_another_process_keeps_locked_is_busy(tmp_path: Path) -> None:
    async with store_in(tmp_path) as store:
        await store.append("a", [STARTED])
        with closing(sqlite3.connect(tmp_path / "state.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            store._connection.execute("PRAGMA busy_timeout = 50")
            with pytest.raises(StoreBusy):
                await store.append("a", [ev.StepStarted("x")])
            other.execute("ROLLBACK")

        assert [r.seq for r in await store.append("a", [ev.StepStarted("x")])] == [2]


# --- reading --------------------------------------------------------------------------------------


async def test_a_reader_sees_what_is_committed_while_the_writer_works(tmp_path: Path) -> None:
    async with store_in(tmp_path) as store, open_reader(tmp_path / "state.db") as reader:
        await store.append("abc", [STARTED])

        assert [r.event for r in await reader.events("abc")] == [STARTED]
        assert (await reader.find("last")).id == "abc"


async def test_of_two_processes_that_take_over_a_run_one_gets_it(tmp_path: Path) -> None:
    clock = [1_000]
    first, second, dead = (
        RunnerRow(id=id, host="host", boot="boot", home="8:1", pid=7, ticks=70) for id in ("r1", "r2", "r0")
    )

    def opened(runner: RunnerRow) -> AbstractAsyncContextManager[Store]:
        return open_store(tmp_path / "state.db", now=lambda: clock[0], entropy=bytes, runner=runner)

    async with opened(dead) as store:
        await store.append("a", [STARTED])
    clock[0] += round(FORGET_AFTER * 1e6) + 1
    async with opened(first) as one, opened(second) as other:
        taken = [await store.take_run("a", "r0") for store in (one, other)]
        listed = [row.id for row in await other.runners()]
        await other.leave()

        assert taken == [True, False]
        assert listed == ["r0", "r1", "r2"]
        assert [row.id for row in await one.runners()] == ["r1"], "of the dead one nothing was heard for long"


async def test_a_reader_watches_what_another_process_writes(tmp_path: Path) -> None:
    async with store_in(tmp_path) as store, open_reader(tmp_path / "state.db") as reader:
        await store.append("a", [STARTED])
        with trio.fail_after(10):
            async with aclosing(reader.watch("a")) as events:
                first = await anext(events)
                await store.append("a", [ev.RunEnded(succeeded(), 0)])
                second = await anext(events)

    assert [first.event, second.event] == [STARTED, ev.RunEnded(succeeded(), 0)]


async def test_a_reader_never_makes_a_store(tmp_path: Path) -> None:
    async with open_reader(tmp_path / "home" / "state.db") as reader:
        assert await reader.runs() == []
        assert await reader.events("a") == []
        with pytest.raises(UnknownRun):
            await reader.find("last")

    assert list(tmp_path.iterdir()) == []


async def test_a_store_that_another_process_is_about_to_make_is_empty(tmp_path: Path) -> None:
    (tmp_path / "state.db").touch()

    async with open_reader(tmp_path / "state.db") as reader:
        assert await reader.runs() == []


# --- versions -------------------------------------------------------------------------------------


async def test_a_reader_migrates_an_older_store(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        migrate(connection, path, scripts()[:1], os.urandom)

    async with open_reader(path) as reader:
        assert await reader.runs() == []
        assert await reader.entries() == []
    assert rows(path, "SELECT schema_version FROM meta") == [(OLDEST + len(scripts()) - 1,)]


async def test_a_store_of_a_newer_runner_is_refused_by_its_version(tmp_path: Path) -> None:
    async with store_in(tmp_path):
        pass
    with closing(sqlite3.connect(tmp_path / "state.db")) as connection, connection:
        connection.execute("UPDATE meta SET schema_version = 99, runner = '7.5.0'")

    for opened in (store_in(tmp_path), open_reader(tmp_path / "state.db")):
        with pytest.raises(StoreTooNew, match=r"runner 7\.5\.0 \(schema 99"):
            async with opened:
                pass


async def test_a_store_whose_events_have_an_older_form_is_refused_by_its_version(tmp_path: Path) -> None:
    async with store_in(tmp_path):
        pass
    with closing(sqlite3.connect(tmp_path / "state.db")) as connection, connection:
        connection.execute(f"UPDATE meta SET schema_version = {OLDEST - 1}, runner = '0.0.9'")

    for opened in (store_in(tmp_path), open_reader(tmp_path / "state.db")):
        with pytest.raises(StoreTooOld, match=rf"runner 0\.0\.9 \(schema {OLDEST - 1}"):
            async with opened:
                pass


def test_a_migration_keeps_a_copy_beside_the_store(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        migrate(connection, path, scripts(), bytes)
        connection.execute("INSERT INTO runs (id, name, status, plan, created) VALUES ('a', 'n', 'running', 'p', 1)")

        migrate(connection, path, [*scripts(), "CREATE TABLE more (x TEXT) STRICT;\n"], bytes)

    newest = OLDEST + len(scripts())
    copy = tmp_path / f"state.db.schema-{newest - 1}"
    assert rows(path, "SELECT schema_version, runner FROM meta") == [(newest, __version__)]
    assert rows(copy, "SELECT schema_version, id FROM meta, runs") == [(newest - 1, "a")]
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600


def test_a_migration_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        migrate(connection, path, scripts(), bytes)
        with pytest.raises(sqlite3.OperationalError):
            migrate(connection, path, [*scripts(), "CREATE TABLE more (x TEXT);\nNONSENSE;\n"], bytes)

    assert rows(path, "SELECT schema_version FROM meta") == [(OLDEST + len(scripts()) - 1,)]
    assert rows(path, "SELECT name FROM sqlite_schema WHERE name = 'more'") == []


# --- damage ---------------------------------------------------------------------------------------


def _no_database(path: Path) -> None:
    path.write_bytes(b"this is text" * 1000)


def _another_database(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE other (x)")


def _flipped_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[5] ^= 0xFF
    path.write_bytes(content)


def _flipped_page(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100:4096] = b"\xff" * 3996
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_no_database, _another_database, _flipped_header, _flipped_page])
async def test_a_damaged_store_is_refused_and_left_as_it_is(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    async with store_in(tmp_path) as store:
        await store.append("a", [STARTED])
    path = tmp_path / "state.db"
    damage(path)
    before = path.read_bytes()

    for opened in (store_in(tmp_path), open_reader(path)):
        with pytest.raises(StoreDamaged) as refused:
            async with opened:
                pass
        assert "runner store rebuild" in (refused.value.hint or "")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "change",
    ["body = replace(body, 'RunStarted', 'Unheard')", "body = '{'", "body = '{}'", "body = '[]'"],
    ids=["unknown type", "cut", "fields missing", "no object"],
)
async def test_an_event_that_cannot_be_read_is_damage(tmp_path: Path, change: str) -> None:
    async with store_in(tmp_path) as store:
        await store.append("a", [STARTED])
        with closing(sqlite3.connect(tmp_path / "state.db")) as connection, connection:
            connection.execute(f"UPDATE events SET {change}")

        with pytest.raises(StoreDamaged, match="event 1 of run a"):
            await store.events("a")


@pytest.mark.parametrize(
    "change", ["runs SET created = 'x'", "leases SET expires = 'x'", "events SET seq = 'x' WHERE seq = 2"]
)
async def test_a_value_of_another_type_is_damage(tmp_path: Path, change: str) -> None:
    """As one flipped bit makes of it; SQLite itself puts none into a strict table."""
    async with store_in(tmp_path) as store:
        await store.append(
            "a",
            [
                STARTED,
                ev.LeaseAcquired(
                    workspace="w", lease="lease", holder=CommandHolder("exec", 7), fence=1, ttl_seconds=60.0
                ),
            ],
        )
        with closing(sqlite3.connect(tmp_path / "state.db")) as connection, connection:
            connection.execute("PRAGMA writable_schema = ON")
            connection.execute("UPDATE sqlite_schema SET sql = replace(sql, 'STRICT', '') WHERE sql NOT LIKE '%ROWID%'")
            connection.execute("UPDATE sqlite_schema SET sql = replace(sql, 'STRICT,', '')")
        with closing(sqlite3.connect(tmp_path / "state.db")) as connection, connection:
            connection.execute(f"UPDATE {change}")

        async def read_all() -> None:
            await store.counts()
            await store.runs()
            await store.leases()

        with pytest.raises(StoreDamaged, match="cannot be read"):
            await read_all()


# --- kills ----------------------------------------------------------------------------------------

APPENDING = """
import itertools, os, signal, sys, trio
from pathlib import Path
from runner.events.events import RunStarted, WarningIssued
from runner.store.sqlite import open_store

point, at = sys.argv[2], int(sys.argv[3])
calls = itertools.count(1)

def hook(name):
    if name == point and next(calls) == at:
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with open_store(Path(sys.argv[1]), now=lambda: 1, entropy=os.urandom, hook=hook) as store:
        await store.append("a", [RunStarted(name="n", plan="p", runner="0", steps={}, deadline_seconds=1.0)])
        for number in range(5):
            recorded = await store.append("a", [WarningIssued("x.y", str(number)), WarningIssued("x.y", str(number))])
            print(recorded[-1].seq, flush=True)

trio.run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("point", "kept"), [("before", 3), ("torn", 3), ("after", 5)])
async def test_a_kill_loses_nothing_acknowledged_and_leaves_no_half_append(
    tmp_path: Path, point: str, kept: int
) -> None:
    command = [sys.executable, "-c", APPENDING, tmp_path / "state.db", point, "3"]

    done = await trio.run_process(command, capture_stdout=True, check=False)

    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split()[-1:] == [b"3"]
    async with store_in(tmp_path) as store:
        assert [r.seq for r in await store.events("a")] == list(range(1, kept + 1))
        assert (await store.append("a", [ev.StepStarted("x")]))[0].seq == kept + 1


# --- full disks -----------------------------------------------------------------------------------


async def fill(store: Store) -> RunnerError:
    """Append until it is refused, which must happen."""
    for _ in range(500):
        try:
            await store.append("a", [ev.WarningIssued("x.y", "z" * 4_000)])
        except RunnerError as error:
            return error
    raise AssertionError("the limit was never met")


async def assert_clean_refusal(folder: Path, room: Callable[[], None]) -> None:
    """A full disk refuses cleanly, and what was acknowledged is there when ``room`` has been made."""
    async with store_in(folder) as store:
        await store.append("a", [STARTED])
        refused = await fill(store)
        kept = await store.events("a")
        room()

    assert isinstance(refused, StoreFailed)
    assert str(folder / "state.db") in refused.message
    async with store_in(folder) as store:
        assert await store.events("a") == kept
        assert (await store.append("a", [ev.StepStarted("x")]))[0].seq == len(kept) + 1


async def test_a_file_that_may_not_grow_refuses_cleanly_and_opens_again(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        await assert_clean_refusal(tmp_path, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@ROOT.mark
async def test_a_full_disk_refuses_cleanly_and_opens_again_once_space_returns(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        (disk / "ballast").write_bytes(b"x" * 200_000)
        await assert_clean_refusal(disk, (disk / "ballast").unlink)


@ROOT.mark
@pytest.mark.slow
async def test_a_disk_full_from_the_start_is_refused_cleanly_at_every_size(tmp_path: Path) -> None:
    for free in range(0, 160_000, 8_192):
        with small_disk(tmp_path / f"disk{free}") as disk:
            (disk / "ballast").write_bytes(b"x" * ((512 << 10) - free))
            try:
                async with store_in(disk) as store:
                    await store.append("a", [STARTED])
            except StoreFailed:
                pass
            (disk / "ballast").unlink()
            async with store_in(disk) as store:
                assert [r.seq for r in await store.events("a")] in ([], [1])


@pytest.mark.parametrize("kind", sorted(set(ev.Event.__subclasses__()) - _PROJECTED, key=lambda kind: kind.__name__))
def test_an_event_of_the_journal_alone_changes_no_other_table(kind: type[ev.Event]) -> None:
    event = kind(**dict.fromkeys(kind.__struct_fields__, "workspace"))

    _project(cast(sqlite3.Connection, None), "run", 1, event)


async def test_a_store_that_is_open_twice_survives_that_another_process_leaves_it(tmp_path: Path) -> None:
    """Whoever opens a file beside SQLite, and closes it, ends the locks that all of the process has on it."""
    path = tmp_path / "state.db"
    other = f"import sqlite3; c = sqlite3.connect({str(path)!r}); c.execute('SELECT * FROM meta').fetchall(); c.close()"
    async with open_store(path, entropy=os.urandom) as first, open_store(path, entropy=os.urandom):
        await first.append("r", [ev.RunStarted(name="r", plan="p", runner="0", steps={}, deadline_seconds=60.0)])

        await trio.run_process([sys.executable, "-c", other])

        assert path.with_name("state.db-wal").exists()
        async with open_reader(path) as reader:
            assert [row.id for row in await reader.runs()] == ["r"]
