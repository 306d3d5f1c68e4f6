"""Resource limits by control groups, version 1 and 2, where this host lets us make a directory for them.

``find`` says where; ``open_group`` makes the directories of one opening, and removes them with all that runs
in them. Version 1 has a hierarchy a controller; version 2 has one for all, in which a group that
holds processes cannot hand controllers on, so we first step aside into a group of our own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import trio

from runner.core.errors import CleanUpIncomplete, ProviderFailed
from runner.core.model import Feature, Limits
from runner.ports.provider import KILL_GRACE

CONTROLLERS = {Feature.MEMORY: "memory", Feature.CPU: "cpu", Feature.PIDS: "pids"}
_PERIOD = 100_000  # microseconds
_ASIDE = "runner-itself"


@dataclass(frozen=True)
class Hierarchies:
    """Where groups can be made: the parent directory of each version 1 controller, and version 2's if it has any."""

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
    """Our own group in each version 1 hierarchy by controller, and in version 2, of the kernel's two texts."""
    v1: dict[str, Path] = {}
    v2 = None
    own = [line.split(":", 2) for line in membership.splitlines()]
    for line in mountinfo.splitlines():
        if " - cgroup" not in line:  # of hundreds
            continue
        mount, _, kind = line.partition(" - ")
        words, (filesystem, _, options) = mount.split(" "), kind.split(" ")[:3]
        root, point = words[3], Path(words[4])
        here = set(options.split(",")) & set(CONTROLLERS.values()) if filesystem == "cgroup" else set()
        for number, controllers, group in own:
            shared = here & set(controllers.split(","))
            if not shared and (filesystem, number) != ("cgroup2", "0"):
                continue  # before any path is made, of which there would be hundreds
            inside = Path(group).relative_to(root) if Path(group).is_relative_to(root) else Path()
            if shared:
                v1.update(dict.fromkeys(shared, point / inside))
            else:
                v2 = point / inside
    return v1, v2


def _mountinfo() -> str:
    """With names as they are: a mount point need not be text."""
    return Path("/proc/self/mountinfo").read_text(errors="surrogateescape")


def find() -> Hierarchies:
    """The hierarchies as they are now; only those that we may write to."""
    v1, v2 = locate(_mountinfo(), Path("/proc/self/cgroup").read_text())
    writable = {controller: path for controller, path in v1.items() if os.access(path, os.W_OK)}
    if v2 is not None and v2.name == _ASIDE:
        v2 = v2.parent
    if v2 is None or not os.access(v2 / "cgroup.procs", os.W_OK):
        return Hierarchies(writable)
    offered = frozenset((v2 / "cgroup.controllers").read_text().split()) & set(CONTROLLERS.values())
    return Hierarchies(writable, v2, offered)


class Group:
    """The control groups of one opening. Without limits it has none, and everything here does nothing."""

    def __init__(self, directories: Mapping[str, Path]) -> None:
        self._directories = directories
        self._oom_kills = 0
        self.needed = bool(directories)

    @property
    def words(self) -> dict[str, str]:
        """Its directories by controller."""
        return {controller: str(directory) for controller, directory in self._directories.items()}

    def join(self, pid: int, *, itself: bool = False) -> None:
        """Move a process in; its descendants are born there. One that moves ``itself`` only where it cannot."""
        for directory in set(self._directories.values()):
            if not itself or _is_v2(directory):
                (directory / "cgroup.procs").write_text(str(pid))

    @contextmanager
    def open_lists(self) -> Iterator[list[int]]:
        """Descriptors of the lists of tasks in which a process writes "0" to move itself, where it can."""
        with ExitStack() as stack:
            lists = [directory / "tasks" for directory in set(self._directories.values()) if not _is_v2(directory)]
            yield [stack.enter_context(path.open("wb", buffering=0)).fileno() for path in lists]

    def oom_kills(self) -> int:
        """How often the kernel has killed here for want of memory; as last seen, once the group is gone."""
        if directory := self._directories.get("memory"):
            counts = directory / ("memory.events" if _is_v2(directory) else "memory.oom_control")
            with suppress(OSError):  # removed, or on its way
                words = map(str.split, counts.read_text().splitlines())
                self._oom_kills = next((int(n) for word, n in words if word == "oom_kill"), 0)
        return self._oom_kills

    def limits(self) -> Limits:
        """The ceilings as the kernel has them."""
        read = {c: _read_limit(c, directory) for c, directory in self._directories.items()}
        memory, pids = read.get("memory"), read.get("pids")
        return Limits(
            cpus=read.get("cpu"),
            memory_bytes=None if memory is None else int(memory),
            pids=None if pids is None else int(pids),
        )

    def kill(self) -> None:
        """Kill everything that is inside now."""
        pids = {int(pid) for d in self._directories.values() for pid in (d / "cgroup.procs").read_text().split()}
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def remove(self) -> None:
        """Kill and remove. Raises ``CleanUpIncomplete`` when something inside does not die."""
        with trio.move_on_after(KILL_GRACE):
            while self._directories:
                try:
                    self.kill()
                    for directory in set(self._directories.values()):
                        directory.rmdir()
                    self._directories = {}
                except FileNotFoundError:
                    self._directories = {c: d for c, d in self._directories.items() if d.exists()}
                except OSError:  # busy: what was killed is not gone yet
                    await trio.sleep(0.01)
        if self._directories:
            raise CleanUpIncomplete(f"control groups remain: {', '.join(map(str, self._directories.values()))}")


