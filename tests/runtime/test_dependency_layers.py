"""Layers of dependencies: kept whole, given unchanged, made once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from runner.core.hosts import NetworkSpec
from runner.core.model import Mount
from runner.runtime.dependency_layers import Layer, NotKept, Owner, layer_of, share
from runner.runtime.mount_plan import MountPlan
from runner.spec.model import DependencySpec

KEEP = ("lib", "~/go/pkg")
ONE = DependencySpec(("npm", "ci"), ("lock",), KEEP)
OWNER = Owner(project="default", source="/repo", untrusted=False)
MOUNTS = MountPlan(protected=(), toolchains=(), incident=False)


def installation(folder: Path, fill: Callable[[Path], None] = lambda top: None) -> Path:
    place = folder / "run-dependencies"
    for name in ("tree/lib", "home/go/pkg"):
        (place / name).mkdir(parents=True)
        (place / name / "x").write_text(name)
    (place / "tree" / "lib" / "x").chmod(0o700)
    (place / "tree" / "lib" / "link").symlink_to("/etc/passwd")
    fill(place)
    return place


def test_a_layer_has_what_was_filled_for_every_user_and_no_more(tmp_path: Path) -> None:
    place, layer = installation(tmp_path), Layer(tmp_path / "kept" / "a")
    record = layer.keep(place, KEEP, "run1")

    first, second = layer.mounts(KEEP)
    assert layer.read() == record
    assert (first.target, second.target) == KEEP
    assert sorted(os.listdir(first.source)) == ["link", "x"]
    assert (second.source / "x").read_text() == "home/go/pkg"
    assert [oct(path.lstat().st_mode & 0o7777) for path in (first.source, first.source / "x", second.source / "x")] == [
        "0o777",
        "0o777",
        "0o666",
    ]
    assert [*place.iterdir()] == []


def _grow(top: Path) -> None:
    (top / "x").write_text("tree/liB")


def _rename(top: Path) -> None:
    (top / "x").rename(top / "y")


def _relink(top: Path) -> None:
    (top / "link").unlink()
    (top / "link").symlink_to("/etc/shadow")


def _restore_times(top: Path) -> None:
    before = (top / "x").stat()
    (top / "x").write_text("tree/liB")
    os.utime(top / "x", ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [_grow, _rename, _relink, _restore_times])
def test_a_layer_that_has_changed_is_not_given_and_is_made_anew(tmp_path: Path, change: Callable[[Path], None]) -> None:
    layer = Layer(tmp_path / "kept" / "a")
    layer.keep(installation(tmp_path / "1"), KEEP, "run1")
    change(layer.path / "0")

    assert layer.read() is None
    assert layer.keep(installation(tmp_path / "2"), KEEP, "run2") == layer.read()


@pytest.mark.parametrize(
    ("fill", "why"),
    [
        (lambda place: (place / "tree" / "lib").rename(place / "tree" / "other"), "no directory `lib`: No such file"),
        (lambda place: _linked(place / "home" / "go"), "no directory `~/go/pkg`"),
        (lambda place: os.mkfifo(place / "tree" / "lib" / "pipe"), "`pipe` is neither a file, a directory nor a link"),
    ],
    ids=["missing", "a link on the way", "a pipe"],
)
def test_what_cannot_be_kept_leaves_no_layer(tmp_path: Path, fill: Callable[[Path], None], why: str) -> None:
    layer = Layer(tmp_path / "kept" / "a")
    with pytest.raises(NotKept, match=why):
        layer.keep(installation(tmp_path, fill), KEEP, "run1")
    assert not layer.is_there()


def test_a_layer_of_too_many_files_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.runtime.dependency_layers.MOST_FILES", 1)
    with pytest.raises(NotKept, match="it has 2 files of at most 1"):
        Layer(tmp_path / "kept" / "a").keep(installation(tmp_path), KEEP, "run1")


def _linked(path: Path) -> None:
    path.rename(path.with_name("real"))
    path.symlink_to("real")


async def test_one_makes_a_layer_and_the_others_wait_for_it(tmp_path: Path) -> None:
    layer, made, told = Layer(tmp_path / "kept" / "a"), 0, []

    async def want(number: int) -> None:
        nonlocal made
        record, lock = await layer.lock()
        if record is None:
            made += 1
            await trio.sleep(0.2)
            record = layer.keep(installation(tmp_path / str(number)), KEEP, f"run{number}")
            share(lock)
        told.append(record.by)
        await trio.sleep(0.1)
        os.close(lock)

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(want, number)

    assert made == 1
    assert len(set(told)) == 1


async def test_who_gives_up_leaves_the_layer_to_the_next(tmp_path: Path) -> None:
    layer = Layer(tmp_path / "kept" / "a")
    for _ in range(2):
        with trio.fail_after(5):
            record, lock = await layer.lock()
        assert record is None
        os.close(lock)


@pytest.mark.parametrize(
    "changed",
    [
        {"owner": replace(OWNER, project="other")},
        {"owner": replace(OWNER, source="/fork")},
        {"owner": replace(OWNER, untrusted=True)},
        {"one": DependencySpec(("npm", "i"), ("lock",), KEEP)},
        {"one": DependencySpec(("npm", "ci"), ("lock",), ("lib",))},
        {"files": ["other"]},
        {"image": "sha256:1"},
        {"network": NetworkSpec(open=True)},
        {"network": NetworkSpec(environment={"PIP_INDEX_URL": "https://mirror.example.org"})},
        {"credentials": ["NPM_TOKEN for npm.example.org:443 as bearer"]},
        {"mount_plan": replace(MOUNTS, toolchains=("/opt/node",))},
        {"mount_plan": replace(MOUNTS, environment={"A": "b"})},
    ],
    ids=str,
)
def test_all_that_decides_the_content_or_who_may_see_it_names_another_layer(changed: dict[str, object]) -> None:
    same = {
        "one": ONE,
        "owner": OWNER,
        "files": ["hash"],
        "image": None,
        "mount_plan": MOUNTS,
        "network": NetworkSpec(),
        "credentials": [],
    }
    assert layer_of(Path("/home"), **same) == layer_of(Path("/home"), **same)  # type: ignore[arg-type]
    assert layer_of(Path("/home"), **{**same, **changed}) != layer_of(Path("/home"), **same)  # type: ignore[arg-type]


def test_mounts_are_what_was_kept() -> None:
    assert Layer(Path("/kept")).mounts(("a",)) == (Mount(Path("/kept/0"), "a"),)
