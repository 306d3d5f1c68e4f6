"""Find lines by an extended regular expression."""

from __future__ import annotations

import posixpath
import re
from typing import Annotated

from msgspec import Meta, Struct

from runner.core.errors import ToolArgument, ToolFailed
from runner.core.sanitize import excerpt
from runner.ops.tools._sandbox import Sandbox, place, run_script

MOST = 1000  # lines that one call returns
_LONGEST = 500  # characters of a line
_LOOKED = 4 << 20  # bytes of matches that are looked at
_SCRIPT = f"""
grep -E -e "$2" </dev/null
[ $? -le 1 ] || {{ echo "$?"; exit 0; }}
look() {{
    grep "$@"
    echo "$?" >&2
}}
if [ -d "$1" ]; then
    enter "$1"
    if grep --version 2>/dev/null | grep -q GNU; then
        echo nul
        look -rnIEZ --include="$3" --exclude=.git --exclude-dir=.git -e "$2" . | head -c {_LOOKED}
    else
        echo colon
        find . -name .git -prune -o -type f -name "$3" -exec grep -HnIE -e "$2" -- {{}} + | head -c {_LOOKED}
    fi
else
    open_file "$1"
    echo none
    case ${{1##*/}} in $3) look -nIE -e "$2" <&3 | head -c {_LOOKED} ;; esac
fi
"""
_FORMS = {  # of a line, by what ends the name of its file: GNU's grep knows that names may have colons and line breaks
    b"nul": re.compile(rb"([^\0]+)\0(\d+):(.*)\n?"),
    b"colon": re.compile(rb"(.+?):(\d+):(.*)"),
    b"none": re.compile(rb"()(\d+):(.*)"),
}
_SIGNAL = 128  # what the status of a program exceeds that a signal has ended
_PIPE = 141  # the status of one whose reader has had enough


class Arguments(Struct, forbid_unknown_fields=True, kw_only=True):
    """An expression, and the files to look in."""

    pattern: Annotated[str, Meta(min_length=1, max_length=1000, description="An extended regular expression.")]
    path: Annotated[str, Meta(description="A file or directory, relative to the workspace.")] = "."
    include: Annotated[str, Meta(min_length=1, max_length=200, description="Names of files, such as `*.py`.")] = "*"


class Match(Struct, kw_only=True):
    """A line of a file, cut after 500 characters."""

    file_path: str
    line_number: int
    line: str


class Result(Struct, kw_only=True):
    """Lines in the order of their files; ``truncated`` says that there are more. Binary files are left out."""

    matches: list[Match]
    truncated: bool


async def call(sandbox: Sandbox, arguments: Arguments) -> Result:
    root = place(arguments.path)
    words = (root, arguments.pattern, arguments.include)
    done = await run_script(sandbox.workspace, _SCRIPT, *words, path=arguments.path, keep_bytes=_LOOKED + 10)
    first, _, body = done.stdout.partition(b"\n")
    said = done.stderr.decode(errors="replace").strip()
    if first not in _FORMS:
        raise ToolArgument(f"`{excerpt(arguments.pattern)}` is not an expression", hint=excerpt(said))
    status = said.rpartition("\n")[2]
    if status.isdecimal() and int(status) > _SIGNAL and int(status) != _PIPE:
        message = f"the search for `{excerpt(arguments.pattern)}` was ended by signal {int(status) - _SIGNAL}"
        raise ToolFailed(message, hint="name fewer files, or other ones: a long line takes as much memory")
    lines = _FORMS[first].findall(body)
    matches = [_match(root, *found) for found in lines[:MOST]]
    matches.sort(key=lambda one: (one.file_path, one.line_number))
    return Result(matches=matches, truncated=len(lines) > MOST or len(body) >= _LOOKED)


def _match(root: str, path: bytes, number: bytes, line: bytes) -> Match:
    text = line.decode(errors="replace")[:_LONGEST]
    name = posixpath.normpath(posixpath.join(root, path.decode(errors="replace")))
    return Match(file_path=name, line_number=int(number), line=text)
