"""The program ends at once, and leaves nothing undone that the interpreter would have done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, sys, threading
from runner.__main__ import entry
sys.argv[1:] = ["--version"]
{before}
code = entry()
print("left to the interpreter")
sys.exit(code)
"""
ATEXIT = "atexit.register(print, 'at the end', end='')"
THREAD = "threading.Thread(target=lambda: (threading.main_thread().join(), print('a thread'))).start()"
TRACED = "sys.settrace(lambda frame, event, argument: None)"


@pytest.mark.parametrize(
    ("before", "ends"),
    [
        pytest.param("", "", id="nothing to do"),
        pytest.param(ATEXIT, "at the end", id="registered for the end"),
        pytest.param(THREAD, "left to the interpreter\na thread\n", id="a thread that is waited for"),
        pytest.param(THREAD.replace("))).start", ")), daemon=True).start"), "", id="a thread that nobody waits for"),
        pytest.param(TRACED, "left to the interpreter\n", id="somebody watches"),
    ],
)
def test_the_end_is_that_of_any_program(before: str, ends: str, tmp_path: Path) -> None:
    program = PROGRAM.format(before=before)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.partition("\n")[2] == ends
