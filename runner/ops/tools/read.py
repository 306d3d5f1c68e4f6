"""Read a file, or list a directory."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from runner.ops.tools._sandbox import OTHER_KIND, place, run_script
from runner.ports.provider import Workspace

MOST = 256 << 10  # bytes that one call returns
_SCRIPT = f"""
resolve "$1"
if [ -d "$at" ]; then echo d; cd "$at" && ls -1Ap | head -c "$4"; exit; fi
[ -f "$at" ] || exit {OTHER_KIND}
size=$(wc -c <"$at") || exit 1
echo f "$size" "$(wc -l <"$at")" "$(tail -c 1 "$at" | wc -l)"
tail -n "+$2" "$at" | head -n "$3" | head -c "$4"
"""


class Arguments(Struct, forbid_unknown_fields=True, kw_only=True):
    """A file or directory, and the lines to return."""

    file_path: Annotated[str, Meta(description="Relative to the workspace.")]
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


async def call(workspace: Workspace, arguments: Arguments) -> Result:
    limit = arguments.limit or 1 << 31
    words = (place(arguments.file_path), str(arguments.offset), str(limit), str(MOST))
    done = await run_script(workspace, _SCRIPT, *words, path=arguments.file_path, keep_bytes=MOST + 100)
    first, _, body = done.stdout.partition(b"\n")
    if first == b"d":
        return Result(is_dir=True, content=body.decode(errors="replace"), truncated=len(body) == MOST)
    size, lines, ends = map(int, first.split()[1:])
    total = lines + (1 if size and not ends else 0)
    if b"\0" in body or not _is_text(body):
        return Result(is_binary=True, file_size=size, total_lines=total)
    shown = body.count(b"\n")
    more = len(body) == MOST and arguments.offset + shown <= total
    return Result(
        content=body.decode(errors="ignore"),
        file_size=size,
        total_lines=total,
        truncated=more,
        next_offset=arguments.offset + shown if more else None,
    )


def _is_text(body: bytes) -> bool:
    """Tell whether it is UTF-8, but for a character that was cut at the end."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return error.start >= len(body) - 3 and len(body) == MOST
    return True
