"""Wording of numbers and outcomes, the same in all reports."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Collection, Iterator

from runner.core.model import Isolation, Limits, Status, StopStage, Usage
from runner.core.plural import plural
from runner.core.settings import limit
from runner.events.events import CommandsReportedByAgent, ImagePullProgressed, StopStageReached

MARKS = {
    Status.PENDING: "·",
    Status.RUNNING: "▸",
    Status.SUCCEEDED: "✓",
    Status.FAILED: "✗",
    Status.SKIPPED: "-",
    Status.CANCELLED: "!",
    Status.UNKNOWN: "?",
    Status.LOST: "?",
}

_COMMAND = re.compile(r"`(?:env )?((?:[A-Za-z_]\w*=(?:'[^']*'|[^\s'])* )*)([^`]+)`")
_LONG = 80  # columns of a command in a sentence

_STOP_STAGES = {StopStage.TERM: "TERM", StopStage.KILL: "KILL", StopStage.SANDBOX: "sandbox killed"}


def brief(text: str) -> str:
    """Shorten a sentence, and drop from commands in backticks the environment that they set."""
    return _COMMAND.sub(lambda found: f"`{_shortened(found[2])}`", text)


def _shortened(command: str) -> str:
    return command if len(command) <= _LONG else f"{command[: _LONG - 3]}..."


def open_network(steps: Collection[str]) -> Iterator[str]:
    """Yield what is said before all else of a run whose steps may reach every public host."""
    if steps:
        yield f"NETWORK OPEN: {', '.join(steps)} may reach every public host"


def duration(seconds: float | None) -> str:
    """Format seconds as ``0.4s``, ``2m05s``, ``1h30m``; empty for ``None``."""
    if seconds is None:
        return ""
    return f"{seconds:.1f}s" if seconds < 10 or (seconds < 60 and seconds % 1) else limit(seconds)


def age(seconds: float) -> str:
    """Format a time ago in its largest unit: ``40s``, ``7m``, ``3h``, ``12d``."""
    for unit, of in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= of:
            return f"{seconds // of:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def commands(seen: CommandsReportedByAgent) -> str:
    """Format ``17 commands, 1 of them cut, 2 refused``: 17 ran; zeros are left out."""
    ran = seen.executed + seen.unfinished
    return f"{plural(ran, 'command')}{others(seen.denied, seen.unfinished)}"


def others(denied: int, cut: int) -> str:
    """Format what follows the number of commands that ran: those whose end nobody saw, and those that never started."""
    return f", {cut} of them cut" * bool(cut) + f", {denied} refused" * bool(denied)


def size(count: int) -> str:
    """Format bytes as ``512M``, ``1.5G``, with three significant figures at most."""
    number, unit = float(count), ""
    for larger in "KMGT":
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:.3g}{unit}"


def pull_line(pull: ImagePullProgressed) -> str:
    if pull.received_bytes == pull.expected_bytes:
        return f"pulled {pull.image}, {size(pull.received_bytes)}"
    return f"pulling {pull.image}: {size(pull.received_bytes)} of {size(pull.expected_bytes)}"


def limits(value: Limits) -> str:
    parts = []
    if value.cpus is not None:
        parts.append(f"{value.cpus:g} CPU")
    if value.memory_bytes is not None:
        parts.append(size(value.memory_bytes))
    if value.disk_bytes is not None:
        parts.append(f"disk {size(value.disk_bytes)}")
    if value.pids is not None:
        parts.append(f"{value.pids} pids")
    return ", ".join(parts) or "no limits"


def isolation(seen: Isolation) -> str:
    """Format what was read back from inside the sandbox, in one line."""
    return f"uid {seen.uid}, {sandbox(seen)}"


def sandbox(seen: Isolation) -> str:
    """Format the limits of commands."""
    if seen.interfaces is None:
        network = "network of the host"
    else:
        network = "no interface" if seen.interfaces in ((), ("lo",)) else f"interfaces {', '.join(seen.interfaces)}"
    shared = f", shares {', '.join(seen.shared_namespaces)} with the host" if seen.shared_namespaces else ""
    unfiltered = ", system calls not filtered" if seen.isolation and not seen.filtered else ""
    return f"{network}, {limits(seen.limits)}{shared}{unfiltered}"


def usage(used: Usage) -> str:
    """Format ``9 requests, 48.1k tokens (12k of them cached), $0.31``.

    An unknown price is left out; a model that was refused has ``nothing used``.
    """
    if used == Usage():
        return "nothing used"
    parts = [plural(used.requests, "request")] if used.requests else []
    cached = f" ({count(used.cached_tokens)} of them cached)" if used.cached_tokens else ""
    parts.append(f"{count(used.tokens)} tokens{cached}")
    if used.cost_usd is not None:
        parts.append(cost(used.cost_usd))
    return ", ".join(parts)


def cost(dollars: float) -> str:
    """Format ``$0.31``; less than a cent is not shown as free."""
    return f"${dollars:.2f}" if dollars >= 0.01 or not dollars else "less than $0.01"


def count(number: int) -> str:
    """Format ``512``, ``48.1k``, ``1.2M``, with three significant figures at most."""
    if number < 1000:
        return str(number)
    return f"{number / 1000:.3g}k" if number < 999_500 else f"{number / 1e6:.3g}M"


def stop_stage(reached: StopStageReached, left: float = 0.0) -> str:
    """Say what was done to end a command that has ``left`` seconds of its grace."""
    until = f", {math.ceil(left)}s until KILL" if left > 0 else ""
    return f"{_STOP_STAGES[reached.stage]} ({reached.reason.value}){until}"


def columns(text: str) -> int:
    """Count the columns that a terminal takes for printable text: East Asian characters take two, marks none."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def wrapped(text: str, room: int) -> Iterator[str]:
    """Wrap ``text`` to lines of at most ``room`` columns, at spaces, and inside a word only where necessary."""
    line, taken = "", 0
    for word in text.split(" "):
        wide = columns(word)
        if line and taken + 1 + wide > room:
            yield line
            line, taken = "", 0
        elif line:
            line, taken = line + " ", taken + 1
        while taken + wide > room and len(word) > 1:
            cut = 1
            while columns(word[: cut + 1]) <= room:
                cut += 1
            yield word[:cut]
            word, wide = word[cut:], columns(word[cut:])
        line, taken = line + word, taken + wide
    yield line
