"""Measure an answer while it passes: its tokens and its end, by the provider's own figures, or an estimate when it was
cut off.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from runner.gateway.api import Api, Counts, End

MAX_EVENT = 4 << 20  # bytes of one event, or of one answer that is no stream; nothing is read in a longer one
_SENT_BYTES = 4  # for an estimated token; prompts are a little below
_RECEIVED_BYTES = 8  # the same of what comes back; a stream has 50 and more for each, so this is no bargain


class Meter:
    """Reads the counts and the end of one answer from its pieces as they come; keeps at most one event of it."""

    def __init__(self, api: Api, *, stream: bool) -> None:
        self._api = api
        self._stream = stream
        self._rest = b""
        self._received = 0
        self._counts = Counts()
        self._complete = False
        self._marks = (b"usage", *api.marks)
        self._end: End | None = None
        self._passed_over = False  # an event that was too long to be read

    def feed(self, data: bytes) -> None:
        self._received += len(data)
        if not self._stream:
            self._keep(self._rest + data)
            return
        end = data.rfind(b"\n") + 1
        if not end:
            self._keep(self._rest + data)
            return
        lines = self._rest + data[:end]
        self._rest = data[end:]
        self._read_lines(lines)

    def end(self) -> End | None:
        """Return the end of an answer that sends nothing more; ``None`` when it stopped before its end."""
        self._read_rest()
        return End() if self._passed_over and self._end is None else self._end

    def counts(self, sent_bytes: int) -> tuple[Counts, bool]:
        """Return all counts, and whether they are estimated, for a request of so many bytes."""
        self._read_rest()
        if self._complete:
            return self._counts, False
        least = Counts(
            fresh=0 if self._counts.input else sent_bytes // _SENT_BYTES,
            output=self._received // _RECEIVED_BYTES,
        )
        return self._counts.largest(least), True

    def _keep(self, rest: bytes) -> None:
        self._passed_over = self._passed_over or len(rest) > MAX_EVENT
        self._rest = rest if len(rest) <= MAX_EVENT else b""

    def _read_rest(self) -> None:
        rest, self._rest = self._rest, b""
        if self._stream:
            self._read_lines(rest)
        else:
            self._read(rest)

    def _read_lines(self, lines: bytes) -> None:
        if not any(mark in lines for mark in self._marks):
            return
        for line in lines.split(b"\n"):
            if line.startswith(b"data:") and any(mark in line for mark in self._marks):
                self._read(line[5:])

    def _read(self, text: bytes) -> None:
        for message in _messages(text):
            if (end := self._api.end(message)) and (self._end is None or self._end.reason is None):
                self._end = end
            if found := self._api.counts(message):
                self._counts = self._counts.largest(found[0])
                self._complete = self._complete or found[1]


def _messages(text: bytes) -> Iterator[dict[str, Any]]:
    """Yield the objects of an event's data, or of an answer's body, which may be a list of them."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return
    for message in found if isinstance(found, list) else [found]:
        if isinstance(message, dict):
            yield message
