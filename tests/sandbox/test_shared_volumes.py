"""The directory of a shared project beside its volume: what goes which way, and what a guest that lies gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from runner.sandbox.shared_volumes import SharedProject, open_shared
from tests.support.situations import write_files


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A project with one workspace, of which the volume has everything."""
    place = tmp_path / "shop"
    write_files(place, {"kept": "kept", "d/inner": "inner", "workspaces/w1/own": "own"})
    project = SharedProject(place)
    project.sent(project.changed()[0])
    listed = dict.fromkeys(project.here, "there")
    project.fetched(listed, [])
    return place


def test_only_what_changed_there_comes_and_not_over_what_changed_here(place: Path) -> None:
    project = SharedProject(place)
    (place / "kept").write_text("changed here")
    (place / "d" / "inner").unlink()
    listed = {**project.there, "kept": "other", "d/inner": "other", "new": "new", "workspaces/w1/own": "other"}

    assert sorted(project.wanted(listed)) == ["d/inner", "new", "workspaces/w1/own"]


def test_what_changed_or_went_here_is_sent(place: Path) -> None:
    (place / "kept").write_text("changed here")
    (place / "d" / "inner").unlink()
    (place / "d").rmdir()
    project = SharedProject(place)

    now, gone = project.changed()

    assert {name for name, _ in now.items() - project.here.items()} == {"kept"}
    assert gone == ["d/inner", "d"]


def test_what_was_removed_there_is_removed_here_unless_it_was_changed(place: Path) -> None:
    (place / "kept").write_text("changed here")

    SharedProject(place).fetched({}, [])

    assert {path.relative_to(place).as_posix() for path in place.rglob("*")} == {"kept", "workspaces", "workspaces/w1"}


def test_no_name_of_a_guest_leads_out_of_the_project_or_to_another_workspace(place: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").touch()
    (place / "link").symlink_to(tmp_path)
    (place / "workspaces" / "link").symlink_to(tmp_path)
    project = SharedProject(place)
    names = [
        "../outside",
        "d/../../outside",
        "./x",
        "a//b",
        f"/{tmp_path}/outside",
        "",
        "workspaces/w2/x",
        "workspaces",
    ]
    names += ["workspaces/w1"]

    wanted = project.wanted(dict.fromkeys(names, "x"))
    project.fetched(dict.fromkeys(names, "x"), ["../outside", "link/outside", "workspaces/link/outside"])
    SharedProject(place).fetched({}, [])

    assert wanted == []
    assert (tmp_path / "outside").exists()


async def test_one_has_a_project_open_at_a_time_and_the_next_sees_what_it_noted(place: Path) -> None:
    seen: list[str] = []

    async def read() -> None:
        async with open_shared(place) as project:
            seen.extend(project.here)

    async with trio.open_nursery() as nursery, open_shared(place) as project:
        nursery.start_soon(read)
        await trio.sleep(0.1)
        await trio.to_thread.run_sync(project.sent, {"noted": "x"})
        assert seen == []

    assert seen == ["noted"]
    assert sorted(os.listdir(place.parent)) == [".shop.volume", "shop"]
