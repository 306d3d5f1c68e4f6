"""Containers that run before it is known for whom, and what is shown in them later.

The tree of such a container follows a mount of ours, so what is mounted over a path of that is seen inside at once:
that is how protected paths come in. What is not in the tree lies in directories of the workspace that are shown from
the start, and empty until it is known for whom. Its guest knows its host by a nonce, and dials a socket whose
listening end goes from process to process; where nobody has that any more, the guest ends.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.core.model import Handle, Mount
from runner.guest.client import Guest
from runner.ports.provider import SandboxHandoff, SandboxSpec
from runner.safefs.safe_open import open_linkless
from runner.sandbox.cgroup import Group
from runner.sandbox.container_init import First
from runner.sandbox.docker_mounts import Cover, DaemonStage
from runner.sandbox.mounts import MountSource
from runner.sandbox.protected_paths import Guard, Kind
from runner.sandbox.sandbox_layout import EMPTY, PATHS


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
        self.wait_ended = first.wait_ended
        self._guest, self._stay, self._listener, self._words = guest, stay, listener, words

    async def ping(self) -> None:
        await self._guest.ping()

    def detach(self) -> SandboxHandoff:
        self._stay.stays = True
        return SandboxHandoff(self._words, (os.dup(self._listener.fileno()),))


@dataclass(frozen=True)
class Seat:
    """A container that was handed over; its first process is ``pid``, and its tree is mounted at ``tree``.

    ``descriptor`` is the socket that its guest dials, and whose has the seat. ``shown`` are the places, beside the
    workspace's own, at which it shows directories of the workspace.
    """

    descriptor: int
    container: str
    pid: int
    tree: str
    nonce: bytes
    groups: Mapping[str, str]
    toolchains: tuple[str, ...]
    shown: tuple[str, ...]

    @property
    def group(self) -> Group:
        """What keeps it within its limits, which takes longer to find than to be told."""
        return Group({controller: Path(directory) for controller, directory in self.groups.items()})

    def fits(self, handle: Handle, spec: SandboxSpec) -> bool:
        """Whether all that an opening asks for is there, or can be shown now; dependencies cannot."""
        here = {mount for mount in mounts_of(handle) if mount.target in self.shown}
        plain = SandboxSpec(protected=spec.protected, toolchains=self.toolchains, env=spec.env)
        return replace(spec, mounts=()) == plain and here.issuperset(spec.mounts)


def seat_of(handoff: SandboxHandoff) -> Seat:
    """What ``Idle`` has handed over. Raises ``KeyError``, ``TypeError``, ``ValueError`` for another version's."""
    words = dict(handoff.state)
    toolchains, shown = tuple(words.pop("toolchains")), tuple(words.pop("shown"))
    nonce = bytes.fromhex(words.pop("nonce"))
    (descriptor,) = handoff.descriptors
    return Seat(descriptor, nonce=nonce, toolchains=toolchains, shown=shown, **words)


def mounts_of(handle: Handle) -> tuple[Mount, ...]:
    """What a container shows whoever it will be for."""
    shown = {"incident": PATHS.incident, "skills": PATHS.skills, "kube": PATHS.kube}
    return tuple(Mount(handle.private / name, target) for name, target in shown.items())


@contextmanager
def open_tree(places: DaemonStage, seat: Seat) -> Iterator[int]:
    """The tree as the container has it, an ``O_PATH`` descriptor."""
    tree = places.open(MountSource(seat.tree))
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
