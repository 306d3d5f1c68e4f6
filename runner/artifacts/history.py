"""The events of a run, or of a workspace, in its own directory, from which a lost store is rebuilt.

They are written there once the store has them, before anything is done that depends on them. So a store knows all that
a directory knows, or it is not the one that the directory was written beside.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from runner.core.codec import typed
from runner.core.home import PLAN_FILE
from runner.events.events import ANY, Recorded, as_json

FILE = "events.jsonl"
ESCAPED = "backslashreplace"  # of a name that is not UTF-8: in JSON, its bytes as Python reads them
_BEFORE_FIRST_EVENT = {
    PLAN_FILE,
    ".plan.json.part",
    "logs",
    FILE,
}  # what a run's directory has before its first event
_TAIL_BYTES = 1 << 16


class Unreadable(ValueError):
    """A line of an ``events.jsonl`` is not an event, or not the next one."""


def event_line(recorded: Recorded) -> str:
    return json.dumps(as_json(recorded), ensure_ascii=False)


def was_started(directory: Path) -> bool:
    """Tell whether a run's directory contains anything that is only there after its first event."""
    if not directory.is_dir() or directory.is_symlink():
        return False
    names = set(os.listdir(directory))
    if names - _BEFORE_FIRST_EVENT:
        return True
    events, logs = directory / FILE, directory / "logs"
    return (FILE in names and events.stat().st_size > 0) or ("logs" in names and any(logs.iterdir()))


def last_seq(directory: Path) -> int:
    """Return the number of the last complete event of a directory; 0 without any."""
    try:
        with (directory / FILE).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            for back in (_TAIL_BYTES, size):  # an event may be larger
                file.seek(max(0, size - back))
                for text in reversed(file.read().split(b"\n")[:-1]):  # behind the last one is what was cut off
                    with suppress(ValueError, TypeError, KeyError):
                        return int(json.loads(text)["seq"])
    except (FileNotFoundError, NotADirectoryError):
        pass
    return 0


def read_events(directory: Path, owner: str) -> list[Recorded]:
    """Read all events of ``owner`` in a directory; a last line if cut off, does not count. Raises ``Unreadable``."""
    try:
        content = (directory / FILE).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [_parse_line(text, number, owner) for number, text in enumerate(content.split(b"\n")[:-1], start=1)]


def _parse_line(text: bytes, number: int, owner: str) -> Recorded:
    try:
        words = json.loads(text)
        of, seq, at = (words.pop(key) for key in ("run", "seq", "at"))
        recorded = Recorded(of, seq, at, typed(words, ANY))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"line {number} is not an event") from error
    if (of, seq) != (owner, number) or not isinstance(at, int):
        raise Unreadable(f"line {number} is not event {number} of `{owner}`")
    return recorded


def add_events(directory: Path, recorded: Sequence[Recorded]) -> None:
    """Append further events of a workspace, or of a run that has ended."""
    with (directory / FILE).open("a", encoding="utf-8", errors=ESCAPED) as file:
        file.writelines(f"{event_line(one)}\n" for one in recorded)
