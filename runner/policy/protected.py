"""The grammar of protected paths: plain names below a workspace's root that an agent can neither change nor make.

Whether such a path exists, or is a link, is seen when a provider attaches it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from runner.policy.paths import is_group

_PATH_BYTES = 1024
_PATTERN = frozenset("*?[]{}!\\")


def check_protected(text: str) -> str | None:
    """Return the fault of a protected path, to be read after its text; ``None`` when it is valid."""
    parts = text.removesuffix("/").split("/")
    complaints = {
        "is empty": not text,
        f"is longer than {_PATH_BYTES} bytes": len(text.encode(errors="surrogatepass")) > _PATH_BYTES,
        "starts with `/`: protected paths are relative to the workspace": text.startswith("/"),
        "has an empty, `.` or `..` part": any(part in ("", ".", "..") for part in parts),
        "is a pattern: protected paths are written out": not _PATTERN.isdisjoint(text) or is_group(text),
        "has a character that cannot be displayed": not text.isprintable(),
    }
    return next((words for words, holds in complaints.items() if holds), None)


def unite(paths: Iterable[str]) -> tuple[str, ...]:
    """Protected paths from several places as one sorted list, without those that lie below another.

    A trailing ``/`` stays, and wins over the same path without: it says what a missing path would be.
    """
    by_name = {path.removesuffix("/"): path for path in sorted(paths)}
    return tuple(path for name, path in sorted(by_name.items()) if not any(above in by_name for above in _above(name)))


def _above(name: str) -> Iterator[str]:
    """The directories that a path lies in, the outermost first."""
    return (name[:at] for at, character in enumerate(name) if character == "/")
