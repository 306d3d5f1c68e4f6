"""The parts that all CLIs with a model share: reading their stream of JSON lines, and the outcome that it adds up to.
Each CLI's module interprets its lines; a damaged line, or one of an unknown kind, is skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from msgspec import Struct

from runner.core.last_line import last_line, tail
from runner.core.model import Command, CommandStatus, Exit, Outcome, Reason, Status, Usage, failed, succeeded
from runner.core.patterns import pattern
from runner.core.plural import plural
from runner.core.sanitize import sanitize
from runner.ports.agent import AgentResult, AgentSetup, ModelAccess
from runner.ports.gateway import Api

Line = Mapping[str, Any]

MCP_MARGIN = 10.0  # seconds that a CLI waits for an MCP server beyond those of the bridge, whose word is the clearer
MAX_LINE = 16 << 20  # bytes of a line that is looked at
_NOT_FOUND = 127  # what a shell says of a command that there is none of


class TurnState(Struct, frozen=True, kw_only=True):
    """The progress of a CLI's work by its stream: whether the last turn is ``under_way``, was ``finished``, or why it
    failed.

    ``said`` is its last message, or its error. ``denied`` counts the tool calls that the CLI's own rules refused,
    ``used`` those that ran.
    """

    under_way: bool = False
    finished: bool = False
    reason: Reason | None = None
    said: str = ""
    denied: int = 0
    used: int = 0
    usage: Usage | None = None


class CommandLog(Struct):
    """The shell commands of a stream in the order in which they were asked for; cut off until their end is told."""

    _asked: dict[str, Command] = {}

    def ask(self, id: str, text: str) -> None:
        self._asked.setdefault(id, Command(text, status=CommandStatus.UNFINISHED))

    def end(self, id: str, exit: object = None, status: CommandStatus = CommandStatus.EXECUTED) -> None:
        """Set the end of a command; ``exit`` is the stream's value, which counts if it is an exit status."""
        if id in self._asked:
            code = exit if isinstance(exit, int) and not isinstance(exit, bool) else None
            self._asked[id] = Command(self._asked[id].text, code, status)

    def all(self) -> tuple[Command, ...]:
        return tuple(self._asked.values())


class CliAgent(Struct, frozen=True, kw_only=True):
    """An agent CLI.

    ``read_turn`` makes a ``TurnState`` of the lines of standard output, ``read_commands`` lists the commands in them,
    and ``display_line`` is ``Agent.display`` of such a line. ``transcript`` matches the paths in the home directory
    that are kept. ``exit_reasons`` are for exit statuses when its stream has no reason; an error line that ``noise``
    matches is skipped. The rest is as in ``ModelAgent``.
    """

    program: str
    api: Api
    set_up: Callable[[ModelAccess], AgentSetup]
    read_turn: Callable[[Iterable[Line]], TurnState]
    package: str
    display_line: Callable[[Line], str | None]
    read_commands: Callable[[Iterable[Line]], tuple[Command, ...]]
    transcript: re.Pattern[str]
    autorun_paths: tuple[str, ...] = ()
    exit_reasons: Mapping[int, Reason] = {}
    noise: re.Pattern[bytes] | None = None
    tools: tuple[str, ...] = ()
    writers: tuple[str, ...] = ()
    native_names: Mapping[str, str] = {}
    variables: tuple[str, ...] = ()
    model_variable: str | None = None
    image_files: Mapping[str, str] = {}

    def display(self, line: str) -> str | None:
        value = line_of(line.encode())
        return f"\n{line}\n" if value is None else self.display_line(value)

    def usage(self, result: AgentResult) -> Usage | None:
        return self.read_turn(lines(result.stdout)).usage

    def commands(self, result: AgentResult) -> tuple[Command, ...]:
        return self.read_commands(lines(result.stdout))

    def last_message(self, result: AgentResult) -> str:
        words, acted = "", False
        for line in lines(result.stdout):
            if not (text := self.display_line(line)):
                continue
            pieces = text.strip("\n").split("\n")
            said = list(takewhile(_is_model_text, pieces))
            if any(said):
                words = ("" if acted or text.startswith("\n") else words) + "\n".join(said)
            acted = len(said) < len(pieces)
        return " ".join(words.split())

    def is_transcript(self, path: str) -> bool:
        return self.transcript.fullmatch(path) is not None

    def outcome(self, result: AgentResult) -> Outcome:
        """Return the outcome: only a completed turn is a success, whatever the exit status."""
        exit = result.exit
        if exit.oom:
            return failed(Reason.OOM, str(exit))
        if exit.code == _NOT_FOUND:
            return failed(
                Reason.EXIT,
                f"`{self.program}` is not in the workspace",
                details=("hint: name the directory that has it in `bin` in workspace.toolchains, or an image with it",),
            )
        turn = self.read_turn(lines(result.stdout))
        if turn.finished and exit.ok:
            return _success(turn)
        said = sanitize(turn.said) or self._complaint(result.stderr)
        reason = turn.reason or self.exit_reasons.get(exit.code or 0)
        if reason is not None:
            return failed(reason, said)
        return _failure(turn, exit, said)

    def _complaint(self, stderr: Path) -> str:
        lines = tail(stderr).strip().split(b"\n")
        return last_line(b"\n".join(line for line in lines if self.noise is None or not self.noise.search(line)))


