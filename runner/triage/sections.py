"""Sections of a report: what counts as a heading, which titles are the same, and what is empty.

The step that judges a report, the screen that shows it and the prompt that asks for it share these rules. The skill's
``validate_report.sh`` runs where there is no runner, and does the same in awk; a test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from runner.core.patterns import pattern

# What a report is asked to have, and without which it is none: a report may do without a timeline.
HEADINGS = (
    "Summary",
    "Root Cause",
    "Evidence",
    "Blast Radius",
    "Timeline",
    "Commands Executed",
    "Next Steps",
    "Unchecked",
)
SECTIONS = tuple(title for title in HEADINGS if title != "Timeline")
SYNONYMS = {"impact": "blast radius"}

_HEADING = pattern(r" {0,3}(#{1,6})[ \t]+(.*)")
_FENCE = pattern(r" {0,3}(```|~~~)")
_COMMENT = pattern(r"<!--[^>]*-->")
_CONTENT = pattern(r"[A-Za-z0-9]|[^\x00-\x7f]")
_NUMBER = pattern(r"^[0-9]+(\.[0-9]+)*[.):]? (- )?")


def known_as(title: str) -> str:
    """Normalise a title: without case, number, emphasis, closing marks and colon, and synonyms as their title."""
    words = re.sub(r"[ \t]+", " ", re.sub(r"[*_`]", "", title).rstrip(" \t#")).strip(" ").casefold()
    words = _NUMBER.sub("", words).removesuffix(":").rstrip(" ")
    return SYNONYMS.get(words, words)


def bodies_of(report: str) -> dict[str, str]:
    """Return the text below each heading, by ``known_as``, up to the next heading of its level or above.

    Text below deeper headings is part of it, those headings are not. Headings in fenced blocks are text.
    """
    bodies: dict[str, list[str]] = {}
    above: dict[int, str] = {}  # the headings that a line is below, by level
    fenced = False
    for line in report.replace("\r\n", "\n").split("\n"):
        fence = _FENCE.match(line)
        heading = None if fenced or fence else _HEADING.fullmatch(line)
        if heading is not None:
            level = len(heading[1])
            above = {other: title for other, title in above.items() if other < level}
            above[level] = known_as(heading[2])
            bodies.setdefault(above[level], [])
            continue
        fenced ^= fence is not None
        for title in set(above.values()):
            bodies[title].append(line)
    return {title: "\n".join(lines).strip() for title, lines in bodies.items()}


def is_empty(body: str) -> bool:
    """Tell whether a text has no letter or digit outside of comments and fence marks."""
    lines = (line for line in body.split("\n") if not _FENCE.match(line))
    return not any(_CONTENT.search(_COMMENT.sub("", line)) for line in lines)


def section(report: str, title: str) -> str:
    """Return the text of a section; empty when there is none."""
    return bodies_of(report).get(known_as(title), "")


def sections_of(report: str, wanted: Iterable[str]) -> tuple[str, ...]:
    """Return the wanted sections that a report has, and that are not empty."""
    bodies = bodies_of(report)
    return tuple(title for title in wanted if not is_empty(bodies.get(known_as(title), "")))
