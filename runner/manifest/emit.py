"""Plain values as the text of a manifest: what ``load`` reads back as the same values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_PLAIN = re.compile(r"[A-Za-z_/.][\w/.-]*", re.ASCII)
_OTHERWISE = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n", ".inf", ".nan"})
_WIDEST = 100  # characters of a mapping on one line
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}

Value = str | bool | int | float | list["Value"] | Mapping[str, "Value"]


def emit(kind: str, name: str, spec: Mapping[str, Value]) -> str:
    """One document of this version of the format."""
    head: dict[str, Value] = {"apiVersion": "runner/v1", "kind": kind, "metadata": {"name": name}}
    return "\n".join(_block({**head, "spec": spec}, "")) + "\n"


def _block(mapping: Mapping[str, Value], indent: str) -> Iterator[str]:
    for key, value in mapping.items():
        if isinstance(value, Mapping) and not _fits(value):
            yield f"{indent}{_text(key)}:"
            yield from _block(value, indent + "  ")
        elif isinstance(value, str) and "\n" in value and _is_literal(value):
            chomped = "" if value.endswith("\n") else "-"
            yield f"{indent}{_text(key)}: |{chomped}"
            yield from (f"{indent}  {line}".rstrip() for line in value.removesuffix("\n").split("\n"))
        else:
            yield f"{indent}{_text(key)}: {_inline(value)}"


def _fits(mapping: Mapping[str, Value]) -> bool:
    """Tell whether a mapping is short enough for one line."""
    plain = not any(
        isinstance(value, Mapping) or (isinstance(value, str) and "\n" in value) for value in mapping.values()
    )
    return plain and len(_inline(mapping)) <= _WIDEST


def _inline(value: Value) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _text(value)
        case int() | float():
            return f"{value:g}" if isinstance(value, float) else str(value)
        case list():
            return f"[{', '.join(map(_inline, value))}]"
    return "{" + ", ".join(f"{_text(key)}: {_inline(inner)}" for key, inner in value.items()) + "}"


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _OTHERWISE:
        return text
    return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else _escape(c)) for c in text) + '"'


def _escape(character: str) -> str:
    number = ord(character)
    return f"\\u{number:04X}" if number < 0x10000 else f"\\U{number:08X}"


def _is_literal(text: str) -> bool:
    """Tell whether a text survives the literal block style."""
    lines = text.removesuffix("\n").split("\n")
    plain = all(line.isprintable() and line == line.rstrip(" ") for line in lines)
    return plain and bool(lines[0].strip()) and not lines[0].startswith(" ") and bool(lines[-1])
