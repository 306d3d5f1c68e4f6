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


_OWN = ("setsid", "--ctty", "--wait", "env", "--default-signal=INT")  # Ctrl-C also where whoever tests ignores it


@dataclass
class Terminal:
    process: subprocess.Popen[bytes]
    side: int
    shown: bytearray = field(default_factory=bytearray)
    hung_up: bool = False

    @property
    def text(self) -> str:
        return self.shown.decode(errors="replace")

    def until(self, text: str) -> bool:
        """Read until something is shown: false when the command ends without; fails when it takes too long."""
        give_up = time.monotonic() + PATIENCE
        with suppress(OSError):  # how Linux says that nobody has the other end any more
            while text not in self.text:
                assert time.monotonic() < give_up, f"never shown: {text!r} in {self.text!r}"
                if select.select([self.side], [], [], 0.1)[0]:
                    self.shown += os.read(self.side, 1 << 16)
        return text in self.text

    def type(self, text: bytes) -> None:
        os.write(self.side, text)

    def hang_up(self) -> None:
        self.hung_up = True
        os.close(self.side)

    def rest(self) -> str:
        """Read to the end of the command."""
        with suppress(OSError):  # how Linux says that nobody has the other end any more
            while chunk := os.read(self.side, 1 << 16):
                self.shown += chunk
        self.process.wait(PATIENCE)
        return self.text


@contextmanager
def on_terminal(
    project: Project, *arguments: str, rows: int = 40, columns: int = 120, own: bool = False
) -> Iterator[Terminal]:
    """``own``: it is the command's controlling terminal, where a person types; else nobody does."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen(
        [*(_OWN if own else ()), sys.executable, "-m", "runner", *arguments],
        cwd=project.folder,
        env={"TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONUTF8": "1", **project.variables},
        stdin=theirs if own else subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    terminal = Terminal(process, ours)
    try:
        yield terminal
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(PATIENCE)
        if not terminal.hung_up:
            os.close(ours)
