"""Strict JSON for files that others wrote: read within limits, and written with every character visible."""

from __future__ import annotations

import json
from math import isinf

MAX_DEPTH = 64  # levels of objects and lists
MAX_DIGITS = 308  # of a whole number: no float is larger


def read_object(content: bytes, name: str) -> dict[str, object]:
    """Read the object in a file called ``name``. Raises ``ValueError`` with a message for people."""
    try:
        document = json.loads(
            content,
            parse_constant=_no_number,
            parse_int=_integer,
            parse_float=_fraction,
            object_pairs_hook=_no_repeats,
        )
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeError:
        raise ValueError(f"{name} is not UTF-8, or holds half a character") from None
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{name} is not an object")  # noqa: TRY004  # a value of the file, not of a caller
    if _deeper(document, MAX_DEPTH):
        raise ValueError(f"{name} is nested too deeply")
    return document


def written(document: object) -> str:
    """Format indented JSON in which every character is visible: controls and direction marks are escapes."""
    return "".join(map(_visible, json.dumps(document, indent=2, ensure_ascii=False)))


def _visible(character: str) -> str:
    if character.isprintable() or character == "\n":
        return character
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[i] << 8 | units[i + 1]:04x}" for i in range(0, len(units), 2))


def _no_number(word: str) -> object:
    raise ValueError(f"`{word}` is not a number")


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError("it has a number that is too large")
    return int(digits)


def _fraction(digits: str) -> float:
    if isinf(value := float(digits)):
        raise ValueError("it has a number that is too large")
    return value


def _no_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{json.dumps(repeated[:60])} is twice in one object")
    return found


def _deeper(value: object, levels: int) -> bool:
    """Tell whether a JSON value is nested more than so many levels deep."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(levels == 0 or _deeper(each, levels - 1) for each in inner)
