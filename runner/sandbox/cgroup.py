"""Resource limits by control groups, version 1 and 2, where this host lets us make a directory for them.

``find_hierarchies`` says where; ``open_groups`` makes the directories for one sandbox, and removes them with all that
runs in them. Version 1 has a hierarchy for each controller; version 2 has one for all, in which a group that holds
processes cannot delegate controllers, so the runner first moves to a group of its own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import trio
from msgspec import Struct

from runner.core.errors import CleanUpIncomplete, ProviderFailed
from runner.core.model import Feature, Limits
from runner.ports.provider import KILL_GRACE

if TYPE_CHECKING:
    from runner.guest.client import Guest

CONTROLLERS = {Feature.MEMORY: "memory", Feature.CPU: "cpu", Feature.PIDS: "pids"}
_PERIOD = 100_000  # microseconds
_OWN_GROUP = "runner-itself"


class Hierarchies(Struct, frozen=True):
    """Parent directories for new groups: one for each version 1 controller, and that of version 2 if it has any."""

    v1: Mapping[str, Path]
    v2: Path | None = None
    v2_controllers: frozenset[str] = frozenset()

    def directories(self, name: str, wanted: set[str]) -> dict[str, Path]:
        return {c: (self.v1[c] if c in self.v1 else self._v2(c)) / name for c in wanted}

    def _v2(self, controller: str) -> Path:
        if self.v2 is None or controller not in self.v2_controllers:
            raise ProviderFailed(f"this host has no writable cgroup for `{controller}`")
        return self.v2

    def has(self, controller: str) -> bool:
        return controller in self.v1 or controller in self.v2_controllers


def locate(mountinfo: str, membership: str) -> tuple[dict[str, Path], Path | None]:
    """Return the group of a process in each version 1 hierarchy, by controller, and in version 2."""
    v1: dict[str, Path] = {}
    v2 = None
    own = [line.split(":", 2) for line in membership.splitlines()]
    for line in mountinfo.splitlines():
        if " - cgroup" not in line:  # there may be hundreds
            continue
        mount, _, kind = line.partition(" - ")
        words, (filesystem, _, options) = mount.split(" "), kind.split(" ")[:3]
        root, point = words[3], Path(words[4])
        here = set(options.split(",")) & set(CONTROLLERS.values()) if filesystem == "cgroup" else set()
        for number, controllers, group in own:
            shared = here & set(controllers.split(","))
            if not shared and (filesystem, number) != ("cgroup2", "0"):
                continue  # before any path is made: there may be hundreds
            inside = Path(group).relative_to(root) if Path(group).is_relative_to(root) else Path()
            if shared:
                v1.update(dict.fromkeys(shared, point / inside))
            else:
                v2 = point / inside
    return v1, v2


def _mountinfo() -> str:
    """Read the mounts with names as bytes: a mount point need not be text."""
    return Path("/proc/self/mountinfo").read_text(errors="surrogateescape")


def find_hierarchies() -> Hierarchies:
    """Find the hierarchies that this process may write to."""
    v1, v2 = locate(_mountinfo(), Path("/proc/self/cgroup").read_text())
    writable = {controller: path for controller, path in v1.items() if os.access(path, os.W_OK)}
    if v2 is not None and v2.name == _OWN_GROUP:
        v2 = v2.parent
    if v2 is None or not os.access(v2 / "cgroup.procs", os.W_OK):
        return Hierarchies(writable)
    offered = frozenset((v2 / "cgroup.controllers").read_text().split()) & set(CONTROLLERS.values())
    return Hierarchies(writable, v2, offered)


class Counters(Protocol):
    """The limits of a sandbox, and what the kernel has counted in it as of the last ``update``."""

    async def watch(self, guest: Guest) -> None:
        """Begin to count, with the sandbox's guest where that is needed."""

    async def update(self) -> None: ...
    def oom_kills(self) -> int: ...
    def limits(self) -> Limits: ...


