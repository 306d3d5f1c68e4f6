"""Split a sub-runner's line into words, reading Bash quoting and nothing else of Bash.

The line is data from a script, and its words are executed without a shell. Anything that Bash would expand, glob,
redirect or run is therefore an error, and never passed on as a literal: the author meant something by it. The output of
``printf %q`` is always accepted, in any locale.
"""

from __future__ import annotations

import re

from runner.core.errors import SubRunnerContract
from runner.core.patterns import pattern
from runner.core.sanitize import sanitize

_TOKEN = pattern(
    r"""
      (?P<blank>[ \t]+)
    | (?P<plain>[^\x00- \x7f\\'";&|<>()$`*?\[\]{}!]+)
    | \\(?P<escaped>[^\x00\n])
    | '(?P<single>[^'\x00\n]*)'
    | "(?P<double>(?:[^"\\$`\x00\n]|\\[^\x00\n])*)"
    | \$'(?P<ansi>(?:[^'\\\x00\n]|\\[^\x00\n])*)'
    """,
    re.VERBOSE,
)
_IN_DOUBLE_QUOTES = pattern(r'\\([\\"$`])')
_ANSI_PART = pattern(
    r"""
      (?P<text>[^\\]+)
    | \\ (?: (?P<letter>[ntrabEfv\\'"]) | (?P<octal>[0-7]{1,3}) | x(?P<hex>[0-9A-Fa-f]{1,2})
           | u(?P<short>[0-9A-Fa-f]{1,4}) | U(?P<long>[0-9A-Fa-f]{1,8}) )
    """,
    re.VERBOSE,
)
_LETTERS = {
    "n": b"\n", "t": b"\t", "r": b"\r", "a": b"\a", "b": b"\b", "E": b"\x1b", "f": b"\f", "v": b"\v",
    "\\": b"\\", "'": b"'", '"': b'"',
}  # fmt: skip

_ASSIGNMENT = pattern(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
_TILDE = pattern(r"[=:]~")
_MEANINGS = (
    (";&|()", "an operator"),
    ("<>", "a redirection"),
    ("$`", "an expansion"),
    ("*?[]", "a glob pattern"),
    ("{}", "a brace expansion"),
    ("!", "a history expansion or negation"),
    ("'\"", "a quote that is not closed, or holds an expansion"),
    ("\\", "an escape of nothing"),
)


def split(line: str) -> list[str]:
    """Split one line into words, as Bash would pass them to a command.

    Raises ``SubRunnerContract`` with the column (from 1, in characters) for anything but quoting, and for words that
    are not UTF-8 or contain NUL.
    """
    words: list[str] = []
    word: bytearray | None = None
    start = at = 0
    while at < len(line):
        token = _TOKEN.match(line, at)
        if token is None:
            raise _contract_error(at, f"`{sanitize(line[at])}` is {_meaning(line[at])}")
        if token.lastgroup == "blank":
            if word is not None:
                words.append(_text(word, start))
            word = None
        else:
            if word is None:
                word, start = bytearray(), at
                _check_start(token, first=not words)
            word += _unquote(token)
        at = token.end()
    if word is not None:
        words.append(_text(word, start))
    return words


def _check_start(token: re.Match[str], *, first: bool) -> None:
    plain = token["plain"] or ""
    if plain.startswith("#"):
        raise _contract_error(token.start(), "`#` starts a comment")
    if plain.startswith("~"):
        raise _contract_error(token.start(), "`~` is an expansion")
    if first and _ASSIGNMENT.match(plain):
        raise _contract_error(token.start(), "an assignment before the command is not a word")


def _unquote(token: re.Match[str]) -> bytes:
    match token.lastgroup:
        case "plain":
            if tilde := _TILDE.search(token[0]):
                raise _contract_error(token.start() + tilde.start() + 1, "`~` is an expansion")
            text = token[0]
        case "double":
            text = _IN_DOUBLE_QUOTES.sub(r"\1", token["double"])
        case "ansi":
            return _unescape(token)
        case kind:
            assert kind is not None  # every alternative of _TOKEN has a name
            text = token[kind]
    return _encoded(text, token.start())


def _unescape(token: re.Match[str]) -> bytes:
    """Return the bytes of ``$'...'``; octal and ``\\x`` escapes are bytes, which only together make characters."""
    at, end = token.span("ansi")
    found = bytearray()
    while at < end:
        part = _ANSI_PART.match(token.string, at, end)
        if part is None:
            raise _contract_error(
                at, f"`{sanitize(token.string[at : at + 2])}` is not an escape that `printf %q` writes"
            )
        found += _value(part)
        at = part.end()
    return bytes(found)


def _value(part: re.Match[str]) -> bytes:
    match part.lastgroup:
        case "text":
            return _encoded(part["text"], part.start())
        case "letter":
            return _LETTERS[part["letter"]]
        case "short" | "long" as group if int(part[group], 16) <= 0x10FFFF:
            return _encoded(chr(int(part[group], 16)), part.start())
        case "hex":
            return bytes([int(part["hex"], 16)])
        case "octal" if int(part["octal"], 8) <= 0xFF:
            return bytes([int(part["octal"], 8)])
    raise _contract_error(part.start(), f"`{part[0]}` is not a character")


def _encoded(text: str, at: int) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise _contract_error(at, "a lone surrogate is not text") from None


def _text(word: bytearray, start: int) -> str:
    if b"\0" in word:
        raise _contract_error(start, "the word holds NUL")
    try:
        return word.decode()
    except UnicodeDecodeError:
        raise _contract_error(start, "the word is not UTF-8") from None


def _meaning(character: str) -> str:
    return next((meaning for special, meaning in _MEANINGS if character in special), "a control character")


def _contract_error(at: int, what: str) -> SubRunnerContract:
    return SubRunnerContract(f"{what}, at column {at + 1} of the sub-runner's line", hint="emit it with `emit_command`")
