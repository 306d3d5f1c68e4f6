"""Match ignore rules as git does, for a walk from the top down."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dulwich.ignore import Pattern


class IgnoreRules:
    """The rules of ignore files; ``read`` returns the text of a directory's file, ``None`` when there is none.

    ``extra`` is read first at the top, as git does with ``info/exclude``.
    """

    def __init__(self, read: Callable[[bytes], bytes | None], *, extra: bytes = b"") -> None:
        self._read = read
        self._extra = extra
        self._chain = cache(self._climb)

    def _climb(self, folder: bytes) -> tuple[tuple[int, list[Pattern]], ...]:
        """List the patterns that apply in a folder, the strongest first, each list with the offset at which its paths
        begin.
        """
        text = (b"" if folder else self._extra + b"\n") + (self._read(folder) or b"")
        above = self._chain(folder.rpartition(b"/")[0]) if folder else ()
        if not text.strip():
            return above
        from dulwich.ignore import IgnoreFilter, read_ignore_patterns  # which most trees can do without

        filter = IgnoreFilter(read_ignore_patterns(BytesIO(text)))
        here = ((len(folder) + 1 if folder else 0, list(reversed(filter.patterns))),)
        return here + above if filter.patterns else above

    def __call__(self, path: bytes, *, directory: bool) -> bool:
        for start, patterns in self._chain(path.rpartition(b"/")[0]):
            for pattern in patterns:
                if pattern.matches(path[start:], directory):
                    return bool(pattern.is_exclude)
        return False