class ControlGroups:
    """The control groups of one sandbox. Without limits there are none, and every method does nothing."""

    def __init__(self, directories: Mapping[str, Path]) -> None:
        self._directories = directories
        self._oom_kills = 0
        self.needed = bool(directories)

    @property
    def paths(self) -> dict[str, str]:
        """The directories by controller."""
        return {controller: str(directory) for controller, directory in self._directories.items()}

    def join(self, pid: int, *, itself: bool = False) -> None:
        """Move a process in; its descendants start there. With ``itself`` only where the process cannot do it."""
        for directory in set(self._directories.values()):
            if not itself or _is_v2(directory):
                (directory / "cgroup.procs").write_text(str(pid))

    @contextmanager
    def open_task_files(self) -> Iterator[list[int]]:
        """Open the files in which a process writes "0" to move itself, where it can."""
        with ExitStack() as stack:
            lists = [directory / "tasks" for directory in set(self._directories.values()) if not _is_v2(directory)]
            yield [stack.enter_context(path.open("wb", buffering=0)).fileno() for path in lists]

    async def watch(self, guest: Guest) -> None:
        """Do nothing: the kernel counts, and each look is new."""

    async def update(self) -> None:
        """Do nothing, as ``watch``."""

    def oom_kills(self) -> int:
        """Return how many processes the kernel killed here for lack of memory; the last count once a group is gone."""
        if directory := self._directories.get("memory"):
            counts = directory / ("memory.events" if _is_v2(directory) else "memory.oom_control")
            with suppress(OSError):  # removed, or being removed
                words = map(str.split, counts.read_text().splitlines())
                self._oom_kills = next((int(n) for word, n in words if word == "oom_kill"), 0)
        return self._oom_kills

    def limits(self) -> Limits:
        """Read the limits from the kernel."""
        read = {c: _read_limit(c, directory) for c, directory in self._directories.items()}
        memory, pids = read.get("memory"), read.get("pids")
        return Limits(
            cpus=read.get("cpu"),
            memory_bytes=None if memory is None else int(memory),
            pids=None if pids is None else int(pids),
        )

    def kill(self) -> None:
        """Kill every process in the groups."""
        pids = {int(pid) for d in self._directories.values() for pid in (d / "cgroup.procs").read_text().split()}
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def remove(self) -> None:
        """Kill every process and remove the groups. Raises ``CleanUpIncomplete`` when a process does not die."""
        with trio.move_on_after(KILL_GRACE):
            while self._directories:
                try:
                    self.kill()
                    for directory in set(self._directories.values()):
                        directory.rmdir()
                    self._directories = {}
                except FileNotFoundError:
                    self._directories = {c: d for c, d in self._directories.items() if d.exists()}
                except OSError:  # busy: killed processes are not gone yet
                    await trio.sleep(0.01)
        if self._directories:
            raise CleanUpIncomplete(f"control groups remain: {', '.join(map(str, self._directories.values()))}")


def missing_limits() -> dict[Feature, str]:
    """Return the limits that cannot be set on this host, with the reason."""
    hierarchies = find_hierarchies()
    return {f: f"no writable cgroup for {c}" for f, c in CONTROLLERS.items() if not hierarchies.has(c)}


def require_limits(limits: Limits, provider: str) -> None:
    """Raise ``ProviderFailed`` for limits that cannot be set here."""
    wanted = {c for c, value in _wanted(limits).items() if value is not None}
    lacking = [reason for f, reason in missing_limits().items() if CONTROLLERS[f] in wanted]
    if lacking:
        raise ProviderFailed(f"`{provider}` cannot set limits: {'; '.join(lacking)}")


def find_groups(workspace: str) -> ControlGroups:
    """Find the control groups that a killed runner left behind for a workspace, where new ones would be made."""
    hierarchies = find_hierarchies()
    parents = {**dict.fromkeys(sorted(hierarchies.v2_controllers), hierarchies.v2), **hierarchies.v1}
    named = {c: parent / f"runner-{workspace}" for c, parent in parents.items() if parent is not None}
    return ControlGroups({c: directory for c, directory in named.items() if directory.is_dir()})


def groups_of(pid: int, limits: Limits) -> ControlGroups:
    """Find the control groups, made by another program, that limit a process. Raises ``OSError``."""
    v1, v2 = locate(_mountinfo(), Path(f"/proc/{pid}/cgroup").read_text())
    wanted = [controller for controller, value in _wanted(limits).items() if value is not None]
    found = {controller: v1.get(controller, v2) for controller in wanted}
    return ControlGroups({controller: directory for controller, directory in found.items() if directory is not None})


