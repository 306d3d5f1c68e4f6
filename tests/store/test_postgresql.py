"""What only a database elsewhere can get wrong: lost connections and answers, versions, poolers, other hosts."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import aclosing

import pytest
import trio
import trio.testing

from runner.core.errors import BadStoreUrl, StoreDamaged, StoreFailed, StoreTooNew, StoreTooOld
from runner.core.model import SlotState, succeeded
from runner.events import events as ev
from runner.ports.store import RunnerRow, SlotRow, Store
from runner.store import open_reader, open_store
from tests.support.needs import PGBOUNCER, POSTGRES

if POSTGRES.missing is None:
    from runner.store import postgresql
    from tests.support import postgres

pytestmark = POSTGRES.mark
SHARED = pytest.mark.scenario("BEY-20", only="several hosts share one PostgreSQL store")
STARTED = ev.RunStarted(name="fix", plan="sha256:1", runner="0.1.0", steps={}, deadline_seconds=60.0)
RUNNER = RunnerRow(id="r1", host="host", boot="boot", home="8:1", pid=7, ticks=70)


@pytest.fixture
def url() -> str:
    return postgres.fresh_url()


@pytest.fixture
def own_server() -> Iterator[postgres.Server]:
    """A server that may be stopped and killed."""
    with postgres.running() as server:
        yield server


def notes(history: list[ev.Recorded]) -> list[str]:
    return [recorded.event.message for recorded in history if isinstance(recorded.event, ev.WarningIssued)]


async def write_notes(store: Store, run: str, name: str, number: int) -> None:
    """Append one after the other, so that the order in the journal is known."""
    for each in range(number):
        await store.append(run, [ev.WarningIssued("x.y", f"{name}-{each}")])


def assert_whole(history: list[ev.Recorded], writers: list[str], number: int) -> None:
    assert [recorded.seq for recorded in history] == list(range(1, len(history) + 1))
    for writer in writers:
        of_writer = [note for note in notes(history) if note.startswith(f"{writer}-")]
        assert of_writer == [f"{writer}-{each}" for each in range(number)]


@SHARED
async def test_two_hosts_write_one_journal_without_gaps(url: str) -> None:
    async with open_store(url) as one, open_store(url) as other:
        await one.append("a", [STARTED])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write_notes, one, "a", "one", 30)
            nursery.start_soon(write_notes, one, "a", "two", 30)
            nursery.start_soon(write_notes, other, "a", "three", 30)

        assert one.nonce == other.nonce
        assert_whole(await other.events("a"), ["one", "two", "three"], 30)


@SHARED
@pytest.mark.parametrize("plan", [["after"] * 3, ["before"] * 3, ["before", "after", "after"]], ids="-".join)
async def test_a_commit_whose_answer_is_lost_is_written_once(url: str, plan: list[str]) -> None:
    with postgres.Cutter(postgres.server()) as cutter:
        async with open_store(re.sub(r":\d+/", f":{cutter.port}/", url)) as store:
            cutter.plan += plan
            await store.append("a", [STARTED])
            await write_notes(store, "a", "one", 5)

            history = await store.events("a")
            assert cutter.cut == plan
            assert len(history) == 6, "the start as well is there once"
            assert_whole(history, ["one"], 5)


async def test_changes_of_rows_whose_answer_is_lost_are_done_once(url: str) -> None:
    """What cannot be done twice is looked for."""
    slot = SlotRow(id="slot-1", pool="pool", state=SlotState.READY, keeper="r1")
    async with open_store(url) as direct:
        await direct.append("a", [STARTED])
    with postgres.Cutter(postgres.server()) as cutter:
        async with open_store(re.sub(r":\d+/", f":{cutter.port}/", url), runner=RUNNER) as store:
            cutter.plan += ["after"] * 3
            await store.put_slot(slot)
            assert await store.move_slot("slot-1", SlotState.READY, SlotState.CLAIMED, "w")
            assert await store.take_run("a", None)

            assert len(cutter.cut) == 3
            assert [row.workspace for row in await store.slots()] == ["w"]
            assert (await store.find("a")).runner == "r1"


@SHARED
async def test_a_server_that_is_killed_again_and_again_loses_and_doubles_nothing(own_server: postgres.Server) -> None:
    url = own_server.url("postgres")
    async with open_store(url) as one, open_store(url) as other:
        await one.append("a", [STARTED])
        async with trio.open_nursery() as nursery:
            for store, name in ((one, "one"), (one, "two"), (other, "three")):
                nursery.start_soon(write_notes, store, "a", name, 200)
            for _ in range(3):
                await trio.sleep(0.1)
                await trio.to_thread.run_sync(own_server.restart)

        await one.append("a", [ev.RunEnded(succeeded(), 0)])
        assert_whole(await other.events("a"), ["one", "two", "three"], 200)


async def test_reading_from_a_server_that_does_not_answer_can_be_cancelled(own_server: postgres.Server) -> None:
    async with open_store(own_server.url("postgres")) as store:
        backends = [
            int(pid)
            for (pid,) in own_server.execute("SELECT pid FROM pg_stat_activity WHERE application_name = 'runner'")
        ]
        for pid in backends:
            os.kill(pid, signal.SIGSTOP)
        with trio.move_on_after(0.2) as scope:
            await store.runs()
        for pid in backends:
            os.kill(pid, signal.SIGCONT)

        assert scope.cancelled_caught
        assert await store.runs() == []


async def test_a_change_that_has_begun_is_not_cancelled(url: str) -> None:
    """Else a workspace would be claimed, and nobody told."""
    slot = SlotRow(id="slot-1", pool="pool", state=SlotState.READY, keeper="r1")
    answers: list[bool] = []
    async with open_store(url) as store:
        await store.put_slot(slot)

        async def claim() -> None:
            answers.append(await store.move_slot("slot-1", SlotState.READY, SlotState.CLAIMED, "w"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(claim)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

        assert answers == [True]
        assert [row.workspace for row in await store.slots()] == ["w"]


async def test_the_clock_is_the_database_s(url: str) -> None:
    async with open_store(url) as store:
        before = await store.now()
        [started] = await store.append("a", [STARTED])
        after = await store.now()

    (there,) = postgres.server().execute("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint")[0]
    assert before <= started.at <= after <= int(str(there))


async def test_who_watches_hears_of_what_another_host_writes(url: str) -> None:
    reader = postgresql.PostgresDatabase(postgresql.place(url), None)
    async with open_store(url) as store:
        await store.append("a", [STARTED])
        await reader.wait(reader.next_write("a"))  # now it listens
        written = reader.next_write("a")
        postgres.server().execute("NOTIFY kb, 'from somebody else'", url.rpartition("/")[2])
        await store.append("a", [ev.StepStarted("x")])

        with trio.fail_after(60):
            await written.wait()
    reader.close()


@PGBOUNCER.mark
async def test_a_pooler_may_give_each_transaction_another_connection(url: str) -> None:
    with postgres.pooler(postgres.server()) as port:
        pooled = re.sub(r":\d+/", f":{port}/", url)
        seen: list[str] = []

        async def watch() -> None:
            async with open_reader(pooled, must_exist=True) as reader, aclosing(reader.watch("a")) as events:
                async for recorded in events:
                    seen.append(type(recorded.event).__name__)
                    if isinstance(recorded.event, ev.RunEnded):
                        return

        async with open_store(pooled) as one, open_store(pooled) as other, open_store(pooled) as third:
            await one.append("a", [STARTED])
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch)
                async with trio.open_nursery() as writers:
                    for store, name in ((one, "one"), (other, "two"), (third, "three")):
                        writers.start_soon(write_notes, store, "a", name, 20)
                await one.append("a", [ev.RunEnded(succeeded(), 0)])
            assert_whole(await one.events("a"), ["one", "two", "three"], 20)
    assert len(seen) == 62


# --- opening --------------------------------------------------------------------------------------


async def test_processes_that_open_a_new_database_at_once_agree_on_it() -> None:
    url = postgres.server().url(postgres.server().database())
    nonces = set()

    async def one() -> None:
        async with open_store(url) as store:
            nonces.add(store.nonce)

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(one)

    assert len(nonces) == 1


async def test_a_reader_makes_nothing_and_a_missing_store_is_said() -> None:
    url = postgres.server().url(postgres.server().database())
    async with open_reader(url) as reader:
        assert await reader.runs() == []
    for opened in (open_reader(url, must_exist=True), open_store(url, must_exist=True)):
        with pytest.raises(StoreDamaged, match="has no store, and this home holds what runs have left"):
            async with opened:
                pass

    name = url.rpartition("/")[2]
    assert postgres.server().execute("SELECT to_regnamespace('kb') IS NULL", name) == [(True,)]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ("schema_version = 99, runner = '7.5.0'", StoreTooNew, r"runner 7\.5\.0 \(schema 99"),
        ("schema_version = 9, runner = '0.0.9'", StoreTooOld, r"runner 0\.0\.9 \(schema 9"),
    ],
    ids=["newer", "older"],
)
async def test_a_schema_that_is_not_known_is_refused_by_its_version(
    url: str, change: str, error: type[StoreDamaged], words: str
) -> None:
    postgres.server().execute(f"UPDATE kb.meta SET {change}", url.rpartition("/")[2])

    for opened in (open_store(url), open_reader(url)):
        with pytest.raises(error, match=words):
            async with opened:
                pass


async def test_a_role_that_may_only_read_is_told_what_it_lacks(url: str) -> None:
    name = url.rpartition("/")[2]
    postgres.server().execute(
        f"CREATE ROLE {name}_reader LOGIN; GRANT USAGE ON SCHEMA kb TO {name}_reader;"
        f"GRANT SELECT ON ALL TABLES IN SCHEMA kb TO {name}_reader",
        name,
    )
    async with open_store(url.replace("postgres@", f"{name}_reader@")) as store:
        with pytest.raises(StoreFailed, match="permission denied for table") as refused:
            await store.append("a", [STARTED])

        assert "let the role own" in (refused.value.hint or "")
        assert await store.runs() == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        pytest.param(lambda url: url.replace("postgres@", "nobody:hunter2@"), "refuses the connection", id="role"),
        pytest.param(lambda url: f"{url}_none?password=hunter2", "does not exist", id="database"),
    ],
)
async def test_a_refused_connection_is_said_at_once_and_without_its_password(
    url: str, wrong: Callable[[str], str], words: str
) -> None:
    with pytest.raises(StoreFailed, match=words) as refused, trio.fail_after(60):
        async with open_store(wrong(url)):
            pass

    assert "hunter2" not in f"{refused.value.message} {refused.value.hint}"


@pytest.mark.nightly
async def test_a_server_that_is_not_there_is_waited_for_a_moment(url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(StoreFailed, match=rf"`postgresql://127\.0\.0\.1:{port}/.*` cannot be reached"):
        async with open_store(re.sub(r":\d+/", f":{port}/", url).replace("postgres@", "me:hunter2@")):
            pass


def test_a_url_that_libpq_does_not_take_is_refused_without_its_password() -> None:
    with pytest.raises(BadStoreUrl) as refused:
        open_store("postgres://me:hunter2@db/runner?colour=hunter2")

    assert "is not a URL of PostgreSQL" in refused.value.message
    assert "hunter2" not in f"{refused.value.message} {refused.value.hint}"
