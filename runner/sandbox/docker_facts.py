"""Facts that a docker daemon tells about itself and its images, and what they mean for a provider."""

from __future__ import annotations

import json
import platform
import posixpath
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.core.errors import ProviderFailed, WorkspaceLost
from runner.core.model import Feature, Handle, Limits
from runner.guest import binary
from runner.sandbox.sandbox_layout import PATHS

TMP = "/tmp"

_TMP_BYTES = 1 << 30
_LIMIT_SUPPORT = {Feature.CPU: "CpuCfsQuota", Feature.MEMORY: "MemoryLimit", Feature.PIDS: "PidsLimit"}
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def missing_limits(about: Mapping[str, Any]) -> dict[Feature, str]:
    """Return the limits that the daemon cannot set, with the reason."""
    if about.get("Rootless") and about.get("CgroupVersion") == "1":  # podman, which says that it can
        return dict.fromkeys(_LIMIT_SUPPORT, "podman without root limits nothing where control groups are version 1")
    return {f: f"the daemon cannot limit {f}" for f, word in _LIMIT_SUPPORT.items() if not about.get(word)}


def check_machine(about: Mapping[str, Any]) -> None:
    """Raise ``ProviderFailed`` for a daemon that runs other programs than this machine."""
    ours = platform.machine()
    if about.get("OSType") != "linux" or about.get("Architecture") not in (ours, _MACHINES.get(ours)):
        raise ProviderFailed(f"the docker daemon runs {about.get('OSType')} on {about.get('Architecture')}")


def versions_of(about: Mapping[str, Any], guest: binary.Program) -> dict[str, str]:
    words = {"docker": "ServerVersion", "storage": "Driver", "cgroup": "CgroupVersion", "kernel": "KernelVersion"}
    found = {name: str(about[word]) for name, word in words.items() if about.get(word)}
    return {**found, "guest": guest.sha256[:12]}


def is_podman(about: Mapping[str, Any]) -> bool:
    return "BuildahVersion" in about


def image_facts(image: Mapping[str, Any], id: str, *, podman: bool = False) -> str:
    """Return what ``create`` stores of an image; ``id`` is of the one to use. Raises as ``image_volumes``."""
    found = {"image": id, "volumes": image_volumes(image), "health": bool(image["Config"].get("Healthcheck"))}
    return json.dumps({**found, "podman": podman})


def image_volumes(image: Mapping[str, Any]) -> list[str]:
    """Return the volumes that an image declares. Raises ``ProviderFailed`` for one below a workspace's own mount."""
    found = sorted(posixpath.normpath(place) for place in image["Config"].get("Volumes") or ())
    ours = (PATHS.workspace, PATHS.output, PATHS.runner, PATHS.home, PATHS.skills, PATHS.kube, TMP)
    if within := [place for place in found if any(place.startswith(f"{our}/") for our in ours)]:
        raise ProviderFailed(
            f"image `{image['Id']}` declares a volume at `{within[0]}`, where the workspace's own files are",
            hint="build it without that VOLUME",
        )
    return found


def tmp_bytes(limits: Limits) -> int:
    """Return the size of /tmp: less than the memory limit, or files alone could exhaust it and kill the guest."""
    return _TMP_BYTES if limits.memory_bytes is None else min(_TMP_BYTES, limits.memory_bytes // 2)


def image_file(private: Path) -> Path:
    """Return the file in which ``create`` stores what it found out about the image."""
    return private / "system" / "image.json"


def read_image(handle: Handle) -> Mapping[str, Any]:
    """Read what ``create`` has stored of the image. Raises ``WorkspaceLost``."""
    try:
        found: Mapping[str, Any] = json.loads(image_file(handle.private).read_text())
    except OSError as error:
        raise WorkspaceLost(f"workspace `{handle.id}` is gone: {error}") from error
    return found
