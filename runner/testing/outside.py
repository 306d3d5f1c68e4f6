"""Workspaces as an outsider sees them: processes, mounts and control groups of this host."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from runner.sandbox import processes

OURS = f".{os.getpid()}"  # the fraction of every long sleep, to tell those of a suite beside us


def read(path: str) -> bytes:
    """Read a file: hundreds of them for each test, and ``Path`` costs more than reading."""
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def fields(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat``, from the state on; empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def alive(pid: int) -> bool:
    return fields(pid)[:1] not in ([], ["Z"], ["X"])


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(pid: int) -> list[int]:
    """Return the living descendants, nearest first."""
    parents = {child: int(stat[1]) for child in pids() if (stat := fields(child)) and stat[0] not in "ZX"}
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def marked(mark: str) -> list[int]:
    """The living processes with this mark in their environment."""
    found = []
    for pid in pids():
        try:
            if f"MARK={mark}".encode() in read(f"/proc/{pid}/environ") and alive(pid):
                found.append(pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def eventually(condition: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def cmdline(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def sleepers(seconds: int) -> list[str]:
    """Processes of ours that sleep so long."""
    words = f"sleep\0{seconds}{OURS}\0".encode()
    return [pid for pid in filter(str.isdigit, os.listdir("/proc")) if cmdline(pid) == words]


def living_of(*users: int) -> list[int]:
    """The living processes of some of this host's users."""

    def belongs(pid: int) -> bool:
        try:
            return processes.user(pid) in users and alive(pid)
        except (FileNotFoundError, ProcessLookupError):
            return False

    return list(filter(belongs, pids()))


def groups(top: str = "/sys/fs/cgroup") -> Iterator[str]:
    """The paths of all control groups. Most have no others inside, hence two links only, and are not read."""
    with suppress(OSError):  # others come and go meanwhile
        for entry in os.scandir(top) if os.stat(top).st_nlink > 2 else ():
            if entry.is_dir(follow_symlinks=False):
                yield entry.path
                yield from groups(entry.path)


def volumes_of(home: Path) -> list[str]:
    """The loop devices of volumes below a home."""
    found = []
    for place in Path("/sys/block").glob("loop*/loop"):
        with suppress(OSError):  # one that others have just given back
            found += [f"/dev/{place.parent.name}"] if str(home) in (place / "backing_file").read_text() else []
    return found


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
