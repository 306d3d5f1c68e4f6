"""What every store promises about entries, on each of them."""

from __future__ import annotations

from msgspec.structs import replace

from runner.ports.store import EntryRow, Store

WORKER = EntryRow(kind="agent-type", name="worker", body='{"a": 1}')


async def test_an_entry_is_changed_by_who_has_read_its_last_version_only(store: Store) -> None:
    first = await store.put_entry(WORKER)
    assert first == replace(WORKER, version=1, created=first.created if first else 0)
    assert await store.put_entry(WORKER) is None

    second = await store.put_entry(replace(first, body="2", state="done"))
    assert second == replace(first, body="2", state="done", version=2)
    assert await store.put_entry(replace(first, body="3")) is None

    assert await store.entries("agent-type", name="worker") == [second]
    assert [await store.remove_entry("agent-type", "worker") for _ in range(2)] == [True, False]
    assert await store.put_entry(replace(second, body="4")) is None


async def test_entries_are_listed_by_kind_and_state_the_newest_first(store: Store) -> None:
    made = [await store.put_entry(replace(WORKER, kind="session", name=name, state="active")) for name in "abc"]
    await store.put_entry(WORKER)
    assert made[0] is not None
    await store.put_entry(replace(made[0], state="ended"))

    assert [row.name for row in await store.entries("session")] == ["c", "b", "a"]
    assert [row.name for row in await store.entries("session", state="active")] == ["c", "b"]
    [last] = await store.entries("session", state="active", limit=1)
    assert [row.name for row in await store.entries("session", before=(last.created, "c"))] == ["b", "a"]
    assert len(await store.entries()) == 4
