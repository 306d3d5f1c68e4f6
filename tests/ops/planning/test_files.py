"""What of an incident's directory a plan takes by content, by size and time, and not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner.ops.planning import files
from runner.ops.planning.files import MAX_FILE, MOST_BYTES, incident_files


def sized(path: Path, size: int) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


def test_a_large_file_is_known_by_size_and_time(tmp_path: Path) -> None:
    log = sized(tmp_path / "app.log", MAX_FILE + 1)
    first, again = (incident_files(tmp_path)[0]["app.log"] for _ in range(2))
    os.utime(log, ns=(0, 0))
    later = incident_files(tmp_path)[0]["app.log"]

    assert (first.whole, first.size) == (False, MAX_FILE + 1)
    assert first == again
    assert first.sha256 != later.sha256


def test_what_is_put_into_the_prompt_is_read_first_and_the_rest_up_to_256_mebibytes(tmp_path: Path) -> None:
    for number in range(17):
        sized(tmp_path / f"{number:02}.log", MAX_FILE)
    (tmp_path / "incident.json").write_text("{}")
    found, left = incident_files(tmp_path)

    assert [name for name, file in found.items() if not file.whole] == ["15.log", "16.log"]
    assert left == ""


def test_a_hundred_files_and_folders_at_the_top_are_read(tmp_path: Path) -> None:
    for number in range(99):
        (tmp_path / f"{number:03}").touch()
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for name in "xy":
            (tmp_path / folder / name).touch()

    assert [name for name, file in incident_files(tmp_path)[0].items() if not file.whole] == ["b/x", "b/y"]


def test_what_comes_to_more_than_two_gibibytes_is_left_out(tmp_path: Path) -> None:
    sized(tmp_path / "a.log", MOST_BYTES - 1)
    sized(tmp_path / "b.log", MAX_FILE + 1)
    sized(tmp_path / "c.log", 1)
    found, left = incident_files(tmp_path)

    assert sorted(found) == ["a.log", "c.log"]
    assert left == "`b.log` (beyond 2 GiB)"


def test_of_very_many_files_the_first_are_taken_and_those_of_the_top_before_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_FILES", 20)
    (tmp_path / "0").mkdir()
    for number in range(30):
        (tmp_path / "0" / f"{number:02}").touch()
    for name in ("z", "incident.json"):
        (tmp_path / name).write_text("{}")
    found, left = incident_files(tmp_path)

    assert {*found} == {"incident.json", "z", *(f"0/{number:02}" for number in range(17))}
    assert left == "`0/17` and what follows (beyond 20 files)"


def test_what_is_left_out_is_named_up_to_three(tmp_path: Path) -> None:
    for name in "abcde":
        (tmp_path / name).symlink_to("/etc/passwd")

    assert incident_files(tmp_path)[1] == (
        "`a` (a link, and none is followed), `b` (a link, and none is followed), `c` (a link, and none is followed)"
        " and 2 more"
    )


@pytest.mark.parametrize("name", ["output", "logs", ".git", "prompt-sent.md"])
def test_what_earlier_runs_left_is_no_input(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/etc")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / name).touch()

    assert (list(incident_files(tmp_path)[0]), incident_files(tmp_path)[1]) == ([f"sub/{name}"], "")
