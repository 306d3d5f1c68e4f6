"""Regular expressions of modules, each compiled when it is first used: a run uses few of those it imports."""

from __future__ import annotations

import re
from typing import AnyStr, Generic, cast


class _Later(Generic[AnyStr]):
    """Stand-in for a compiled pattern, whose methods it has once they were asked for."""

    def __init__(self, text: AnyStr, flags: int) -> None:
        self.pattern: AnyStr = text
        self._flags = flags

    def __getattr__(self, name: str) -> object:
        return self.__dict__.setdefault(name, getattr(re.compile(self.pattern, self._flags), name))


def pattern(text: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """Return what has the methods of the compiled pattern; functions of ``re`` do not take it."""
    return cast("re.Pattern[AnyStr]", _Later(text, flags))
