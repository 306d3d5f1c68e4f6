"""Provider ``gvisor``, class kernel: ``docker`` with runtime ``runsc``, whose containers have a kernel of their own.

That kernel gives containers no Unix socket of the host, so the guest is attached (see ``attach_channel``): a daemon
that hangs delays commands, and one that ends takes the workspace along. It lets processes of one user kill each other,
the first one included, so the guest is another user: root, with just the capabilities to become the workspace's user
and to end its commands, which have none.

To the host a sandbox is one program, which the kernel kills whole when it exceeds its memory limit; gVisor's own kernel
gets some memory beyond the limit. Limiting each command's address space, which gVisor could do, would spare the others,
but would keep JavaScript engines from starting: they reserve far more than they use.
"""

from __future__ import annotations

from runner.core.model import IsolationClass, Limits
from runner.core.settings import Settings
from runner.providers.docker import ContainerRuntime, DockerProvider
from runner.sandbox.attach_channel import open_attach_channel
from runner.sandbox.docker_api import Engine

USES_IMAGES = True  # workspaces are made of images

_OTHER_KERNEL = "only gVisor's own kernel does it, which belongs to this sandbox alone"
_OTHER_PROC = "gVisor shows processes of one user each other's environment; it has only the container's"
GAPS = {  # ways out of the sandbox that are known, with the reason
    **dict.fromkeys(("user-namespace", "namespaces", "mount", "memory-killer"), _OTHER_KERNEL),
    "environments": _OTHER_PROC,
}

_HEADROOM = 64 << 20  # bytes of memory for the kernel itself
_HINT = (
    'install runsc, put `{"runtimes": {"runsc": {"path": "/usr/bin/runsc", "runtimeArgs": ["--network=none"]}}}` '
    "into /etc/docker/daemon.json, and restart the daemon"
)


def _container_limits(limits: Limits) -> Limits:
    memory = None if limits.memory_bytes is None else limits.memory_bytes + _HEADROOM
    return Limits(cpus=limits.cpus, memory_bytes=memory)


RUNSC = ContainerRuntime(
    name="gvisor",
    isolation=IsolationClass.KERNEL,
    program="runsc",
    hint=_HINT,
    open_channel=open_attach_channel,
    capabilities=("KILL", "SETGID", "SETPCAP", "SETUID"),
    idmaps=False,  # root makes its files for their owner, who does not exist on an idmapped mount
    container_limits=_container_limits,
    command_limits=lambda limits: Limits(memory_bytes=limits.memory_bytes, pids=limits.pids),
    escapes=GAPS,
    ends_whole=True,
    why_not_warm="the guest of a gVisor sandbox is attached, and an attached connection cannot be handed over",
)


def provider(settings: Settings) -> DockerProvider:
    return DockerProvider(settings.home, Engine.of(settings), runtime=RUNSC)
