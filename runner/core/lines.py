"""Lines of a stream of bytes, of which none may take all memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable


async def lines(read: Callable[[], Awaitable[bytes]], most: int) -> AsyncGenerator[bytes | None]:
    """Yield each line that is not blank, ``None`` for one of more than ``most`` bytes, of which nothing is kept.

    ``read`` returns what there is, and nothing at the end.
    """
    line, over = bytearray(), False
    while chunk := await read():
        for number, piece in enumerate(chunk.split(b"\n")):
            if number:
                if line.strip() or over:
                    yield None if over else bytes(line)
                line, over = bytearray(), False
            line += piece
            if len(line) > most:
                line, over = bytearray(), True
