"""The provider that a check judges, the place that the check runs in, and the words of its commands."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from types import ModuleType

import pytest
import trio

from runner.core import plugins
from runner.core.model import Handle, IsolationClass
from runner.core.settings import Settings
from runner.ports.provider import STOP_GRACE, Probe, Process, Provider, SandboxSpec, Workspace
from runner.testing.outside import OURS, marked

ROOM = "runner.providers"
GRACE = 0.4
MIB = 1 << 20

LEAVES = f"setsid sleep 1240{OURS} >/dev/null 2>&1 & sleep 0.1"
STUBBORN = "trap '' TERM; echo ready; while :; do sleep 1; done"

HOST_KERNEL = (IsolationClass.NONE, IsolationClass.NAMESPACES)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A provider that the suite judges.

    ``make`` gives the provider for a home and a grace, the seconds between TERM and KILL; one that cannot change its
    grace says it in ``grace``. ``gaps`` has the reason for each check that the provider cannot pass: the check is
    expected to fail, and one that passes fails the suite. ``escapes`` are the probes of ``runner doctor --probe`` that
    are known to find a way out. ``marks`` adds marks to a check, given its name and module.
    """

    name: str
    make: Callable[[Path, float], Provider]
    gaps: Mapping[str, str]
    escapes: Mapping[str, str]
    grace: float = GRACE
    own_users: bool = True  # started by root, it runs commands as another user
    disk_limit: bool | None = None  # started by root, it limits the disk; `None`: unknown
    pins_parents: bool = True  # a directory that a dependency lies in cannot be moved
    interfaces: tuple[str, ...] = ("lo",)  # that commands see; all but their own loopback lead nowhere
    shared_namespaces: tuple[str, ...] = ()  # as `Isolation` tells them
    uid: Callable[[Handle], int] = lambda handle: handle.uid  # of commands inside
    inhabitants: Callable[[Handle], Sequence[int]] = (
        lambda handle: ()
    )  # processes that an outsider finds by other means
    marks: Callable[[str, ModuleType], Sequence[pytest.MarkDecorator]] = lambda name, module: ()


def registered_providers() -> list[Candidate]:
    """Return the providers that other distributions have registered; their gaps and escapes are ``GAPS`` there.

    ``provider`` there may take a ``grace``, so that the suite need not wait for the usual one.
    """
    return [_registered(name) for name in plugins.registered(ROOM)]


def _registered(name: str) -> Candidate:
    module = None if plugins.problem_of(ROOM, name) else plugins.load(ROOM, name)
    gaps = getattr(module, "GAPS", {})
    quick = module is not None and "grace" in signature(module.provider).parameters

    def make(home: Path, grace: float) -> Provider:
        settings = Settings.from_env({"RUNNER_HOME": str(home)})
        found: Provider = plugins.load(ROOM, name).provider(settings, **{"grace": grace} if quick else {})
        return found

    return Candidate(name=name, make=make, gaps=gaps, escapes=gaps, grace=GRACE if quick else STOP_GRACE)


@dataclass
class Place:
    """``mark`` is for ``MARK`` in the environment of commands whose whole trees are looked for from outside."""

    candidate: Candidate
    provider: Provider
    home: Path
    handle: Handle
    nonce: str
    probe: Probe

    @property
    def kind(self) -> str:
        return self.candidate.name

    @property
    def mark(self) -> str:
        return self.handle.id

    @property
    def uid(self) -> int:
        """The user that commands run as."""
        return self.candidate.uid(self.handle)

    @property
    def isolated(self) -> bool:
        return self.probe.isolation is not IsolationClass.NONE

    @property
    def shows_processes(self) -> bool:
        """True if this host sees the processes of commands."""
        return self.probe.isolation in HOST_KERNEL

    def open(self, spec: SandboxSpec | None = None) -> AbstractAsyncContextManager[Workspace]:
        return self.provider.open(self.handle, spec or SandboxSpec())

    def open_patiently(self) -> AbstractAsyncContextManager[Workspace]:
        """Open with a grace that no command needs which ends by itself, on however busy a host."""
        return self.candidate.make(self.home, 60).open(self.handle, SandboxSpec())

    def write(self, name: str, text: str) -> Path:
        path = self.handle.tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


async def shell(workspace: Workspace, text: str) -> str:
    """Return the output of a shell, both streams; it must not fail to start."""
    result = await workspace.run(["sh", "-c", f"{{ {text}\n}} 2>&1"])
    return result.stdout.decode()


def listing(directory: str = ".") -> str:
    """Return shell text that prints the names in a directory; gVisor of 2022 does not know a flag that ``ls`` needs."""
    return f'find "{directory}" -mindepth 1 -maxdepth 1 -printf "%f\\n"'


async def read_until(process: Process, text: bytes) -> bytes:
    seen = b""
    with trio.fail_after(60):
        while text not in seen:
            chunk = await process.stdout.receive_some(4096)
            assert chunk, f"the command ended after {seen!r}"
            seen += chunk
    return seen


@asynccontextmanager
async def took_at_most(seconds: float) -> AsyncIterator[None]:
    start = trio.current_time()
    yield
    assert trio.current_time() - start < seconds


async def carrying(place: Place, workspace: Workspace, mark: str) -> int:
    """Count the living processes of a workspace with this ``MARK`` in their environment.

    Seen from outside, and where this host does not see them, by another command.
    """
    if place.shows_processes:
        return len(marked(mark))
    look = await workspace.run(["sh", "-c", 'grep -lsz "^MARK=$1" /proc/[0-9]*/environ', "sh", mark])
    return look.stdout.count(b"\n")
