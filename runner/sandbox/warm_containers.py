"""Containers of a warm pool: started before their workspace is known, detached, and taken over by another process.

The tree of such a container receives the mounts that are made on the host later: that is how protected paths come in.
Everything else lies in directories of the workspace that are mounted from the start, and empty until it is known. The
guest knows its host by a nonce, and dials a socket whose listening end passes from process to process; the guest ends
when nobody holds that end any more.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from runner.core.model import Handle, Mount
from runner.guest.client import Guest
from runner.ports.provider import SandboxHandoff, SandboxSpec
from runner.safefs.safe_open import open_linkless
from runner.sandbox.cgroup import ControlGroups
from runner.sandbox.container_init import InitProcess
from runner.sandbox.docker_mounts import Cover, DaemonStage
from runner.sandbox.mounts import MountSource
from runner.sandbox.protected_paths import Guard, Kind
from runner.sandbox.sandbox_layout import EMPTY, PATHS


@dataclass
class DetachState:
    """``extensible``: mounts can be added while the container runs. ``detached``: it outlives who started it."""

    extensible: bool = False
    detached: bool = False


class WarmContainer:
    """A ``Slot``. Its guest dials ``listener``; ``fields`` are those of ``HandedOffContainer``."""

    def __init__(
        self, state: DetachState, guest: Guest, init: InitProcess, listener: socket.socket, fields: Mapping[str, Any]
    ) -> None:
        self.wait_ended = init.wait_ended
        self._guest, self._state, self._listener, self._fields = guest, state, listener, fields

    async def ping(self) -> None:
        await self._guest.ping()

    def detach(self) -> SandboxHandoff:
        self._state.detached = True
        return SandboxHandoff(self._fields, (os.dup(self._listener.fileno()),))


@dataclass(frozen=True)
class HandedOffContainer:
    """A container that another process has detached; its first process is ``pid``, its tree is mounted at ``tree``.

    ``descriptor`` is the socket that its guest dials, owned by this value's owner. ``mounted`` are the targets of
    ``slot_mounts`` that it has.
    """

    descriptor: int
    container: str
    pid: int
    tree: str
    nonce: bytes
    groups: Mapping[str, str]
    toolchains: tuple[str, ...]
    mounted: tuple[str, ...]

    @property
    def group(self) -> ControlGroups:
        """Return its control groups, kept because looking them up again takes longer."""
        return ControlGroups({controller: Path(directory) for controller, directory in self.groups.items()})

    def fits(self, handle: Handle, spec: SandboxSpec) -> bool:
        """Tell whether the container has all that ``spec`` asks for, or can get it now; dependencies it cannot get."""
        here = {mount for mount in slot_mounts(handle) if mount.target in self.mounted}
        plain = SandboxSpec(protected=spec.protected, toolchains=self.toolchains, env=spec.env)
        return replace(spec, mounts=()) == plain and here.issuperset(spec.mounts)


def read_handoff(handoff: SandboxHandoff) -> HandedOffContainer:
    """Read what ``detach`` returned. Raises ``KeyError``, ``TypeError``, ``ValueError`` for another version's."""
    fields = dict(handoff.state)
    toolchains, mounted = tuple(fields.pop("toolchains")), tuple(fields.pop("mounted"))
    nonce = bytes.fromhex(fields.pop("nonce"))
    (descriptor,) = handoff.descriptors
    return HandedOffContainer(descriptor, nonce=nonce, toolchains=toolchains, mounted=mounted, **fields)


def slot_mounts(handle: Handle) -> tuple[Mount, ...]:
    """The mounts of every container of a warm pool, whatever workspace it will serve."""
    targets = {"incident": PATHS.incident, "skills": PATHS.skills, "kube": PATHS.kube}
    return tuple(Mount(handle.private / name, target) for name, target in targets.items())


@contextmanager
def open_tree(stage: DaemonStage, container: HandedOffContainer) -> Iterator[int]:
    """Open the tree as the container has it, as ``O_PATH``."""
    tree = stage.open(MountSource(container.tree))
    try:
        yield tree
    finally:
        os.close(tree)


def covers(private: Path, guards: Iterable[Guard]) -> list[Cover]:
    """Prepare the mounts of guards over the tree, outermost first; the caller owns their descriptors."""
    return [
        Cover(
            guard.path,
            open_linkless(private / "system" / EMPTY[guard.kind]) if guard.kind in EMPTY else os.dup(guard.source),
            writable=guard.kind is Kind.ANCESTOR,
        )
        for guard in guards
    ]
