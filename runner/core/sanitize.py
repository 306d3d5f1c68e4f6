"""Foreign text made fit for a terminal or a message: nothing in it moves a cursor, hides or goes on for pages."""

from __future__ import annotations


def sanitize(text: str, limit: int = 200) -> str:
    """Escape what a terminal obeys or does not show, and cut to ``limit`` characters."""
    safe = escape_unprintable(text[: limit + 1])
    return safe if len(safe) <= limit else f"{safe[: limit - 3]}..."


def excerpt(text: str, limit: int = 60) -> str:
    """Sanitize a value that a message quotes."""
    return sanitize(text, limit)


def escape_unprintable(text: str) -> str:
    """Escape every character that a terminal obeys or does not show, such as controls and direction marks."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_path(path: str | bytes) -> str:
    """Escape what is unprintable in a path, and its bytes that are not UTF-8."""
    raw = path if isinstance(path, bytes) else path.encode(errors="surrogateescape")
    return escape_unprintable(raw.decode(errors="backslashreplace"))
