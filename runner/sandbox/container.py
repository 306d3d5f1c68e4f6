"""The body of the call that creates a container. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.core.model import Limits
from runner.sandbox.mounts import MountSource

GUEST, CHANNEL, SOCKET = "/run/guest", "/run/channel", "socket"

_SHM_BYTES = 64 << 20
_PERIOD = 100_000  # microseconds


@dataclass
class ContainerMounts:
    """The mounts of one container, in the order in which they are added; later ones cover earlier ones.

    Targets in ``following`` receive mounts that are made below their source later.
    """

    shown: dict[str, tuple[MountSource, bool]] = field(default_factory=dict)
    following: set[str] = field(default_factory=set)

    def show(self, place: MountSource, target: str, *, writable: bool = False) -> None:
        self.shown[target.rstrip("/")] = (place, writable)

    @property
    def read_only(self) -> list[MountSource]:
        return [place for place, writable in self.shown.values() if not writable]


@dataclass(frozen=True)
class Container:
    """``image`` is an id; its own entry point, user, environment and health check are ignored.

    With ``capabilities`` the guest is root, and runs its commands as ``uid``; else it is that user, without any.
    """

    image: str
    uid: int
    labels: Mapping[str, str]
    limits: Limits
    env: Mapping[str, str]
    runtime: str
    capabilities: Sequence[str] = ()
    has_health_check: bool = False  # the image; podman needs systemd even to be told of none

    def config(self, mounts: ContainerMounts) -> dict[str, Any]:
        """Return the body of the call, but for the guest's channel."""
        user = 0 if self.capabilities else self.uid
        never = {"Healthcheck": {"Test": ["NONE"]}} if self.has_health_check else {}
        return {
            **never,
            "Image": self.image,
            "User": f"{user}:{user}",
            "Entrypoint": [GUEST],
            "Env": [f"{name}={value}" for name, value in self.env.items()],
            "WorkingDir": "/",
            "Hostname": "workspace",
            "Labels": dict(self.labels),
            "NetworkDisabled": True,
            "HostConfig": {
                **_isolation(),
                **_limits(self.limits),
                "CapAdd": list(self.capabilities) or None,
                "Mounts": _mounts(mounts),
                "Runtime": self.runtime,
            },
        }


def _mounts(mounts: ContainerMounts) -> list[dict[str, Any]]:
    return [
        {
            "Type": "bind",
            "Source": place.path,
            "Target": target,
            "ReadOnly": not writable,
            "BindOptions": {"Propagation": "rslave" if target in mounts.following else "rprivate"},
        }
        for target, (place, writable) in mounts.shown.items()
    ]


def _isolation() -> dict[str, Any]:
    return {
        "CapDrop": ["ALL"],
        "CgroupnsMode": "private",
        "IpcMode": "private",
        "LogConfig": {"Type": "none"},
        "NetworkMode": "none",
        "ReadonlyRootfs": True,
        "RestartPolicy": {"Name": "no"},
        "SecurityOpt": ["no-new-privileges"],
        "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
    }


def _limits(limits: Limits) -> dict[str, Any]:
    """The limits. Out of memory kills one process, not the container: docker's default, which spares the others."""
    found: dict[str, Any] = {"ShmSize": _SHM_BYTES}
    if limits.memory_bytes is not None:
        found |= {"Memory": limits.memory_bytes, "MemorySwap": limits.memory_bytes}
        found["ShmSize"] = min(_SHM_BYTES, limits.memory_bytes // 8)
    if limits.cpus is not None:
        found |= {"CpuPeriod": _PERIOD, "CpuQuota": int(limits.cpus * _PERIOD)}
    if limits.pids is not None:
        found |= {"PidsLimit": limits.pids}
    return found
