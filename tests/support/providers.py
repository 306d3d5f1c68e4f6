"""The providers that the suite judges, the place that a check runs in, and how it looks at it from outside."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio
from msgspec.structs import replace

from runner.core.model import Exit, Handle, StopStage
from runner.ports.provider import Process, Provider, SandboxSpec, Workspace, WorkspaceRequest
from runner.providers.docker import RUNC, DockerProvider
from runner.providers.gvisor import RUNSC
from runner.providers.local import LocalProvider
from runner.providers.process import ProcessProvider
from runner.sandbox import container_init, processes
from runner.sandbox.docker_api import Engine
from runner.sandbox.volume_docker import UID, VolumeDocker
from tests.support import dockerd
from tests.support.fake_provider import FakeProvider, Scripted
from tests.support.guest_driver import alive, marked, pids
from tests.support.situations import groups, read, volumes_of

GRACE = 0.4
MIB = 1 << 20
OURS = f".{os.getpid()}"  # the fraction of every long sleep, to tell those of a suite beside us

LOCAL, ORDINARY, PROCESS, FAKE = "local", "local as an ordinary user", "process", "fake"  # ordinary: who runs the suite
DOCKER, VOLUMES, GVISOR = "docker", "docker by volumes", "gvisor"
GUESTS = (LOCAL, ORDINARY, PROCESS, DOCKER, VOLUMES, GVISOR)
SIZED = (LOCAL, DOCKER, GVISOR)  # where they run as root
KINDS = (*GUESTS, FAKE)
SLOW = (DOCKER,)  # of checks that take long, for the night

LEAVES = f"setsid sleep 1240{OURS} >/dev/null 2>&1 & sleep 0.1"
STUBBORN = "trap '' TERM; echo ready; while :; do sleep 1; done"

_LANDLOCK_VERSION = 444, None, 0, 1


class OnTestImage(DockerProvider):
    """Every workspace on the one image that is there."""

    async def create(self, request: WorkspaceRequest) -> Handle:
        return await super().create(replace(request, image=dockerd.IMAGE))


class VolumesOnTestImage(VolumeDocker):
    async def create(self, request: WorkspaceRequest) -> Handle:
        return await super().create(replace(request, image=dockerd.IMAGE))


def make(kind: str, home: Path, grace: float) -> Provider:
    kinds: Mapping[str, Callable[[], Provider]] = {
        LOCAL: lambda: LocalProvider(home, grace=grace),
        ORDINARY: lambda: LocalProvider(home, grace=grace, own_users=False),
        PROCESS: lambda: ProcessProvider(home, grace=grace),
        FAKE: lambda: FakeProvider(home, _scripted, grace=grace),
        DOCKER: lambda: OnTestImage(home, dockerd.host(), grace=grace, runtime=RUNC),
        VOLUMES: lambda: VolumesOnTestImage(home, Engine(dockerd.host()), grace=grace),
        GVISOR: lambda: OnTestImage(home, dockerd.host(), grace=grace, runtime=RUNSC),
    }
    return kinds[kind]()


def _scripted(argv: Sequence[str]) -> Scripted:
    """Just enough for the checks that are about the port and not about processes."""
    known = {
        ("true",): Scripted(),
        ("sh", "-c", LEAVES): Scripted(leaves=True),
        ("sh", "-c", "exit 7"): Scripted(Exit(code=7)),
        ("no-such-command",): Scripted(Exit(code=127)),
        ("sh", "-c", "kill -9 $$"): Scripted(Exit(signal=9)),
        ("sh", "-c", "echo out; echo err >&2"): Scripted(stdout=b"out\n", stderr=b"err\n"),
        ("sh", "-c", "echo ready; exec sleep 60"): Scripted(stdout=b"ready\n", seconds=60),
        ("sh", "-c", STUBBORN): Scripted(stdout=b"ready\n", seconds=60, yields_to=StopStage.KILL),
    }
    return known[tuple(argv)]


@dataclass
class Place:
    """``mark`` is for ``MARK`` in the environment of commands whose whole trees are looked for from outside."""

    kind: str
    provider: Provider
    home: Path
    handle: Handle
    nonce: str

    @property
    def mark(self) -> str:
        return self.handle.id

    @property
    def uid(self) -> int:
        """The user that commands run as."""
        return UID if self.kind == VOLUMES else self.handle.uid

    def open(self, spec: SandboxSpec | None = None) -> AbstractAsyncContextManager[Workspace]:
        return self.provider.open(self.handle, spec or SandboxSpec())

    def open_patiently(self) -> AbstractAsyncContextManager[Workspace]:
        """With a grace that no command needs which ends by itself, on however busy a host."""
        return make(self.kind, self.home, grace=60).open(self.handle, SandboxSpec())

    def write(self, name: str, text: str) -> Path:
        path = self.handle.tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


async def shell(workspace: Workspace, text: str) -> str:
    """What a shell prints, both streams; it must not fail to start."""
    result = await workspace.run(["sh", "-c", f"{{ {text}\n}} 2>&1"])
    return result.stdout.decode()


def listing(directory: str = ".") -> str:
    """Shell text that prints the names in a directory; gVisor of 2022 does not know a flag that ``ls`` needs."""
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


def cmdline(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def sleepers(seconds: int) -> list[str]:
    """Processes of ours that sleep so long."""
    words = f"sleep\0{seconds}{OURS}\0".encode()
    return [pid for pid in filter(str.isdigit, os.listdir("/proc")) if cmdline(pid) == words]


async def carrying(place: Place, workspace: Workspace, mark: str) -> int:
    """How many living processes of a workspace have this ``MARK`` in their environment.

    Seen from outside, and under gVisor, whose processes this host does not see, by another command.
    """
    if place.kind != GVISOR:
        return len(marked(mark))
    look = await workspace.run(["sh", "-c", 'grep -lsz "^MARK=$1" /proc/[0-9]*/environ', "sh", mark])
    return look.stdout.count(b"\n")


def inhabitants(handle: Handle) -> list[int]:
    """The living processes of all containers that a workspace has had, of whatever user."""
    noted = handle.private / "system" / "containers"
    containers = noted.read_text().split() if noted.exists() else []
    if not containers and handle.provider == DOCKER:
        containers = dockerd.containers(handle.id)

    def belongs(pid: int) -> bool:
        return any(container in container_init.membership(pid) for container in containers) and alive(pid)

    return list(filter(belongs, pids()))


def living_of(*users: int) -> list[int]:
    """The living processes of some of this host's users."""

    def belongs(pid: int) -> bool:
        try:
            return processes.user(pid) in users and alive(pid)
        except (FileNotFoundError, ProcessLookupError):
            return False

    return list(filter(belongs, pids()))


def on_host(home: Path) -> set[str]:
    """Processes, mounts and control groups of workspaces, as an outsider sees them."""
    found = {line for line in Path("/proc/1/mountinfo").read_text().splitlines() if str(home) in line}
    found |= {f"{device}, a volume's" for device in volumes_of(home)}
    found |= {group for group in groups() if f"/runner-check-{os.getpid()}-" in group}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = read(f"/proc/{pid}/cmdline") + os.readlink(f"/proc/{pid}/cwd").encode()
        except OSError:
            continue
        if str(home).encode() in words or re.fullmatch(rb"sleep\x0012[34]\d%s\x00.*" % OURS.encode(), words):
            found.add(f"process {pid}")
    return found


def scopes_signals() -> bool:
    """Whether this kernel's Landlock can keep a command's signals in its own tree."""
    return int(ctypes.CDLL(None).syscall(*_LANDLOCK_VERSION)) >= 6