def missing() -> dict[Feature, str]:
    """The limits that cannot be set on this host, with the reason."""
    hierarchies = find()
    return {f: f"no writable cgroup for {c}" for f, c in CONTROLLERS.items() if not hierarchies.has(c)}


def check(limits: Limits, provider: str) -> None:
    """Refuse limits that could not be kept. Raises ``ProviderFailed``."""
    wanted = {c for c, value in _wanted(limits).items() if value is not None}
    lacking = [reason for f, reason in missing().items() if CONTROLLERS[f] in wanted]
    if lacking:
        raise ProviderFailed(f"`{provider}` cannot keep the limits: {'; '.join(lacking)}")


def find_group(workspace: str) -> Group:
    """The control groups that an opening of a workspace left behind, if its runner was killed."""
    hierarchies = find()
    parents = {**dict.fromkeys(sorted(hierarchies.v2_controllers), hierarchies.v2), **hierarchies.v1}
    named = {c: parent / f"runner-{workspace}" for c, parent in parents.items() if parent is not None}
    return Group({c: directory for c, directory in named.items() if directory.is_dir()})


def group_of(pid: int, limits: Limits) -> Group:
    """The control groups of another's making that keep a process within ``limits``. Raises ``OSError``."""
    v1, v2 = locate(_mountinfo(), Path(f"/proc/{pid}/cgroup").read_text())
    wanted = [controller for controller, value in _wanted(limits).items() if value is not None]
    found = {controller: v1.get(controller, v2) for controller in wanted}
    return Group({controller: directory for controller, directory in found.items() if directory is not None})


def find_left(workspace: str) -> Group:
    """Those groups wherever on this host they are: whoever cleans up may itself be in another group."""
    name = f"runner-{workspace}"
    mounts = (line.split(" ") for line in _mountinfo().splitlines())
    points = [words[4] for words in mounts if words[words.index("-") + 1] in ("cgroup", "cgroup2")]
    found = [Path(top, name) for point in points for top, inner, _ in os.walk(point) if name in inner]
    return Group({str(directory): directory for directory in found})


@asynccontextmanager
async def open_group(workspace: str, limits: Limits) -> AsyncIterator[Group]:
    """The control groups for ``limits``, gone with the block. Raises ``ProviderFailed`` where they cannot be had."""
    knobs = {c: value for c, value in _wanted(limits).items() if value is not None}
    if not knobs:
        yield Group({})
        return
    await find_group(workspace).remove()
    hierarchies = find()
    directories = hierarchies.directories(f"runner-{workspace}", set(knobs))
    group = Group(directories)
    try:
        if set(knobs) - set(hierarchies.v1) and hierarchies.v2 is not None:
            _hand_on(hierarchies.v2, set(knobs) - set(hierarchies.v1))
        for controller, directory in directories.items():
            directory.mkdir(exist_ok=True)
            for name, value in _settings(controller, knobs[controller], v2=_is_v2(directory)).items():
                (directory / name).write_text(value)
    except OSError as error:
        await find_group(workspace).remove()
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


def _hand_on(parent: Path, controllers: set[str]) -> None:
    """Let the children of our own version 2 group have these controllers."""
    control = parent / "cgroup.subtree_control"
    if controllers <= set(control.read_text().split()):
        return
    if (parent / "cgroup.type").exists():  # not the topmost, which may hold processes beside its children
        aside = parent / _ASIDE
        aside.mkdir(exist_ok=True)
        for pid in (parent / "cgroup.procs").read_text().split():
            (aside / "cgroup.procs").write_text(pid)
    control.write_text(" ".join(f"+{controller}" for controller in sorted(controllers)))


def in_group(pid: int) -> str:
    """Where a process is, for people: as in `` in cgroup `/runner-w` ``; empty if that is our own, or it has ended."""
    try:
        groups = _groups(str(pid)) - _groups("self")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return f" in cgroup {', '.join(f'`{group}`' for group in sorted(groups))}" if groups else ""


def _groups(pid: str) -> set[str]:
    lines = Path(f"/proc/{pid}/cgroup").read_text(errors="replace").splitlines()
    return {line.split(":", 2)[2] for line in lines}
