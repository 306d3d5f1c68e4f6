"""Write a whole file."""

from __future__ import annotations

from secrets import token_hex
from typing import Annotated

from msgspec import Meta, Struct

from runner.ops.tools._sandbox import Sandbox, write_file


class Arguments(Struct, forbid_unknown_fields=True, kw_only=True):
    """A file and its content."""

    file_path: Annotated[str, Meta(min_length=1, description="Relative to the workspace; directories are made.")]
    content: Annotated[str, Meta(description="All of its new content.")]


class Result(Struct, kw_only=True):
    """The file that was written; ``file_size`` in bytes."""

    file_path: str
    file_size: int


async def call(sandbox: Sandbox, arguments: Arguments) -> Result:
    content = arguments.content.encode(errors="replace")
    await write_file(sandbox.workspace, arguments.file_path, content, f".{token_hex(8)}.part")
    return Result(file_path=arguments.file_path, file_size=len(content))
