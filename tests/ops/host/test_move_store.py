"""A store that is carried to another database and back is the same, and a file that is not whole changes nothing."""

from __future__ import annotations

import json
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import trio

from runner.core.errors import BadExport, StoreNotEmpty, UsageError
from runner.core.model import CommandHolder, Limits, PoolMissReason, SlotKey, SlotState, succeeded
from runner.core.settings import Settings
from runner.events import events as ev
from runner.ops.host.move_store import export_store, import_store
from runner.ports.store import EntryRow, PoolRow, ProjectRow, RunnerRow, SlotRow
from runner.store import open_reader, open_store
from tests.support.needs import POSTGRES

if POSTGRES.missing is None:
    from tests.support import postgres

RUNNER = RunnerRow(id="r1", host="host", boot="boot", home="8:1", pid=7, ticks=70)
LIMITS = Limits(1.0, 1 << 30)
STARTED = ev.RunStarted(name="fix", plan="sha256:1", runner="0.1.0", steps={}, deadline_seconds=60.0, key="build-7")
SNAPSHOT = ev.SnapshotPublished(commit="c", tree="t", base=None, branch="b", entries=1, ignored=0, changed=1)
REQUESTED = ev.WorkspaceRequested(provider="local", project="docs", persistent=False, limits=LIMITS, ttl_seconds=60.0)
ACQUIRED = ev.LeaseAcquired(workspace="w", lease="l", holder=CommandHolder("exec", 7), fence=1, ttl_seconds=60.0)


def at(home: Path, url: str | None = None) -> Settings:
    home.mkdir(exist_ok=True)
    return Settings.from_env({"RUNNER_HOME": str(home), **({"RUNNER_DATABASE_URL": url} if url else {})})


async def fill(settings: Settings, *, warnings: int = 1) -> None:
    """Put a row into each table."""
    async with open_store(settings.store_url, runner=RUNNER) as store:
        await store.append(
            "a", [STARTED, *(ev.WarningIssued("x.y", f"{each} \0 é \udc80") for each in range(warnings))]
        )
        await store.append("a", [SNAPSHOT, ev.RunEnded(succeeded(), 0)])
        await store.append_to_workspace("w", [REQUESTED, ev.PoolMissed("w", PoolMissReason.EMPTY), ACQUIRED])
        await store.put_project(ProjectRow(name="docs", root="/srv", workspace_isolation=True, protected_paths=("x",)))
        await store.put_entry(EntryRow(kind="token", name="t", body="{}"))
        await store.put_pools([PoolRow("pool", SlotKey(provider="local", image=None, limits=LIMITS), 2)])
        await store.put_slot(SlotRow(id="s", pool="pool", state=SlotState.READY, keeper="r1"))


def told(path: Path) -> tuple[str, list[str]]:
    """Return the nonce of an export and its other lines, sorted, since each database sorts text in its own way."""
    header, *lines = path.read_text().splitlines()
    return json.loads(header)["nonce"], sorted(lines)


@POSTGRES.mark
@pytest.mark.scenario("BEY-20", only="several hosts share one PostgreSQL store")
async def test_there_and_back_nothing_is_lost(tmp_path: Path) -> None:
    before, between, after = at(tmp_path / "a"), at(tmp_path / "b", postgres.fresh_url()), at(tmp_path / "c")
    await fill(before, warnings=1200)
    files = [tmp_path / f"{name}.jsonl" for name in ("before", "between", "after")]

    await export_store(before, files[0])
    await import_store(between, files[0])
    await export_store(between, files[1])
    await import_store(after, files[1])
    rows = await export_store(after, files[2])

    assert told(files[0]) == told(files[1]) == told(files[2])
    assert rows == len(files[2].read_text().splitlines()) - 2 > 1200
    assert stat.S_IMODE(files[0].stat().st_mode) == 0o600
    async with open_reader(before.store_url) as one, open_reader(after.store_url) as other:
        assert await one.events("a") == await other.events("a")
        assert await one.runs() == await other.runs()
        assert await one.workspaces() == await other.workspaces()


async def test_every_table_is_carried(tmp_path: Path) -> None:
    await fill(at(tmp_path))
    await export_store(at(tmp_path), tmp_path / "store.jsonl")

    with closing(sqlite3.connect(tmp_path / "state.db")) as store:
        tables = {name for (name,) in store.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    carried = {line[0] for line in map(json.loads, (tmp_path / "store.jsonl").read_text().splitlines()[1:-1])}
    assert tables - carried == {"meta", "clock"}


def without_end(lines: list[str]) -> list[str]:
    return lines[:-1]


def without_a_row(lines: list[str]) -> list[str]:
    return [*lines[:2], *lines[3:]]


def of_another_schema(lines: list[str]) -> list[str]:
    return [lines[0].replace('"schema":', '"schema":9'), *lines[1:]]


def with_another_table(lines: list[str]) -> list[str]:
    return [lines[0], '["sqlite_schema",1]', *lines[1:]]


def with_a_wrong_value(lines: list[str]) -> list[str]:
    return [lines[0], json.dumps([*json.loads(lines[1])[:-1], None]), *lines[2:]]


def with_half_a_line(lines: list[str]) -> list[str]:
    return [*lines[:2], lines[2][:20], *lines[3:]]


def with_more_behind(lines: list[str]) -> list[str]:
    return [*lines, lines[1]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: [], "no header"),
        (lambda lines: lines[1:], "no header"),
        (without_end, "does not end after"),
        (without_a_row, "does not end after"),
        (with_more_behind, "does not end after"),
        (of_another_schema, "it has schema 9"),
        (with_another_table, "unknown table `sqlite_schema`"),
        (with_a_wrong_value, "do not fit: NOT NULL"),
        (with_half_a_line, "line 3 is not one of an export"),
    ],
)
async def test_a_file_that_is_not_whole_changes_nothing(
    tmp_path: Path, change: Callable[[list[str]], list[str]], said: str
) -> None:
    file, to = tmp_path / "store.jsonl", at(tmp_path / "to")
    await fill(at(tmp_path / "from"))
    await export_store(at(tmp_path / "from"), file)
    whole = file.read_text()
    file.write_text("".join(f"{line}\n" for line in change(whole.splitlines())))

    with pytest.raises(BadExport, match=said):
        await import_store(to, file)

    file.write_text(whole)
    await import_store(to, file)


async def test_a_store_that_is_not_empty_stays_as_it_is(tmp_path: Path) -> None:
    await fill(at(tmp_path))
    await export_store(at(tmp_path), tmp_path / "store.jsonl")

    with pytest.raises(StoreNotEmpty):
        await import_store(at(tmp_path), tmp_path / "store.jsonl")
    with pytest.raises(UsageError, match="is there already"):
        await export_store(at(tmp_path), tmp_path / "store.jsonl")


async def test_an_empty_store_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the store is empty"):
        await export_store(at(tmp_path), tmp_path / "store.jsonl")

    assert not any(tmp_path.iterdir())


async def test_cancelling_leaves_no_file(tmp_path: Path) -> None:
    await fill(at(tmp_path))
    with trio.CancelScope() as scope:
        scope.cancel()
        await export_store(at(tmp_path), tmp_path / "store.jsonl")

    assert scope.cancelled_caught
    assert not (tmp_path / "store.jsonl").exists()
