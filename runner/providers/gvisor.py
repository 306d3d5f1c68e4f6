"""Provider ``gvisor``, class kernel: ``docker`` with runtime ``runsc``, whose containers have a kernel of their own.

That kernel gives no Unix socket of the host to its containers, so the guest is attached (see ``_attached``): a daemon
that hangs holds commands up, and one that ends takes the workspace along. It lets processes of one user kill each
other, the first one included, so the guest is another user: root, with just the capabilities to become the workspace's
user and to end its commands, which have none.

To the host a sandbox is one program, and the kernel kills it whole when it takes more memory than it may; for its own
kernel it gets some more than the limit. A limit of each command's address space, the only one that this kernel knows,
would spare the others, and keep whatever runs JavaScript from starting: that reserves far more than it ever uses.
"""

from __future__ import annotations

from runner.core.model import IsolationClass, Limits
from runner.core.settings import Settings
from runner.providers.docker import Docker, Flavour
from runner.sandbox.attach_channel import open_attached

_HEADROOM = 64 << 20  # bytes of memory for the kernel itself
_HINT = (
    'install runsc, put `{"runtimes": {"runsc": {"path": "/usr/bin/runsc", "runtimeArgs": ["--network=none"]}}}` '
    "into /etc/docker/daemon.json, and restart the daemon"
)


def _outside(limits: Limits) -> Limits:
    memory = None if limits.memory_bytes is None else limits.memory_bytes + _HEADROOM
    return Limits(cpus=limits.cpus, memory_bytes=memory)


RUNSC = Flavour(
    "gvisor",
    IsolationClass.KERNEL,
    "runsc",
    _HINT,
    open_attached,
    capabilities=("KILL", "SETGID", "SETPCAP", "SETUID"),
    lends=False,  # its files are made by root for their owner, who is nobody on a mount that knows only one user
    outside=_outside,
    inside=lambda limits: Limits(memory_bytes=limits.memory_bytes, pids=limits.pids),
    not_warm="the guest of a gVisor sandbox is attached, and an attachment cannot be handed over",
)


def provider(settings: Settings) -> Docker:
    return Docker(settings.home, settings.docker_host, flavour=RUNSC)
