"""Containers that run before it is known for whom, and what is shown in them later.

The tree of such a container follows a mount of ours, so what is mounted over a path of that is seen inside at once:
that is how protected paths come in. Its guest knows its host by a nonce, and dials a socket whose listening end goes
from process to process; where nobody has that any more, the guest ends.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.guest.client import Guest
from runner.model import Handle, Mount
from runner.ports.provider import Opening, Passed
from runner.providers._cgroup import Group
from runner.providers._first import First
from runner.providers._handed import Cover, Handed
from runner.providers._mounts import Place, open_linkless
from runner.providers._protected import Guard, Kind
from runner.providers._shown import EMPTY, PATHS


@dataclass
class Stay:
    """``late``: a container can be shown more while it runs. ``stays``: it does not end with what has started it."""

    late: bool = False
    stays: bool = False


class Idle:
    """A container in which nothing runs; ``listener`` is what its guest dials, and ``words`` are those of ``Seat``."""

    def __init__(
        self, stay: Stay, guest: Guest, first: First, listener: socket.socket, words: Mapping[str, Any]
    ) -> None:
        self.ended = first.ended
        self._guest, self._stay, self._listener, self._words = guest, stay, listener, words

    async def ping(self) -> None:
        await self._guest.ping()

    def hand_over(self) -> Passed:
        self._stay.stays = True
        return Passed(self._words, (os.dup(self._listener.fileno()),))


@dataclass(frozen=True)
class Seat:
    """A container that was handed over; its first process is ``pid``, and its tree is mounted at ``tree``.

    ``descriptor`` is the socket that its guest dials, and whose has the seat.
    """

    descriptor: int
    container: str
    pid: int
    tree: str
    nonce: bytes
    groups: Mapping[str, str]
    toolchains: tuple[str, ...]

    @property
    def group(self) -> Group:
        """What keeps it within its limits, which takes longer to find than to be told."""
        return Group({controller: Path(directory) for controller, directory in self.groups.items()})

    def fits(self, handle: Handle, opening: Opening) -> bool:
        """Whether all that an opening asks for is there, or can be shown now."""
        shown = Opening(protected=opening.protected, toolchains=self.toolchains, env=opening.env)
        return opening in (shown, _with_incident(handle, shown))


def seat_of(passed: Passed) -> Seat:
    """What ``Idle`` has handed over. Raises ``KeyError``, ``TypeError``, ``ValueError`` for another version's."""
    words = dict(passed.words)
    nonce, toolchains = bytes.fromhex(words.pop("nonce")), tuple(words.pop("toolchains"))
    (descriptor,) = passed.descriptors
    return Seat(descriptor, nonce=nonce, toolchains=toolchains, **words)


def opening_of(handle: Handle, toolchains: Sequence[str]) -> Opening:
    """What a container shows whoever it will be for; the incident is empty until then, and for those without one."""
    return _with_incident(handle, Opening(toolchains=tuple(toolchains)))


def _with_incident(handle: Handle, opening: Opening) -> Opening:
    return Opening((incident(handle),), opening.protected, opening.toolchains, opening.env)


def incident(handle: Handle) -> Mount:
    return Mount(handle.private / "incident", PATHS.incident)


@contextmanager
def open_tree(places: Handed, seat: Seat) -> Iterator[int]:
    """The tree as the container has it, an ``O_PATH`` descriptor."""
    tree = places.open(Place(seat.tree, "bind", seat.tree))
    try:
        yield tree
    finally:
        os.close(tree)


def covers(private: Path, guards: Iterable[Guard]) -> list[Cover]:
    """What is to be mounted over the tree, outermost first; the descriptors are whose list this is."""
    return [
        Cover(
            guard.path,
            open_linkless(private / "system" / EMPTY[guard.kind]) if guard.kind in EMPTY else os.dup(guard.source),
            writable=guard.kind is Kind.ANCESTOR,
        )
        for guard in guards
    ]
