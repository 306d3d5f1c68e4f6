"""Output of a triage script as readable text: no colours, nothing that a terminal obeys."""

from __future__ import annotations

import re
import unicodedata

from runner.core.patterns import pattern

SECONDS = 30.0  # how long the script may take: "execution is limited to 30 seconds timeout", says the triage document
MAX_BYTES = 192 << 10  # of the script's output that are kept from its beginning; ten times what a prompt takes
MAX_HEADLINE = 200  # characters

# Of a terminal's codes: CSI, then the strings (OSC, DCS, SOS, PM, APC) up to their end, then the short ones.
_CODES = pattern(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]{0,4096}(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]?"
)
_NEW_LINES = pattern("\r\n?|[\v\f\x1c-\x1e\x85\u2028\u2029]")
_BLANK = pattern(r"\n{3,}")
_RADIUS = pattern(r"^blast radius: (\S+)", re.MULTILINE)
_SYMPTOM = pattern(r"^1\. +(.+)$", re.MULTILINE)


def cleaned(output: bytes) -> str:
    """Reduce output to printable characters, tabs and line breaks, without blank lines at its ends.

    Invalid UTF-8 becomes U+FFFD. Marks that change the direction or hide characters are removed.
    """
    text = _NEW_LINES.sub("\n", _CODES.sub("", output.decode(errors="replace")))
    lines = "\n".join(line.rstrip() for line in "".join(filter(_shows, text)).split("\n"))
    return _BLANK.sub("\n\n", lines).strip("\n")


def _shows(character: str) -> bool:
    return character in ("\n", "\t") or unicodedata.category(character) not in ("Cc", "Cf", "Co", "Cn")


def headline(text: str) -> str:
    """Return the shortest summary of a report: its reach and first symptom, else its first line."""
    found = [" ".join(match[1].split()) for match in (_RADIUS.search(text), _SYMPTOM.search(text)) if match]
    line = "; ".join(found) or text.partition("\n")[0].strip()
    return line if len(line) <= MAX_HEADLINE else f"{line[: MAX_HEADLINE - 3]}..."
