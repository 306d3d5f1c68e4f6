"""Findings for people, with the source line and a caret under the value, and for programs as JSON.

All of it comes from files that others wrote: control, format and direction characters are escaped, tabs become spaces,
long lines a window around the value, and columns are counted as a terminal draws them, where East Asian characters take
two.
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.core.errors import Place, RunnerError, in_order
from runner.core.patterns import pattern
from runner.core.sanitize import excerpt
from runner.report.format import columns

COLUMNS = 160  # of a shown source line, gutter and all
MESSAGE = 4096  # characters of a message or hint
TAB = 4
_CUT = "..."
_USERINFO = pattern(r"(?<=://)[^\s/@'\"]+@")  # which may hold a password

_RESET, _BOLD, _RED, _YELLOW, _BLUE = "\x1b[0m", "\x1b[1m", "\x1b[1;31m", "\x1b[1;33m", "\x1b[34m"


def render(findings: Sequence[RunnerError], *, colour: bool = False) -> str:
    """Render all findings in the order of their places, with blank lines between and no final line break."""
    return "\n\n".join(_finding(finding, colour) for finding in in_order(findings))


def as_json(finding: RunnerError) -> dict[str, object]:
    """Convert a finding to plain JSON. Lines and columns count from 1, columns in characters."""
    return {
        "severity": finding.severity,
        "code": finding.code,
        "message": excerpt(finding.message, MESSAGE),
        "at": _place(finding.at) if finding.at else None,
        "also": [_place(place) for place in finding.also],
        "hint": excerpt(finding.hint, MESSAGE) if finding.hint else None,
    }


def _place(place: Place) -> dict[str, object]:
    return {"file": excerpt(place.file, MESSAGE), "line": place.line, "column": place.column, "width": place.width}


def _finding(finding: RunnerError, colour: bool) -> str:
    mark = _RED if finding.severity == "error" else _YELLOW
    paint = _painted if colour else _plain
    title = paint(f"{finding.severity}[{finding.code}]", mark)
    lines = [f"{title}: {paint(excerpt(finding.message, MESSAGE), _BOLD)}"]
    places = [finding.at, *finding.also] if finding.at else []
    gutter = " " * max((len(str(place.line)) for place in places), default=1)
    for place in places:
        at = f"{excerpt(place.file, MESSAGE)}:{place.line}:{place.column}"
        lines.append(f"{gutter}{paint('-->', _BLUE)} {at}")
        if place.text:
            place = place._replace(text=_USERINFO.sub(lambda found: "*" * len(found[0]), place.text))
            source, indent, carets = _snippet(place, COLUMNS - len(gutter) - 3)
            lines.append(f"{gutter} {paint('|', _BLUE)}")
            lines.append(f"{paint(f'{place.line:>{len(gutter)}} |', _BLUE)} {source}".rstrip())
            lines.append(f"{gutter} {paint('|', _BLUE)} {indent}{paint(carets, mark)}")
    if finding.hint:
        lines.append(f"{gutter} {paint('=', _BLUE)} hint: {excerpt(finding.hint, MESSAGE)}")
    return "\n".join(lines)


def _painted(text: str, code: str) -> str:
    return f"{code}{text}{_RESET}"


def _plain(text: str, code: str) -> str:
    return text


def _snippet(place: Place, room: int) -> tuple[str, str, str]:
    """Return a source line of at most ``room`` columns, the space up to the value, and the carets below it."""
    value = place.column - 1
    start = max(0, value - room)
    cells = [_cell(character) for character in place.text[start : value + room]]
    widths = [columns(cell) for cell in cells]
    value -= start
    head, tail = 0, len(cells)
    if start or start + tail < len(place.text) or sum(widths) > room:
        head = value
        while head and sum(widths[head - 1 : value]) <= room // 3:
            head -= 1
        tail = head
        while tail < len(cells) and sum(widths[head : tail + 1]) <= room - 2 * len(_CUT):
            tail += 1
    before = _CUT if start + head else ""
    after = _CUT if start + tail < len(place.text) else ""
    indent = len(before) + sum(widths[head:value])
    carets = sum(widths[value : min(value + place.width, tail)])
    return f"{before}{''.join(cells[head:tail])}{after}", " " * indent, "^" * max(1, carets)


def _cell(character: str) -> str:
    return " " * TAB if character == "\t" else excerpt(character)
