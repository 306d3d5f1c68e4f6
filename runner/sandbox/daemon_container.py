"""A container as its daemon shows it, which may run on another host: how it ends, and what it may use.

Nothing here looks at this host's processes or control groups. What the kernel counts is read from inside, by a command
that the guest runs, so it costs a round trip.
"""

from __future__ import annotations

from contextlib import suppress

import trio

from runner.core.errors import Escaped, ProviderFailed, WorkspaceLost
from runner.core.model import Limits
from runner.guest.client import Guest
from runner.guest.framing import KEEP, Request
from runner.ports.provider import KILL_GRACE
from runner.sandbox.docker_api import Engine

_TOP = "/sys/fs/cgroup"
_FILES = (
    *("memory.max", "memory.events", "cpu.max", "pids.max"),
    *("memory/memory.limit_in_bytes", "memory/memory.oom_control", "pids/pids.max"),
    *("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"),
)
_SCRIPT = f"""cd {_TOP} && for file in {" ".join(_FILES)}; do
[ -r "$file" ] && while IFS= read -r line; do printf '%s %s\\n' "${{file##*/}}" "$line"; done <"$file"
done; :"""
_NO_LIMIT = 1 << 62  # bytes; version 1 shows a number of pages
_UPDATE = 5.0  # seconds


class DaemonLimits:
    """The limits of a container and the processes killed in it, as of the last ``update``."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}
        self._guest: Guest | None = None

    async def watch(self, guest: Guest) -> None:
        self._guest = guest
        await self.update()

    async def update(self) -> None:
        """Read the counters anew; those of a sandbox that has ended stay."""
        if self._guest is None:
            return
        text = b""
        request = Request(argv=["/bin/sh", "-c", _SCRIPT], env={}, cwd="/", uid=KEEP, gid=KEEP)
        with trio.move_on_after(_UPDATE), suppress(ProviderFailed, WorkspaceLost, trio.BrokenResourceError):
            async with self._guest.exec(request, grace=0) as command:
                while chunk := await command.stdout.receive_some(1 << 12):
                    text += chunk
            lines = (line.partition(" ")[::2] for line in text.decode(errors="replace").splitlines())
            self._found = {
                (f"{name} {rest.split(' ')[0]}" if name in ("memory.events", "memory.oom_control") else name): rest
                for name, rest in lines
            }

    def oom_kills(self) -> int:
        for name in ("memory.events oom_kill", "memory.oom_control oom_kill"):
            if name in self._found:
                return int(self._found[name].split(" ")[1])
        return 0

    def limits(self) -> Limits:
        memory = _number(self._found.get("memory.max") or self._found.get("memory.limit_in_bytes"))
        quota, _, period = self._found.get("cpu.max", "").partition(" ")
        quota, period = (
            quota or self._found.get("cpu.cfs_quota_us", ""),
            period or self._found.get("cpu.cfs_period_us", ""),
        )
        cpu, whole = _number(quota), _number(period)
        return Limits(
            cpus=cpu / whole if cpu and whole else None,
            memory_bytes=None if memory is None or memory > _NO_LIMIT else memory,
            pids=_number(self._found.get("pids.max")),
        )


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


class DaemonInit:
    """The first process of a container, ended through its daemon. ``what`` names the workspace in messages."""

    def __init__(self, engine: Engine, container: str, limits: DaemonLimits, what: str) -> None:
        self._engine = engine
        self._container = container
        self._limits = limits
        self._what = what
        self._ended = trio.Event()

    def group(self, limits: Limits) -> DaemonLimits:
        return self._limits

    async def wait_ended(self) -> None:
        """Wait until the container is known to have ended. The end of its output may tell it earlier."""
        await self._ended.wait()

    def kill(self) -> None:
        """Begin to kill it; ``end`` tells whether that succeeded."""
        trio.lowlevel.spawn_system_task(self._kill)

    async def _kill(self) -> None:
        with suppress(ProviderFailed):
            await self._engine.kill(self._container)
            self._ended.set()

    async def end(self) -> None:
        """Kill it, and wait until it is gone. Raises ``Escaped``."""
        if self._ended.is_set():
            return
        try:
            with trio.fail_after(2 * KILL_GRACE):
                await self._engine.kill(self._container)
        except (ProviderFailed, trio.TooSlowError) as error:
            raise Escaped(f"the container of {self._what} may still run: {error}") from error
        self._ended.set()