def _is_model_text(line: str) -> bool:
    """Tell whether a displayed line is of the model's words, and not a command, a tool, or an error."""
    return not line.startswith(("$ ", "[", "! "))


def _success(turn: TurnState) -> Outcome:
    refused = f"{plural(turn.denied, 'tool call')} refused by the CLI's own rules"
    if turn.denied and not turn.used:
        return failed(Reason.DENIED, f"{refused}, and none let through")
    return succeeded(sanitize(turn.said), warnings=(refused,) if turn.denied else ())


def _failure(turn: TurnState, exit: Exit, said: str) -> Outcome:
    if exit.code is None and exit.signal is None:
        return Outcome(status=Status.UNKNOWN, reason=Reason.UNKNOWN, message=f"{exit}: {said}" if said else str(exit))
    if exit.ok:
        return failed(Reason.NO_EVIDENCE, "exited 0 without a completed turn" + (f": {said}" if said else ""))
    message = f"{exit}: {said}" if said else str(exit)
    return failed(Reason.CUT_OFF if turn.under_way else Reason.EXIT, message)


def lines(path: Path) -> Iterator[Line]:
    """Yield the JSON objects of a file, one a line; anything else is skipped."""
    with path.open("rb") as stream:
        while raw := stream.readline(MAX_LINE):
            if (value := line_of(raw)) is not None:
                yield value


def line_of(raw: bytes) -> Line | None:
    """Return the JSON object of a line; ``None`` when it is not one."""
    if not raw.startswith(b"{"):
        return None
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def at(value: object, *keys: str) -> Any:
    """Return the value below ``keys`` in nested objects; ``None`` where there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def items(value: object, *keys: str) -> list[Any]:
    """Return the list below ``keys``; empty when there is none."""
    found = at(value, *keys)
    return found if isinstance(found, list) else []


def text(value: object, *keys: str) -> str:
    found = at(value, *keys)
    return found if isinstance(found, str) else ""


def count(value: object, *keys: str) -> int:
    found = at(value, *keys)
    return found if isinstance(found, int) and found >= 0 else 0


_STATUS = pattern(r'(?:\bstatus:? |\bAPI Error:? |\(|"code": ?)(\d{3})\b', re.IGNORECASE)
_REASONS = {401: Reason.AUTH, 403: Reason.AUTH, 404: Reason.MODEL, 402: Reason.QUOTA, 429: Reason.QUOTA}


def reason_of(message: str) -> Reason | None:
    """Return the reason of a provider's error by the HTTP status that a message names."""
    found = _STATUS.search(message)
    return reason_of_status(int(found[1])) if found else None


def reason_of_status(status: object) -> Reason | None:
    if isinstance(status, int) and 500 <= status <= 599:
        return Reason.GATEWAY
    return _REASONS.get(status) if isinstance(status, int) else None
