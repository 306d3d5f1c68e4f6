"""Isolation as a sandbox reports it from inside: the probe script, and the pure reading of what it prints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from runner.core.errors import ProviderFailed
from runner.core.model import Isolation, IsolationClass, Limits
from runner.ports.provider import Paths, Reader
from runner.sandbox.volumes import Volume

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")

_MARK = "----"
# Waits at the end, so that the host can look at a living process too. Starts few programs: a shell reads what is short.
SCRIPT = f"""
cat /proc/self/status; echo {_MARK}
ls -l /proc/self/ns; echo {_MARK}
cat /proc/self/mountinfo; echo {_MARK}
while IFS= read -r line; do printf '%s\\n' "$line"; done </proc/net/dev; echo {_MARK}
while IFS= read -r line; do printf '%s\\n' "$line"; done </proc/version; echo {_MARK}
read -r _
"""
_SECTIONS = 5
_FILTER = "2"  # how the kernel writes that a process has one


@dataclass(frozen=True)
class Outside:
    """What only the host can know: its own namespaces by name, the user that the probe ran as, the limits set.

    ``volume`` is what the workspace's files should be in. ``kernel`` is the host's, where the sandbox should have
    another: it shares no namespace then, and as it need not say so, its guest has to keep privileges from being gained.
    ``calls_closed``: its guest was refused the system calls that commands shall not make.
    """

    namespaces: Mapping[str, str]
    uid: int
    limits: Limits
    volume: Volume | None = None
    kernel: str | None = None
    calls_closed: bool = False


async def receive(stdout: Reader) -> str:
    """What ``SCRIPT`` prints, up to where it waits."""
    text = b""
    while text.count(f"{_MARK}\n".encode()) < _SECTIONS and (chunk := await stdout.receive_some(1 << 16)):
        text += chunk
    return text.decode(errors="replace")


def namespaces() -> dict[str, str]:
    """The namespaces of the calling thread."""
    return {name: os.readlink(f"/proc/thread-self/ns/{name}") for name in NAMESPACES}


def kernel() -> str:
    return Path("/proc/version").read_text()


def read_back(text: str, outside: Outside, *, provider: str, isolation: IsolationClass, paths: Paths) -> Isolation:
    """The isolation that ``SCRIPT``'s output shows. Raises ``ProviderFailed`` for output that is not its own."""
    try:
        status, spaces, mounts, devices, version, _ = text.split(f"{_MARK}\n")
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        inside = {words[-3]: words[-1] for words in map(str.split, spaces.splitlines()) if words[-2:-1] == ["->"]}
        own = outside.kernel is not None
        shared = () if own else tuple(name for name in NAMESPACES if inside[name] == outside.namespaces[name])
        effective, bounding = int(fields["CapEff"], 16), int(fields["CapBnd"], 16)
        no_new_privileges = fields.get("NoNewPrivs", "1" if own else "?") == "1"
        filtered = outside.calls_closed and fields.get("Seccomp", "2" if own else "?") == _FILTER
    except (KeyError, ValueError) as error:
        raise ProviderFailed(f"`{provider}` cannot read its isolation back: {error}") from error
    if version == outside.kernel:
        raise ProviderFailed(f"`{provider}` runs commands on this host's own kernel, and should not")
    return Isolation(
        isolation=isolation,
        provider=provider,
        uid=outside.uid,
        capabilities=f"effective {effective:x}, bounding {bounding:x}" if effective or bounding else "none",
        no_new_privileges=no_new_privileges,
        shared_namespaces=shared,
        interfaces=None if "net" in shared else _interfaces(devices),
        read_only=tuple(sorted(_read_only(mounts, paths.workspace))),
        filtered=filtered,
        limits=replace(outside.limits, disk_bytes=_disk(mounts, outside.volume, isolation, paths)),
    )


def _disk(mounts: str, volume: Volume | None, isolation: IsolationClass, paths: Paths) -> int | None:
    """The size of the volume, if all the places are in it; a kernel of its own numbers its devices anew."""
    if volume is None or isolation >= IsolationClass.KERNEL:
        return volume.bytes if volume else None
    devices = {words[4]: words[2] for words in map(str.split, mounts.splitlines())}
    within = all(devices.get(place) == volume.device for place in (paths.workspace, paths.output, paths.home))
    return volume.bytes if within else None


def _interfaces(devices: str) -> tuple[str, ...]:
    return tuple(line.partition(":")[0].strip() for line in devices.splitlines()[2:])


def _read_only(mounts: str, workspace: str) -> set[str]:
    """Read-only mount points at or below the workspace; of mounts on one place the last one holds."""
    modes = {}
    for line in mounts.splitlines():
        words = line.split(" ")
        point = words[4].encode("latin-1", "backslashreplace").decode("unicode_escape")  # \\040 for a space
        if point == workspace or point.startswith(f"{workspace}/"):
            modes[point] = words[5].split(",")
    return {point for point, options in modes.items() if "ro" in options}
