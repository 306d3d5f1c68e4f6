"""Answers that are read from files piece by piece, so that their size costs no memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from functools import partial
from itertools import islice
from typing import Any
from urllib.parse import quote

import trio

_PIECES = 64  # that are read in one hop to a thread


class PieceStream:
    """The answer that sends pieces of a text or file; ``name`` makes it one that browsers save and never show."""

    def __init__(self, pieces: Iterator[bytes], *, name: str | None = None) -> None:
        self._pieces, self._name = pieces, name

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ) -> None:
        kind = b"text/plain; charset=utf-8" if self._name is None else b"application/octet-stream"
        headers = [(b"content-type", kind), (b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
        if self._name is not None:
            saved = f"attachment; filename*=UTF-8''{quote(self._name.rpartition('/')[2], safe='')}"
            headers.append((b"content-disposition", saved.encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while some := await trio.to_thread.run_sync(partial(_take, self._pieces)):
            await send({"type": "http.response.body", "body": some, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _take(pieces: Iterator[bytes]) -> bytes:
    return b"".join(islice(pieces, _PIECES))
