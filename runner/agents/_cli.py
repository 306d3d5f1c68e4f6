"""What all CLIs that work with a model have in common: reading their stream of JSON lines, and judging what it adds up
to. What a line means is each CLI's own; where a line is damaged, or of a kind that nobody knows, it says nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.agents._lines import last_line, tail
from runner.errors import printable
from runner.model import Exit, Outcome, Reason, Status, Usage, failed, succeeded
from runner.ports.agent import Access, Ended, Preparation
from runner.ports.gateway import Api

Line = Mapping[str, Any]

LONGEST = 16 << 20  # bytes of a line that is looked at
_NOT_FOUND = 127  # what a shell says of a command that there is none of


@dataclass(frozen=True)
class Turn:
    """What a CLI's stream says of its work: whether the last turn is ``under_way``, was ``finished``, or why it failed.

    ``said`` is its last words, or its complaint. ``denied`` counts the tool calls that the CLI's own rules refused,
    ``used`` those that ran.
    """

    under_way: bool = False
    finished: bool = False
    reason: Reason | None = None
    said: str = ""
    denied: int = 0
    used: int = 0
    usage: Usage | None = None


@dataclass(frozen=True)
class Cli:
    """``read`` makes a ``Turn`` of the lines of standard output."""

    program: str
    api: Api
    prepare: Callable[[Access], Preparation]
    read: Callable[[Iterable[Line]], Turn]

    def usage(self, ended: Ended) -> Usage | None:
        return self.read(lines(ended.stdout)).usage

    def judge(self, ended: Ended) -> Outcome:
        """Only a completed turn is a success, whatever the exit status says."""
        exit = ended.exit
        if exit.oom:
            return failed(Reason.OOM, str(exit))
        if exit.code == _NOT_FOUND:
            return failed(
                Reason.EXIT,
                f"`{self.program}` is not in the workspace",
                details=("hint: name the directory that has it in `bin` in workspace.toolchains, or an image with it",),
            )
        turn = self.read(lines(ended.stdout))
        if turn.finished and exit.ok:
            return _finished(turn)
        said = printable(turn.said) or last_line(tail(ended.stderr))
        if turn.reason is not None:
            return failed(turn.reason, said)
        return _unfinished(turn, exit, said)


def _finished(turn: Turn) -> Outcome:
    refused = f"{turn.denied} tool call{'s' * (turn.denied != 1)} refused by the CLI's own rules"
    if turn.denied and not turn.used:
        return failed(Reason.DENIED, f"{refused}, and none let through")
    return succeeded(printable(turn.said), warnings=(refused,) if turn.denied else ())


def _unfinished(turn: Turn, exit: Exit, said: str) -> Outcome:
    if exit.code is None and exit.signal is None:
        return Outcome(Status.UNKNOWN, Reason.UNKNOWN, f"{exit}: {said}" if said else str(exit))
    if exit.ok:
        return failed(Reason.NO_EVIDENCE, "exited 0 without a completed turn" + (f": {said}" if said else ""))
    message = f"{exit}: {said}" if said else str(exit)
    return failed(Reason.CUT_OFF if turn.under_way else Reason.EXIT, message)


def lines(path: Path) -> Iterator[Line]:
    """The JSON objects of a file, one a line; anything else is passed over."""
    with path.open("rb") as stream:
        while raw := stream.readline(LONGEST):
            if not raw.startswith(b"{"):
                continue
            try:
                value = json.loads(raw)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                yield value


def at(value: object, *keys: str) -> Any:
    """What stands below ``keys`` in nested objects; ``None`` where there is nothing, or no object."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def items(value: object, *keys: str) -> list[Any]:
    """The list that stands below ``keys``; empty when there is none."""
    found = at(value, *keys)
    return found if isinstance(found, list) else []


def text(value: object, *keys: str) -> str:
    found = at(value, *keys)
    return found if isinstance(found, str) else ""


def count(value: object, *keys: str) -> int:
    found = at(value, *keys)
    return found if isinstance(found, int) and found >= 0 else 0


_STATUS = re.compile(r'(?:\bstatus:? |\bAPI Error:? |\(|"code": ?)(\d{3})\b', re.IGNORECASE)
_REASONS = {401: Reason.AUTH, 403: Reason.AUTH, 404: Reason.MODEL, 402: Reason.QUOTA, 429: Reason.QUOTA}


def reason_of(message: str) -> Reason | None:
    """Why a model's provider refused, by the HTTP status that a complaint names."""
    found = _STATUS.search(message)
    return reason_of_status(int(found[1])) if found else None


def reason_of_status(status: object) -> Reason | None:
    return _REASONS.get(status) if isinstance(status, int) else None
