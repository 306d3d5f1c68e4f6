"""Isolation as a sandbox reports it from inside: a script for the sandbox, and a pure reader of its output."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from runner.core.errors import ProviderFailed
from runner.core.model import Isolation, IsolationClass, Limits
from runner.ports.provider import Paths, Reader
from runner.sandbox.volumes import Volume

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")

_MARK = "----"
# Waits at the end, so that the host can look at the living process too. The shell reads short files: programs are slow.
SCRIPT = f"""
cat /proc/self/status; echo {_MARK}
ls -l /proc/self/ns; echo {_MARK}
cat /proc/self/mountinfo; echo {_MARK}
while IFS= read -r line; do printf '%s\\n' "$line"; done </proc/net/dev; echo {_MARK}
while IFS= read -r line; do printf '%s\\n' "$line"; done </proc/version; echo {_MARK}
read -r _
"""
_SECTIONS = 5
_FILTER = "2"  # the kernel's number for a process with a seccomp filter


class HostView(Struct, frozen=True, kw_only=True):
    """Facts that only the host knows: its own namespaces by name, the user that the script ran as, the limits set.

    ``volume`` should hold the workspace's files. ``kernel`` is the host's, where the sandbox should have another: it
    then shares no namespace, and since it may not report ``no_new_privs``, its guest has to prevent new privileges.
    ``filtered``: the guest was refused the system calls that commands must not make.
    """

    namespaces: Mapping[str, str]
    uid: int
    limits: Limits
    volume: Volume | None = None
    kernel: str | None = None
    filtered: bool = False


async def receive(stdout: Reader) -> str:
    """Read what ``SCRIPT`` prints before it waits."""
    text = b""
    while text.count(f"{_MARK}\n".encode()) < _SECTIONS and (chunk := await stdout.receive_some(1 << 16)):
        text += chunk
    return text.decode(errors="replace")


def namespaces() -> dict[str, str]:
    """Return the namespaces of the calling thread by name."""
    return {name: os.readlink(f"/proc/thread-self/ns/{name}") for name in NAMESPACES}


def kernel() -> str:
    return Path("/proc/version").read_text()


def read_back(text: str, host: HostView, *, provider: str, isolation: IsolationClass, paths: Paths) -> Isolation:
    """Read the isolation from ``SCRIPT``'s output. Raises ``ProviderFailed`` for output that is not the script's."""
    try:
        status, spaces, mounts, devices, version, _ = text.split(f"{_MARK}\n")
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        inside = {words[-3]: words[-1] for words in map(str.split, spaces.splitlines()) if words[-2:-1] == ["->"]}
        own = host.kernel is not None
        shared = () if own else tuple(name for name in NAMESPACES if inside[name] == host.namespaces[name])
        effective, bounding = int(fields["CapEff"], 16), int(fields["CapBnd"], 16)
        no_new_privileges = fields.get("NoNewPrivs", "1" if own else "?") == "1"
        filtered = host.filtered and fields.get("Seccomp", "2" if own else "?") == _FILTER
    except (KeyError, ValueError) as error:
        raise ProviderFailed(f"`{provider}` cannot read its isolation back: {error}") from error
    if version == host.kernel:
        raise ProviderFailed(f"`{provider}` runs commands on this host's own kernel, and should not")
    return Isolation(
        isolation=isolation,
        provider=provider,
        uid=host.uid,
        capabilities=f"effective {effective:x}, bounding {bounding:x}" if effective or bounding else "none",
        no_new_privileges=no_new_privileges,
        shared_namespaces=shared,
        interfaces=None if "net" in shared else _interfaces(devices),
        read_only=tuple(sorted(_read_only(mounts, paths.workspace))),
        filtered=filtered,
        limits=replace(host.limits, disk_bytes=_disk(mounts, host.volume, isolation, paths)),
    )


def _disk(mounts: str, volume: Volume | None, isolation: IsolationClass, paths: Paths) -> int | None:
    """Return the size of the volume if it holds the whole workspace, as far as a sandbox's own kernel can tell."""
    if volume is None or isolation >= IsolationClass.KERNEL:
        return volume.bytes if volume else None
    devices = {words[4]: words[2] for words in map(str.split, mounts.splitlines())}
    within = all(devices.get(place) == volume.device for place in (paths.workspace, paths.output, paths.home))
    return volume.bytes if within else None


def _interfaces(devices: str) -> tuple[str, ...]:
    return tuple(line.partition(":")[0].strip() for line in devices.splitlines()[2:])


def _read_only(mounts: str, workspace: str) -> set[str]:
    """Return read-only mount points at or below the workspace; of several mounts on one point the last counts."""
    modes = {}
    for line in mounts.splitlines():
        words = line.split(" ")
        point = words[4].encode("latin-1", "backslashreplace").decode("unicode_escape")  # \\040 for a space
        if point == workspace or point.startswith(f"{workspace}/"):
            modes[point] = words[5].split(",")
    return {point for point, options in modes.items() if "ro" in options}
