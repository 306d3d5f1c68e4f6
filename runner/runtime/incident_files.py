"""Files that a run puts into its incident's directory while it works: the agent's prompt and log.

The directory is the user's, and may hold anything: nothing is written through a link, nothing is overwritten, and a
reader never sees half a prompt.
"""

from __future__ import annotations

import filecmp
import os
import re
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from msgspec import Struct

from runner.core.errors import HostRefused
from runner.core.patterns import pattern
from runner.core.sanitize import sanitize
from runner.runtime.exec import LogFile
from runner.safefs import trees
from runner.safefs.safe_open import open_directory

PROMPT = "prompt-sent.md"
LOGS = ("agent-session.tar.gz", "agent-commands-executed.log")  # of a run's own logs those that go there

_LOG = pattern(r"triage_.+_(\d{8}_\d{6})(?:-(\d{1,6}))?\.log")


def open_log(directory: Path, agent: str, moment: int) -> LogFile:
    """Open a new log, named after the agent and the moment (microseconds since the epoch), to the second and in UTC.

    Another one of the same second gets a number. Blocking. Raises ``OSError``, also for a directory that is a link.
    """
    second = datetime.fromtimestamp(moment // 1_000_000, UTC).strftime("%Y%m%d_%H%M%S")
    directory.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open_directory(directory) as top:
        for number in count(1):
            name = f"triage_{agent}_{second}{f'-{number}' if number > 1 else ''}.log"
            with suppress(FileExistsError):
                return LogFile(directory / name, file=os.fdopen(os.open(name, flags, 0o644, dir_fd=top), "wb", 0))
    raise AssertionError  # there is always another number


def is_latest(log: Path) -> bool:
    """Tell whether no agent has worked on the incident since the one with this log. Blocking.

    Names decide, since nothing that an agent leaves is delivered under such a name: see ``trees.OWN_LOG``.
    """
    files = (path.name for path in log.parent.glob("*") if path.is_file() and not path.is_symlink())
    names = [name for file in files if (name := _LOG.fullmatch(file))]
    return bool(names) and max(names, key=_moment)[0] == log.name


def _moment(name: re.Match[str]) -> tuple[str, int]:
    return name[1], int(name[2] or 1)


def keep_earlier(there: Path, new: Path) -> list[str]:
    """Rename the file at ``there`` before ``new`` replaces it, by the moment of its last change (UTC). Returns the
    reason if that failed. A link stays, and so does a file of the same bytes.

    Blocking.
    """
    if not new.is_file() or not there.is_file() or there.is_symlink():
        return []
    try:
        if filecmp.cmp(there, new, shallow=False):
            return []
        second = datetime.fromtimestamp(there.stat().st_mtime, UTC).strftime("%Y%m%d_%H%M%S")
        names = (f"{there.stem}.{second}{f'-{number}' if number > 1 else ''}{there.suffix}" for number in count(1))
        name = next(name for name in names if not os.path.lexists(there.with_name(name)))
        with open_directory(there.parent) as top:
            os.rename(there.name, name, src_dir_fd=top, dst_dir_fd=top)
    except OSError as error:
        return [f"the earlier {there.name}: {error.strerror}"]
    return []


def mark_rehearsed(report: Path, script: str) -> None:
    """Begin a report with a note that it comes from a rehearsal, so that nobody takes it for an investigation.
    Blocking."""
    if report.is_file():
        first = f"> REHEARSAL: no model was asked, {sanitize(script)} stood for it. This is no investigation.\n\n"
        report.write_bytes(first.encode() + report.read_bytes())


class Delivery(Struct, frozen=True):
    """The destination of a run's files in an incident's directory.

    Members of a matrix that share the directory each have a folder of their name in ``output`` and ``logs``; no name
    that an agent chooses leads from one to another.
    """

    incident: Path
    member: str = ""

    @property
    def output(self) -> Path:
        return self.incident / "output" / self.member

    @property
    def logs(self) -> Path:
        return self.incident / "logs" / self.member

    def put_prompt(self, run: Path) -> None:
        """Copy the prompt from a run's directory, replacing an earlier run's. Blocking. Raises ``HostRefused``."""
        place = self.logs if self.member else self.incident
        if left := trees.copy_out(run, place, only=(PROMPT,)):
            raise HostRefused(f"`{place}` does not take what the agent is sent: {left[0]}")

    def put_logs(self, logs: Path) -> list[str]:
        """Copy the archive of the agent's session and the list of its commands, where there are such, from a run's
        logs. Return what stays behind. Blocking."""
        names = [name for name in LOGS if (logs / name).exists()]
        return trees.copy_out(logs, self.logs, only=names) if names else []

    def put_output(self, kept: Path, report: str) -> list[str]:
        """Copy a run's output, and keep the earlier ``report``. Return what stays behind. Blocking."""
        if not any(path.is_file() for path in kept.rglob("*")):
            return []
        left = keep_earlier(self.output / report, kept / report) if report else []
        return left + trees.copy_out(kept, self.output, to_people=True)
