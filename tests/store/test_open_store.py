"""A store is opened by its URL, whose scheme is a module of the room."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from runner.core.errors import BadStoreUrl, UsageError
from runner.core.settings import Settings
from runner.events.events import RunStarted
from runner.store import exists, open_reader, open_store

STARTED = RunStarted(name="fix", plan="sha256:1", runner="0.1.0", steps={"agent": "agent"}, deadline_seconds=60.0)


async def test_what_was_written_under_a_url_is_read_under_it(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path / 'shared' / 'state.db'}"
    assert not exists(url)

    async with open_store(url) as store:
        await store.append("a", [STARTED])

    assert exists(url)
    async with open_reader(url) as reader:
        assert [row.id for row in await reader.runs()] == ["a"]


async def test_a_store_in_memory_is_new_each_time() -> None:
    async with open_store("memory:", entropy=os.urandom) as store:
        await store.append("a", [STARTED])

    async with open_store("memory:") as store:
        assert store.writable
        assert await store.runs() == []


@pytest.mark.parametrize(
    ("url", "words"),
    [
        pytest.param("mysql://me:hunter2@db/runner", "unknown scheme: `mysql`", id="scheme"),
        pytest.param("_rows:x", "unknown scheme: `_rows`", id="private module"),
        pytest.param("sqlite:state.db", "`sqlite:state.db` names no file", id="relative"),
        pytest.param("sqlite://me:hunter2@state.db", "`sqlite://...@state.db` names no file", id="password"),
        pytest.param("sqlite:///", "names no file", id="no file"),
        pytest.param("memory:me:hunter2@x", "`...@x` names more than memory", id="more than memory"),
    ],
)
def test_a_url_of_no_store_is_refused_without_its_password(url: str, words: str) -> None:
    with pytest.raises(BadStoreUrl) as refused:
        open_store(url)

    assert words in refused.value.message
    assert "hunter2" not in f"{refused.value.message} {refused.value.hint}"


def test_the_store_of_a_home_is_its_state_file_unless_a_url_is_set(tmp_path: Path) -> None:
    plain = Settings.from_env({"RUNNER_HOME": str(tmp_path)})
    moved = Settings.from_env({"RUNNER_HOME": str(tmp_path), "RUNNER_DATABASE_URL": "postgresql://me:hunter2@db/r?s=1"})

    assert plain.store_url == f"sqlite://{tmp_path}/state.db"
    assert replace(plain, home=Path("/x")).store_url == "sqlite:///x/state.db"
    assert ("RUNNER_DATABASE_URL", "postgresql://...@db/r?...", "environment") in moved.rows()
    assert "hunter2" not in repr(moved)


def test_what_is_no_url_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"`RUNNER_DATABASE_URL` is `\.\.\.@x`"):
        Settings.from_env({"RUNNER_DATABASE_URL": "hunter2@x"})
