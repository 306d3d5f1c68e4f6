"""What a run puts into its incident's directory while it works: the prompt and the log of its agent.

That directory is the user's, and so may be what lies in it: nothing is written through a link, nothing that is there is
written over, and a reader never sees half a prompt.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from runner import trees
from runner.beneath import opened
from runner.errors import HostRefused
from runner.steps._exec import LogFile

PROMPT = "prompt-sent.md"
LOGS = ("agent-session.tar.gz", "agent-commands-executed.log")  # of a run's own logs those that go there

_LOG = re.compile(r"triage_.+_(\d{8}_\d{6})(?:-(\d{1,6}))?\.log")


def open_log(directory: Path, agent: str, moment: int) -> LogFile:
    """A new log, named after the agent and the moment (microseconds since the epoch), to the second and in UTC.

    Another one of the same second gets a number. Blocking. Raises ``OSError``, also for a directory that is a link.
    """
    second = datetime.fromtimestamp(moment // 1_000_000, UTC).strftime("%Y%m%d_%H%M%S")
    directory.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with opened(directory) as top:
        for number in count(1):
            name = f"triage_{agent}_{second}{f'-{number}' if number > 1 else ''}.log"
            with suppress(FileExistsError):
                return LogFile(directory / name, file=os.fdopen(os.open(name, flags, 0o644, dir_fd=top), "wb", 0))
    raise AssertionError  # there is always another number


def is_latest(log: Path) -> bool:
    """Whether no agent has worked on the incident since the one whose log this is. Blocking."""
    names = [name for path in log.parent.glob("*") if (name := _LOG.fullmatch(path.name))]
    return bool(names) and max(names, key=_moment)[0] == log.name


def _moment(name: re.Match[str]) -> tuple[str, int]:
    return name[1], int(name[2] or 1)


@dataclass(frozen=True)
class Delivery:
    """Where what a run leaves goes in an incident's directory.

    Members of a matrix that share the directory have a folder each below ``output``, by their names.
    """

    incident: Path
    member: str = ""

    @property
    def output(self) -> Path:
        return self.incident / "output" / self.member

    @property
    def rest(self) -> Path:
        """The place of the prompt, and of the folder ``logs``."""
        return self.output if self.member else self.incident

    def put_prompt(self, run: Path) -> None:
        """Copy it from a run's directory, in the place of an earlier run's. Blocking. Raises ``HostRefused``."""
        if left := trees.copy_out(run, self.rest, only=(PROMPT,)):
            raise HostRefused(f"`{self.rest}` does not take what the agent is sent: {left[0]}")
