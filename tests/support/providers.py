"""The providers that the suite judges, the place that a check runs in, and how it looks at it from outside."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import trio
from msgspec.structs import replace

from runner.core.model import Exit, Handle, StopStage
from runner.core.settings import Settings
from runner.ports.provider import Provider, SandboxSpec, WorkspaceRequest
from runner.providers.docker import RUNC, DockerProvider
from runner.providers.gvisor import RUNSC
from runner.providers.kubernetes import KubernetesProvider
from runner.providers.local import LocalProvider
from runner.providers.process import ProcessProvider
from runner.sandbox import container_init
from runner.sandbox.docker_api import Engine
from runner.sandbox.volume_docker import VolumeDocker
from runner.testing.outside import alive, pids
from runner.testing.place import LEAVES, STUBBORN, read_until
from tests.support import cluster, dockerd, unprivileged
from tests.support.fake_provider import FakeProvider, Scripted

LOCAL, ORDINARY, PROCESS, FAKE = "local", "local as an ordinary user", "process", "fake"  # ordinary: who runs the suite
DOCKER, VOLUMES, GVISOR = "docker", "docker by volumes", "gvisor"
PODS, REAL_PODS = "kubernetes", "real kubernetes"  # on the double of its API, and on a cluster
PODMAN, ROOT_PODMAN, ROOTLESS = "podman", "podman as root", "rootless docker"
# As root it sets more open files for its containers than root of some hosts may have, and then runs none.
HERE_AS_ROOT = () if unprivileged.RootPodman.component.missing else (ROOT_PODMAN,)
BY_VOLUMES = (VOLUMES, PODMAN, *HERE_AS_ROOT, ROOTLESS)
GUESTS = (LOCAL, ORDINARY, PROCESS, DOCKER, GVISOR, *BY_VOLUMES, PODS)
SIZED = (LOCAL, DOCKER, GVISOR)  # where they run as root
KINDS = (*GUESTS, REAL_PODS, FAKE)
SLOW = (DOCKER,)  # of checks that take long, for the night

_LANDLOCK_VERSION = 444, None, 0, 1


class OnTestImage(DockerProvider):
    """Every workspace on the one image that is there."""

    async def create(self, request: WorkspaceRequest) -> Handle:
        return await super().create(replace(request, image=dockerd.IMAGE))


class VolumesOnTestImage(VolumeDocker):
    async def create(self, request: WorkspaceRequest) -> Handle:
        return await super().create(replace(request, image=dockerd.IMAGE))


class PodsOnTestImage(KubernetesProvider):
    async def create(self, request: WorkspaceRequest) -> Handle:
        return await super().create(replace(request, image=dockerd.IMAGE))


def make(kind: str, home: Path, grace: float) -> Provider:
    kinds: Mapping[str, Callable[[], Provider]] = {
        LOCAL: lambda: LocalProvider(home, grace=grace),
        ORDINARY: lambda: LocalProvider(home, grace=grace, own_users=False),
        PROCESS: lambda: ProcessProvider(home, grace=grace),
        FAKE: lambda: FakeProvider(home, _scripted, grace=grace),
        DOCKER: lambda: OnTestImage(home, Engine(dockerd.host()), grace=grace, runtime=RUNC),
        VOLUMES: lambda: VolumesOnTestImage(home, Engine(dockerd.host()), grace=grace),
        PODMAN: lambda: by_volumes(home, unprivileged.Podman, grace),
        ROOT_PODMAN: lambda: by_volumes(home, unprivileged.RootPodman, grace),
        ROOTLESS: lambda: by_volumes(home, unprivileged.RootlessDocker, grace),
        PODS: lambda: in_pods(home, cluster.double_kubeconfig(), grace),
        REAL_PODS: lambda: in_pods(home, cluster.real_cluster().kubeconfig, grace),
        GVISOR: lambda: OnTestImage(home, Engine(dockerd.host()), grace=grace, runtime=RUNSC),
    }
    return kinds[kind]()


def by_volumes(home: Path, daemon: type[unprivileged.OtherDaemon], grace: float) -> Provider:
    daemon.component.require()
    return VolumesOnTestImage(home, Engine(dockerd.session_of(daemon).host), grace=grace)


def in_pods(home: Path, kubeconfig: Path, grace: float, **more: str) -> KubernetesProvider:
    env = {
        "RUNNER_HOME": str(home),
        "KUBECONFIG": str(kubeconfig),
        "RUNNER_KUBERNETES_NAMESPACE": "agents",
        **more,
    }
    return PodsOnTestImage(Settings.from_env(env), grace=grace)


async def count_through(
    provider: Provider, interrupt: Callable[[], object], *, before: Callable[[], object] = lambda: None
) -> None:
    """Count in a workspace, interrupted in the middle: each number comes once, and the status of the command."""
    script = "read word; i=0; while [ $i -lt 20000 ]; do echo $i; i=$((i+1)); done; read word; exit 7"
    handle = await provider.create(WorkspaceRequest(id="w-1", run="run-1", nonce="nonce"))
    async with provider.open(handle, SandboxSpec()) as workspace, workspace.exec(["sh", "-c", script]) as process:
        await trio.to_thread.run_sync(before)
        await process.stdin.send_all(b"begin\n")
        seen = await read_until(process, b"\n9999\n")
        await trio.to_thread.run_sync(interrupt)
        seen += await read_until(process, b"\n19999\n")
        await process.stdin.send_all(b"end\n")
        ended = await process.wait()
    await provider.destroy(handle)

    assert ended.code == 7
    assert seen.split() == [b"%d" % number for number in range(20_000)]


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


def inhabitants(handle: Handle) -> list[int]:
    """The living processes of all containers that a workspace has had, of whatever user."""
    noted = handle.private / "system" / "containers"
    containers = noted.read_text().split() if noted.exists() else []
    if not containers and handle.provider == DOCKER:
        containers = dockerd.containers(handle.id)

    def belongs(pid: int) -> bool:
        return any(container in container_init.membership(pid) for container in containers) and alive(pid)

    return list(filter(belongs, pids()))


def scopes_signals() -> bool:
    """Whether this kernel's Landlock can keep a command's signals in its own tree."""
    return int(ctypes.CDLL(None).syscall(*_LANDLOCK_VERSION)) >= 6
