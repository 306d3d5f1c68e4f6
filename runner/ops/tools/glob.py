"""Find files by their names."""

from __future__ import annotations

import posixpath
import re
from fnmatch import translate
from functools import cache
from typing import Annotated

from msgspec import Meta, Struct

from runner.ops.tools._sandbox import Sandbox, place, run_script

MOST = 1000  # names that one call returns
_LOOKED = 16 << 20  # bytes of names that are looked at
_SCRIPT = """
enter "$1"
find . -name .git -prune -o '(' -type f -o -type l ')' -print0
"""


class Arguments(Struct, forbid_unknown_fields=True, kw_only=True):
    """A pattern, and the directory that it starts from."""

    pattern: Annotated[
        str, Meta(min_length=1, max_length=1000, description="`*`, `?` and `[...]` in a name, `**` for directories.")
    ]
    path: Annotated[str, Meta(description="A directory, relative to the workspace.")] = "."


class Result(Struct, kw_only=True):
    """Paths relative to the workspace, in order; ``count`` is how many there are, of which 1,000 are returned.

    ``truncated`` says that some are missing. Directories named ``.git`` are left out.
    """

    matches: list[str]
    count: int
    truncated: bool


async def call(sandbox: Sandbox, arguments: Arguments) -> Result:
    root = place(arguments.path)
    done = await run_script(sandbox.workspace, _SCRIPT, root, path=arguments.path, keep_bytes=_LOOKED)
    names = [name.removeprefix("./") for name in done.stdout.decode(errors="replace").split("\0") if name]
    found = sorted(filter(Pattern(arguments.pattern).matches, names))
    matches = [posixpath.normpath(posixpath.join(root, name)) for name in found[:MOST]]
    return Result(matches=matches, count=len(found), truncated=done.cut or len(found) > MOST)


class Pattern:
    """A pattern whose matching takes time that grows with its length times that of the path, whatever it holds."""

    def __init__(self, text: str) -> None:
        self._parts = [None if part == "**" else _compiled(part) for part in text.removeprefix("./").split("/")]

    def matches(self, path: str) -> bool:
        """Tell whether a path matches; ``**`` stands for any number of directories, also none."""
        reached = self._skipped({0})
        for name in path.split("/"):
            after = set()
            for at in reached:
                part = self._parts[at] if at < len(self._parts) else _NEVER
                if part is None:
                    after.add(at)
                elif part.match(name):
                    after.add(at + 1)
            reached = self._skipped(after)
        return len(self._parts) in reached

    def _skipped(self, reached: set[int]) -> set[int]:
        """Add the places after a ``**`` that stands for nothing."""
        for at, part in enumerate(self._parts):
            if at in reached and part is None:
                reached.add(at + 1)
        return reached


_NEVER = re.compile(r"(?!)")


@cache
def _compiled(part: str) -> re.Pattern[str]:
    return re.compile(translate(part))  # in atomic groups: no pattern takes long
