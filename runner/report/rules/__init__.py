"""Explanations of error codes: one text a room, ``ROOM.md``, one section a code.

A section is a sentence that says the rule, perhaps more, an example that breaks it and one that is right.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from runner.core.errors import UsageError, nearest

_SECTION = re.compile(r"^## (\S+)\n\n(.*?)\s*(?=^## |\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Rule:
    """Explanation of a code. ``text`` is Markdown, of which ``summary`` is the first paragraph in one line."""

    code: str
    summary: str
    text: str


@cache
def rules() -> dict[str, Rule]:
    """Return every rule by its code, sorted."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.md")):
        for code, text in _SECTION.findall(path.read_text(encoding="utf-8")):
            found[code] = Rule(code, " ".join(text.split("\n\n")[0].split()), text)
    return dict(sorted(found.items()))


def explain(code: str) -> str:
    """Explain a code to a person. Raises ``UsageError`` for an unknown one, with the nearest."""
    if code not in rules():
        hint = nearest(code, rules()) if "." in code else "`runner validate --explain list` shows every code"
        raise UsageError(f"`{code[:60]}` is not a code", hint=hint)
    return f"{code}\n\n{rules()[code].text}"


def listing() -> str:
    """Return every code with its meaning in a line."""
    width = max(map(len, rules()))
    return "\n".join(f"{rule.code:<{width}}  {rule.summary}" for rule in rules().values())
