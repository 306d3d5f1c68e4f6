"""Replace a text in a file, which keeps its mode and its line ends."""

from __future__ import annotations

from secrets import token_hex
from typing import Annotated

from msgspec import Meta, Struct

from runner.core.errors import ToolArgument
from runner.core.sanitize import excerpt
from runner.ops.tools._sandbox import Sandbox, read_file, write_file

MOST = 16 << 20  # bytes of a file
_NAMED = 5  # lines that an error names


class Arguments(Struct, forbid_unknown_fields=True, kw_only=True):
    """A file, a text in it, and the text to put in its place."""

    file_path: Annotated[str, Meta(min_length=1, description="Relative to the workspace.")]
    old_string: Annotated[str, Meta(min_length=1, description="The text as the file has it, once.")]
    new_string: Annotated[str, Meta(description="The text in its place.")]
    replace_all: Annotated[bool, Meta(description="Replaces it wherever it is.")] = False


class Result(Struct, kw_only=True):
    """Number of places that were changed, and the lines where they began."""

    file_path: str
    replacements: int
    lines: list[int]


async def call(sandbox: Sandbox, arguments: Arguments) -> Result:
    before, state = await read_file(sandbox.workspace, arguments.file_path, MOST)
    after, lines = edited(before, arguments)
    await write_file(sandbox.workspace, arguments.file_path, after, f".{token_hex(8)}.part", state=state)
    return Result(file_path=arguments.file_path, replacements=len(lines), lines=lines)


def edited(before: bytes, arguments: Arguments) -> tuple[bytes, list[int]]:
    """Return a file's new content and the lines that changed. Raises ``ToolArgument``."""
    old, new = arguments.old_string.encode(errors="replace"), arguments.new_string.encode(errors="replace")
    if old not in before and b"\r\n" in before:
        old, new = (text.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n") for text in (old, new))
    name, count = excerpt(arguments.file_path), before.count(old)
    if old == new:
        raise ToolArgument("the old and the new text are the same")
    if not count:
        hint = "read the file: spaces and line breaks count"
        raise ToolArgument(f"`{name}` does not have the old text", hint=hint)
    lines, at = [], before.find(old)
    while at >= 0:
        lines.append(before.count(b"\n", 0, at) + 1)
        at = before.find(old, at + len(old))
    if count > 1 and not arguments.replace_all:
        where = ", ".join(map(str, lines[:_NAMED])) + (", ..." if count > _NAMED else "")
        hint = "add lines around it until it is there once, or set replace_all"
        raise ToolArgument(f"`{name}` has the old text {count} times, in lines {where}", hint=hint)
    return before.replace(old, new), lines
