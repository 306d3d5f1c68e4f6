"""What a container is made with: the daemon's own words for one opening. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runner.model import Limits
from runner.providers._mounts import Place

GUEST, CHANNEL, SOCKET = "/run/guest", "/run/channel", "socket"

_SHM_BYTES = 64 << 20
_PERIOD = 100_000  # microseconds


@dataclass
class Recipe:
    """The mounts of one opening, in the order in which they are added; later ones cover earlier ones."""

    shown: dict[str, tuple[Place, bool]] = field(default_factory=dict)

    def show(self, place: Place, target: str, *, writable: bool = False) -> None:
        self.shown[target.rstrip("/")] = (place, writable)

    @property
    def read_only(self) -> list[Place]:
        return [place for place, writable in self.shown.values() if not writable]


@dataclass(frozen=True)
class Container:
    """``image`` is an id. Of what that asks for nothing is heeded."""

    image: str
    user: str
    labels: Mapping[str, str]
    limits: Limits
    env: Mapping[str, str]
    runtime: str

    def config(self, recipe: Recipe) -> dict[str, Any]:
        """The body of the call that creates it."""
        return {
            "Image": self.image,
            "User": self.user,
            "Entrypoint": [GUEST],
            "Cmd": [f"{CHANNEL}/{SOCKET}"],
            "Env": [f"{name}={value}" for name, value in self.env.items()],
            "WorkingDir": "/",
            "Hostname": "workspace",
            "Healthcheck": {"Test": ["NONE"]},
            "Labels": dict(self.labels),
            "NetworkDisabled": True,
            "HostConfig": {**_walls(), **_ceilings(self.limits), "Mounts": _mounts(recipe), "Runtime": self.runtime},
        }


def _mounts(recipe: Recipe) -> list[dict[str, Any]]:
    return [
        {
            "Type": "bind",
            "Source": place.path,
            "Target": target,
            "ReadOnly": not writable,
            "BindOptions": {"Propagation": "rprivate"},
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
