"""``run-agent.sh``: the old name of ``runner triage``, with its arguments as they are."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "runners" / "run-agent.sh"


def run(path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *arguments], env={"PATH": path}, capture_output=True, text=True)


def test_its_arguments_and_its_exit_status_are_those_of_triage(tmp_path: Path) -> None:
    stub = tmp_path / "runner"
    stub.write_text("#!/bin/sh\nprintf '<%s>' \"$@\"\nexit 7\n")
    stub.chmod(0o755)

    done = run(f"{tmp_path}:{os.defpath}", "-w", "a b", "--", "why 'x' $y?")

    assert (done.returncode, done.stdout) == (7, "<triage><-w><a b><--><why 'x' $y?>")


@pytest.mark.parametrize("arguments", [(), ("-w", "/nowhere")], ids=["none", "some"])
def test_without_the_runner_it_says_what_to_do(arguments: tuple[str, ...]) -> None:
    done = run(os.defpath, *arguments)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error[cli.no-runner]: runner is not on PATH\n  = hint: ")
