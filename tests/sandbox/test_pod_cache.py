"""The guest's words for a cache of what pods are sent: what is kept there, and what is not taken from there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import pytest

from runner.guest import binary
from runner.sandbox.tar_trees import HEAD, Source, pack_trees
from tests.support.folder_contents import everything, folder, put
from tests.support.needs import ROOT


class Cache(NamedTuple):
    """A cache in the directory ``place``, and what is sent: ``stream`` of the directory ``tree``."""

    place: Path
    tree: Path
    stream: bytes

    @property
    def digest(self) -> str:
        return sha256(self.stream).hexdigest()

    def keep(self, to: Path) -> int:
        return guest("keep", self.place, self.digest, to, given=self.stream)

    def cached(self, to: Path) -> int:
        return guest("cached", self.place, self.digest, to)


def guest(*words: str | Path, given: bytes = b"") -> int:
    return subprocess.run([binary.find().path, *words], input=given, check=False).returncode


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    tree = tmp_path / "tree"
    put(tree / "bin" / "tool", os.urandom(300_000), 0o755)
    (tree / "link").symlink_to("bin/tool")
    return Cache(folder(tmp_path / "cache"), tree, b"".join(pack_trees([Source("name", tree, 0)])))


@pytest.fixture
def small(cache: Cache) -> Iterator[Cache]:
    """The cache on a file system with room for what is sent once."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", cache.place], check=True)
    yield cache
    subprocess.run(["umount", "--lazy", cache.place], check=True)


def test_what_one_has_kept_another_takes(cache: Cache, tmp_path: Path) -> None:
    first, second = folder(tmp_path / "first"), folder(tmp_path / "second")

    assert cache.cached(second) == 7
    assert cache.keep(first) == 0
    assert cache.cached(second) == 0

    assert everything(first / "name") == everything(second / "name") == everything(cache.tree)
    assert [file.name for file in cache.place.iterdir()] == [cache.digest]


@pytest.mark.parametrize("size", [0, 1, *range(10, 30), 63, 64, 65, 119, 120, 200_000])
def test_the_digest_is_that_of_everybody(cache: Cache, tmp_path: Path, size: int) -> None:
    """``keep`` compares its own with the one that is named; sizes lead to each way of padding."""
    record = HEAD.pack(size, 0, 0o100644, 1, 0) + b"a" + bytes(size) + HEAD.pack(0, 0, 0, 0, 0)

    kept = guest("keep", cache.place, sha256(record).hexdigest(), folder(tmp_path / "to"), given=record)

    assert kept == 0
    assert [file.read_bytes() for file in cache.place.iterdir()] == [record]


@pytest.mark.parametrize("change", ["a byte", "its end"])
def test_a_file_that_somebody_has_changed_is_refused_and_removed(cache: Cache, tmp_path: Path, change: str) -> None:
    assert cache.keep(folder(tmp_path / "first")) == 0
    content = bytearray(cache.stream)
    content[200_000] ^= 1
    (cache.place / cache.digest).write_bytes(content if change == "a byte" else cache.stream[:-9])

    code = cache.cached(folder(tmp_path / "second"))

    assert (code, [*cache.place.iterdir()]) == (9, [])


def test_what_is_not_what_was_named_is_not_kept(cache: Cache, tmp_path: Path) -> None:
    code = guest("keep", cache.place, "0" * 64, folder(tmp_path / "to"), given=cache.stream)

    assert code == 8
    assert everything(tmp_path / "to" / "name") == everything(cache.tree)
    assert [*cache.place.iterdir()] == []


@pytest.mark.parametrize("place", ["gone", "proc"])
def test_where_nothing_can_be_kept_the_files_come_nevertheless(cache: Cache, tmp_path: Path, place: str) -> None:
    nowhere = cache._replace(place=Path("/proc/self") if place == "proc" else tmp_path / "gone")

    assert nowhere.cached(tmp_path) == 7
    assert nowhere.keep(folder(tmp_path / "to")) == 8
    assert everything(tmp_path / "to" / "name") == everything(cache.tree)


@ROOT.mark
def test_a_full_cache_is_emptied_for_the_next(small: Cache, tmp_path: Path) -> None:
    older = small.place / ("0" * 64)
    older.write_bytes(bytes(200_000))

    assert small.keep(folder(tmp_path / "to")) == 0

    assert [file.name for file in small.place.iterdir()] == [small.digest]


@ROOT.mark
def test_what_does_not_fit_is_not_kept(small: Cache, tmp_path: Path) -> None:
    (small.place / "of-others").write_bytes(bytes(200_000))

    assert small.keep(folder(tmp_path / "to")) == 8

    assert [file.name for file in small.place.iterdir()] == ["of-others"]
    assert everything(tmp_path / "to" / "name") == everything(small.tree)


@pytest.mark.parametrize(("age", "kept"), [(0, False), (700, True)], ids=["written now", "left behind"])
def test_what_another_writes_is_left_to_it_unless_it_was_killed(
    cache: Cache, tmp_path: Path, age: int, *, kept: bool
) -> None:
    part = cache.place / f"{cache.digest}.part"
    part.write_bytes(b"begun")
    began = part.stat().st_mtime - age
    os.utime(part, (began, began))

    assert cache.keep(folder(tmp_path / "to")) == 0

    assert [file.name for file in cache.place.iterdir()] == [cache.digest if kept else part.name]