def find_stale_groups(workspace: str) -> ControlGroups:
    """Find them anywhere on this host: the process that cleans up may be in another group."""
    name = f"runner-{workspace}"
    mounts = (line.split(" ") for line in _mountinfo().splitlines())
    points = [words[4] for words in mounts if words[words.index("-") + 1] in ("cgroup", "cgroup2")]
    found = [Path(top, name) for point in points for top, inner, _ in os.walk(point) if name in inner]
    return ControlGroups({str(directory): directory for directory in found})


@asynccontextmanager
async def open_groups(workspace: str, limits: Limits) -> AsyncIterator[ControlGroups]:
    """Make control groups for ``limits``, gone with the block. Raises ``ProviderFailed``."""
    knobs = {c: value for c, value in _wanted(limits).items() if value is not None}
    if not knobs:
        yield ControlGroups({})
        return
    await find_groups(workspace).remove()
    hierarchies = find_hierarchies()
    directories = hierarchies.directories(f"runner-{workspace}", set(knobs))
    group = ControlGroups(directories)
    try:
        if set(knobs) - set(hierarchies.v1) and hierarchies.v2 is not None:
            _delegate(hierarchies.v2, set(knobs) - set(hierarchies.v1))
        for controller, directory in directories.items():
            directory.mkdir(exist_ok=True)
            for name, value in _settings(controller, knobs[controller], v2=_is_v2(directory)).items():
                (directory / name).write_text(value)
    except OSError as error:
        await find_groups(workspace).remove()
        raise ProviderFailed(f"the limits of workspace `{workspace}` cannot be set: {error}") from error
    try:
        yield group
    finally:
        with trio.CancelScope(shield=True):
            await group.remove()


def _wanted(limits: Limits) -> dict[str, float | None]:
    return {"memory": limits.memory_bytes, "cpu": limits.cpus, "pids": limits.pids}


def _settings(controller: str, value: float, *, v2: bool) -> dict[str, str]:
    quota = str(int(value * _PERIOD))
    match controller, v2:
        case "memory", True:
            return {"memory.max": str(int(value)), "memory.swap.max": "0"}
        case "memory", False:
            return {"memory.limit_in_bytes": str(int(value))}
        case "cpu", True:
            return {"cpu.max": f"{quota} {_PERIOD}"}
        case "cpu", False:
            return {"cpu.cfs_period_us": str(_PERIOD), "cpu.cfs_quota_us": quota}
        case _:
            return {"pids.max": str(int(value))}


def _read_limit(controller: str, directory: Path) -> float | None:
    """``None`` where somebody has lifted it."""
    v2 = _is_v2(directory)
    match controller:
        case "memory":
            text = (directory / ("memory.max" if v2 else "memory.limit_in_bytes")).read_text()
        case "cpu":
            quota = (directory / ("cpu.max" if v2 else "cpu.cfs_quota_us")).read_text().split()[0]
            return None if quota in ("max", "-1") else int(quota) / _PERIOD
        case _:
            text = (directory / "pids.max").read_text()
    return None if text == "max\n" else int(text)


def _is_v2(directory: Path) -> bool:
    return (directory.parent / "cgroup.controllers").exists()


def _delegate(parent: Path, controllers: set[str]) -> None:
    """Delegate controllers to the children of this process's version 2 group."""
    control = parent / "cgroup.subtree_control"
    if controllers <= set(control.read_text().split()):
        return
    if (parent / "cgroup.type").exists():  # not the root group, which may hold processes beside its children
        aside = parent / _OWN_GROUP
        aside.mkdir(exist_ok=True)
        for pid in (parent / "cgroup.procs").read_text().split():
            (aside / "cgroup.procs").write_text(pid)
    control.write_text(" ".join(f"+{controller}" for controller in sorted(controllers)))


def describe_group(pid: int) -> str:
    """Say where a process is, as in `` in cgroup `/runner-w` ``; empty for our own group or an ended process."""
    try:
        groups = _groups(str(pid)) - _groups("self")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return f" in cgroup {', '.join(f'`{group}`' for group in sorted(groups))}" if groups else ""


def _groups(pid: str) -> set[str]:
    lines = Path(f"/proc/{pid}/cgroup").read_text(errors="replace").splitlines()
    return {line.split(":", 2)[2] for line in lines}
