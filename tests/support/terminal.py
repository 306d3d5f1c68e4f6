"""A real terminal of a given size, on which a command is started and read from as it writes."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from tests.support.situations import Project

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PATIENCE = 60.0  # seconds for what must be shown


@dataclass
class Terminal:
    process: subprocess.Popen[bytes]
    side: int
    shown: bytearray = field(default_factory=bytearray)

    @property
    def text(self) -> str:
        return self.shown.decode(errors="replace")

    def until(self, text: str) -> None:
        """Read until something is shown; fails when it never is."""
        give_up = time.monotonic() + PATIENCE
        while text not in self.text:
            assert time.monotonic() < give_up, f"never shown: {text!r} in {self.text!r}"
            if select.select([self.side], [], [], 0.1)[0]:
                self.shown += os.read(self.side, 1 << 16)

    def rest(self) -> str:
        """Read to the end of the command."""
        with suppress(OSError):  # how Linux says that nobody has the other end any more
            while chunk := os.read(self.side, 1 << 16):
                self.shown += chunk
        self.process.wait(PATIENCE)
        return self.text


@contextmanager
def on_terminal(project: Project, *arguments: str, rows: int = 40, columns: int = 120) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "runner", *arguments],
        cwd=project.folder,
        env={"TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONUTF8": "1", **project.variables},
        stdin=subprocess.DEVNULL,  # nobody types
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(PATIENCE)
        os.close(ours)
