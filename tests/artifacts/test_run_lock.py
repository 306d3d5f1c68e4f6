"""A run is held by the process that carries it out, and by nobody once that has died."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.artifacts.run_lock import create_locked, is_locked, try_lock


def test_a_claimed_run_is_held_until_its_descriptor_is_closed(tmp_path: Path) -> None:
    held = create_locked(tmp_path / "run")

    assert is_locked(tmp_path / "run")
    assert try_lock(tmp_path / "run") is None
    os.close(held)
    assert not is_locked(tmp_path / "run")


def test_a_run_is_claimed_once(tmp_path: Path) -> None:
    os.close(create_locked(tmp_path / "run"))

    with pytest.raises(FileExistsError):
        create_locked(tmp_path / "run")


def test_a_run_without_a_directory_is_not_held_and_can_be_taken(tmp_path: Path) -> None:
    assert not is_locked(tmp_path / "run")

    held = try_lock(tmp_path / "run")

    assert held is not None
    assert is_locked(tmp_path / "run")
    os.close(held)


def test_the_run_of_a_killed_process_can_be_taken_though_its_children_live(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys; from pathlib import Path; from runner.artifacts.run_lock import create_locked\n"
        "create_locked(Path(sys.argv[1])); child = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True); input()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as runner:
        child = int(runner.stdout.readline())
        alive = is_locked(tmp_path / "run")
        runner.kill()
    held = try_lock(tmp_path / "run")
    os.kill(child, 9)

    assert alive
    assert held is not None
    os.close(held)


def test_whoever_looks_does_not_keep_others_from_taking(tmp_path: Path) -> None:
    os.close(create_locked(tmp_path / "run"))
    looking = (
        "import sys; from pathlib import Path; from runner.artifacts.run_lock import is_locked\n"
        "while True: is_locked(Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", looking, str(tmp_path / "run")]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2]) as other:
        for _ in range(200):
            held = try_lock(tmp_path / "run")
            assert held is not None
            os.close(held)
        other.kill()
