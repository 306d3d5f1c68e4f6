"""Pods of a warm pool: started before their workspace is known, and taken over by another process.

What is mounted into a pod is decided when it is made. So its protected paths are known from the start, and stand-ins
for them are in its tree, which is empty; the files that come later fill these. A pod fits a workspace whose tree has
files and directories where the stand-ins are. The guest knows its host by a nonce, and waits for the next one.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
from msgspec.structs import replace

from runner.core.model import Handle
from runner.guest.client import Guest, open_guest
from runner.guest.framing import NONCE_BYTES
from runner.ports.provider import SandboxHandoff, SandboxSpec
from runner.providers._pod_sandbox import PodSandbox
from runner.safefs.safe_open import open_directory
from runner.sandbox.mirrored import Volume
from runner.sandbox.protected_paths import Guard, Kind, open_guards
from runner.sandbox.warm_containers import slot_mounts

_ABOVE, _DIRECTORY, _FILE = "above", "directory", "file"  # what is mounted: above a protected path, or a path itself


class WarmPod:
    """A ``Slot``; ``state`` is what ``read_handoff`` takes."""

    def __init__(self, sandbox: PodSandbox, guest: Guest, state: Mapping[str, Any]) -> None:
        self.wait_ended = sandbox.wait_lost
        self._sandbox, self._guest, self._state = sandbox, guest, state
        self.is_detached = False

    async def ping(self) -> None:
        if lost := self._sandbox.why_lost():
            raise lost
        await self._guest.ping()

    def detach(self) -> SandboxHandoff:
        self.is_detached = True
        return SandboxHandoff(self._state)


@asynccontextmanager
async def open_warm_pod(
    sandbox: PodSandbox,
    start: Callable[[], Awaitable[None]],
    volumes: Sequence[Volume],
    *,
    pinned: Mapping[str, str],
    toolchains: Sequence[str],
) -> AsyncIterator[WarmPod]:
    """Start a pod and reach its guest; it is deleted when the block ends, unless it was detached."""
    nonce, slot = os.urandom(NONCE_BYTES), None
    state = {
        "name": sandbox.name,
        "nonce": nonce.hex(),
        "places": {volume.target: volume.name for volume in volumes},
        "pinned": pinned,
        "toolchains": list(toolchains),
    }
    async with sandbox.watched():
        try:
            await start()
            what = sandbox.what
            async with open_guest(sandbox.connect, what=what, kill_sandbox=sandbox.kill, nonce=nonce) as guest:
                slot = WarmPod(sandbox, guest, state)
                yield slot
        finally:
            if slot is None or not slot.is_detached:
                with trio.CancelScope(shield=True):
                    await sandbox.delete(grace=0)  # no command has run in it


@dataclass(frozen=True)
class HandedOffPod:
    """A pod that another process has detached. ``places`` are its volumes by target, ``pinned`` what is mounted in its
    tree by path."""

    name: str
    nonce: bytes
    places: Mapping[str, str]
    pinned: Mapping[str, str]
    toolchains: tuple[str, ...]

    def why_unfit(self, handle: Handle, spec: SandboxSpec, guards: Iterable[Guard]) -> str | None:
        """Return why the pod cannot show what a sandbox asks for; ``None`` if it can."""
        plain = SandboxSpec(protected=spec.protected, toolchains=self.toolchains, env=spec.env)
        if replace(spec, mounts=()) != plain or not {*slot_mounts(handle)}.issuperset(spec.mounts):
            return "it has other mounts"
        wanted = pinned_by(guards)
        other = sorted({*wanted.items()} ^ {*self.pinned.items()})
        return f"`{other[0][0]}` is not in the tree as it is protected there" if other else None

    def in_place(self, volumes: Sequence[Volume]) -> list[Volume]:
        """Return volumes with the names that the pod has for their targets."""
        return [Volume(**{**vars(volume), "name": self.places[volume.target]}) for volume in volumes]


def read_handoff(handoff: SandboxHandoff) -> HandedOffPod:
    """Read what ``detach`` returned. Raises ``KeyError``, ``TypeError``, ``ValueError`` for another version's."""
    found = dict(handoff.state)
    nonce, toolchains = bytes.fromhex(found.pop("nonce")), tuple(found.pop("toolchains"))
    return HandedOffPod(nonce=nonce, toolchains=toolchains, **found)


def pinned_by(guards: Iterable[Guard]) -> dict[str, str]:
    """Return what guards mount, by path."""
    return {guard.path: _ABOVE if guard.kind is Kind.ANCESTOR else _kind(guard) for guard in guards}


def _kind(guard: Guard) -> str:
    return _DIRECTORY if stat.S_ISDIR(os.fstat(guard.source).st_mode) else _FILE


@contextmanager
def stand_ins(scratch: Path, protected: Sequence[str]) -> Iterator[list[Guard]]:
    """Make an empty tree of stand-ins for protected paths, and yield what guards it."""
    for path in protected:
        (scratch / posixpath.dirname(path.rstrip("/"))).mkdir(mode=0o700, parents=True, exist_ok=True)
    with open_directory(scratch) as tree, open_guards(tree, protected) as guards:
        yield guards
