"""Read a file, or list a directory."""

from __future__ import annotations

from io import BytesIO
from typing import Annotated

import trio
from msgspec import Meta, Struct

from runner.ops.tools._sandbox import SECONDS, Sandbox, place, run_script
from runner.ports.provider import Workspace
from runner.sandbox.container import GUEST

MOST = 256 << 10  # bytes that one call returns
_KEPT = MOST + 100
_SCRIPT = """
if [ -d "$1" ]; then enter "$1"; echo d; ls -1Ap | head -c "$2"; exit; fi
open_file "$1"
echo f
exec head -c "$2" <&3
"""
_PART = """
open_file "$1"
file=/proc/self/fd/3
echo "$(wc -c <$file)" "$(wc -l <$file)" "$(tail -c 1 $file | wc -l)"
tail -n "+$3" $file | head -n "$4" | head -c "$2"
"""


class Arguments(Struct, forbid_unknown_fields=True, kw_only=True):
    """A file or directory, and the lines to return."""

    file_path: Annotated[str, Meta(min_length=1, description="Relative to the workspace.")]
    offset: Annotated[int, Meta(ge=1, le=1 << 31, description="The first line to return, from 1.")] = 1
    limit: Annotated[int, Meta(ge=1, le=1 << 31, description="The number of lines; default: all.")] | None = None


class Result(Struct, kw_only=True):
    """Lines of a file, or the names in a directory, of which those of directories end with ``/``.

    At most 256 KiB are returned; ``truncated`` says that there is more from line ``next_offset`` on. A file that is not
    text has no content here.
    """

    content: str = ""
    is_dir: bool = False
    is_binary: bool = False
    file_size: int = 0
    total_lines: int = 0
    truncated: bool = False
    next_offset: int | None = None


async def call(sandbox: Sandbox, arguments: Arguments) -> Result:
    path, limit = arguments.file_path, arguments.limit or 1 << 31
    words = (place(path), str(MOST + 1))
    kind, _, body = await _beginning(sandbox.workspace, *words, path=path)
    if kind == b"d":
        return Result(is_dir=True, content=body[:MOST].decode(errors="replace"), truncated=len(body) > MOST)
    if len(body) > MOST:
        first, _, body = await _lines(sandbox.workspace, _PART, *words, str(arguments.offset), str(limit), path=path)
        size, breaks, ends = map(int, first.split())
    else:
        size, breaks, ends = len(body), body.count(b"\n"), body[-1:] == b"\n"
        body = b"".join(BytesIO(body).readlines()[arguments.offset - 1 :][:limit])
    total, more = breaks + (1 if size and not ends else 0), len(body) > MOST
    body = body[:MOST]
    if b"\0" in body or not _is_text(body):
        return Result(is_binary=True, file_size=size, total_lines=total)
    return Result(
        content=body.decode(errors="ignore"),
        file_size=size,
        total_lines=total,
        truncated=more,
        next_offset=arguments.offset + body.count(b"\n") if more else None,
    )


async def _beginning(workspace: Workspace, *words: str, path: str) -> tuple[bytes, bytes, bytes]:
    """Return a letter, and the beginning of a file or directory.

    The guest needs no shell for a file. Of what it does not show, and where it is not seen, the script says what it is.
    """
    with trio.move_on_after(SECONDS):
        done = await workspace.run([GUEST, "show", *words], keep_bytes=_KEPT)
        if done.exit.ok:
            return done.stdout.partition(b"\n")
    return await _lines(workspace, _SCRIPT, *words, path=path)


async def _lines(workspace: Workspace, script: str, *words: str, path: str) -> tuple[bytes, bytes, bytes]:
    """Return the first line that a script prints and the rest, which is what a file or directory has."""
    done = await run_script(workspace, script, *words, path=path, keep_bytes=_KEPT)
    return done.stdout.partition(b"\n")


def _is_text(body: bytes) -> bool:
    """Tell whether it is UTF-8, but for a character that was cut at the end."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return error.start >= len(body) - 3 and len(body) == MOST
    return True
