"""What a container is made with: the daemon's own words for one opening. Pure."""

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
class Recipe:
    """The mounts of one opening, in the order in which they are added; later ones cover earlier ones.

    Those that ``follow`` their place show what is mounted below it later.
    """

    shown: dict[str, tuple[MountSource, bool]] = field(default_factory=dict)
    follow: set[str] = field(default_factory=set)

    def show(self, place: MountSource, target: str, *, writable: bool = False) -> None:
        self.shown[target.rstrip("/")] = (place, writable)

    @property
    def read_only(self) -> list[MountSource]:
        return [place for place, writable in self.shown.values() if not writable]


@dataclass(frozen=True)
class Container:
    """``image`` is an id. Of what that asks for nothing is heeded.

    With ``capabilities`` the guest is root, to run its commands as ``uid``; else it is that user, and has none.
    """

    image: str
    uid: int
    labels: Mapping[str, str]
    limits: Limits
    env: Mapping[str, str]
    runtime: str
    capabilities: Sequence[str] = ()

    def config(self, recipe: Recipe) -> dict[str, Any]:
        """The body of the call that creates it, but for the guest's channel."""
        user = 0 if self.capabilities else self.uid
        return {
            "Image": self.image,
            "User": f"{user}:{user}",
            "Entrypoint": [GUEST],
            "Env": [f"{name}={value}" for name, value in self.env.items()],
            "WorkingDir": "/",
            "Hostname": "workspace",
            "Healthcheck": {"Test": ["NONE"]},
            "Labels": dict(self.labels),
            "NetworkDisabled": True,
            "HostConfig": {
                **_walls(),
                **_ceilings(self.limits),
                "CapAdd": list(self.capabilities) or None,
                "Mounts": _mounts(recipe),
                "Runtime": self.runtime,
            },
        }


def _mounts(recipe: Recipe) -> list[dict[str, Any]]:
    return [
        {
            "Type": "bind",
            "Source": place.path,
            "Target": target,
            "ReadOnly": not writable,
            "BindOptions": {"Propagation": "rslave" if target in recipe.follow else "rprivate"},
        }
        for target, (place, writable) in recipe.shown.items()
    ]


def _walls() -> dict[str, Any]:
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


def _ceilings(limits: Limits) -> dict[str, Any]:
    """Of memory the offender dies, not the container: docker's default, which leaves what else runs alone."""
    found: dict[str, Any] = {"ShmSize": _SHM_BYTES}
    if limits.memory_bytes is not None:
        found |= {"Memory": limits.memory_bytes, "MemorySwap": limits.memory_bytes}
        found["ShmSize"] = min(_SHM_BYTES, limits.memory_bytes // 8)
    if limits.cpus is not None:
        found |= {"CpuPeriod": _PERIOD, "CpuQuota": int(limits.cpus * _PERIOD)}
    if limits.pids is not None:
        found |= {"PidsLimit": limits.pids}
    return found
