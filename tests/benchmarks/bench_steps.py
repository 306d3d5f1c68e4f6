"""A step's ``/bin/true`` in an open workspace, its output in files, beside the least that starts the same.

Run: ``python tests/benchmarks/bench_steps.py``, as root and as an ordinary user. Wall is the median, CPU the mean a
command, the guest's and all that it started included; asserts nothing. The target is a ratio of 1.3 to the floor,
the first line: for ``process`` trio's own ``run_process`` with pipes, for ``local`` bubblewrap with the host's system.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from runner.ports.provider import SandboxSpec, Workspace, WorkspaceRequest
from runner.providers.local import LocalProvider
from runner.providers.process import ProcessProvider
from runner.runtime.exec import open_logs, run_logged
from runner.safefs import trees
from runner.sandbox import bwrap
from runner.sandbox.processes import descendants

ROUNDS, EACH = 15, 20
TICKS = os.sysconf("SC_CLK_TCK")
TRUE = ["/bin/true"]
Action = Callable[[], Awaitable[object]]


async def measure(action: Action) -> tuple[float, float]:
    """Wall and CPU seconds a command."""
    used, wall = cpu(), time.perf_counter()
    for _ in range(EACH):
        await action()
    return (time.perf_counter() - wall) / EACH, (cpu() - used) / EACH


def cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used) + sum(map(ticks, descendants(os.getpid()))) / TICKS


def ticks(pid: int) -> int:
    """What a process that lives, as a guest does, and those that it waited for have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15]))


def logged(workspace: Workspace, folder: Path) -> Action:
    async def action() -> None:
        with open_logs(folder, "true") as logs:
            await run_logged(workspace, TRUE, logs)

    return action


def bubblewrap() -> Action:
    """One run of bubblewrap that shows the host's system, by ``subprocess``."""
    argv = [Path(*bwrap.binary()), *bwrap.system(), "--unshare-all", "--", *TRUE]

    async def action() -> None:
        subprocess.run(argv, check=True, env={}, stdin=subprocess.PIPE, capture_output=True)

    return action


async def compare(title: str, actions: dict[str, Action]) -> None:
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in actions}
    for _ in range(ROUNDS):
        for name, action in actions.items():
            costs[name].append(await measure(action))
    found = {}
    for name, rows in costs.items():
        walls, cpus = zip(*rows, strict=True)
        found[name] = statistics.median(walls), statistics.mean(cpus)
    floor = next(iter(found.values()))
    print(title)
    for name, (wall, cpu) in found.items():
        ratio = f"wall {wall / floor[0]:.2f} cpu {cpu / floor[1]:.2f}"
        print(f"  {name:40} wall {wall * 1e3:6.2f} ms  cpu {cpu * 1e3:6.2f} ms  ratio {ratio}")


def piped(uid: int | None) -> Action:
    """trio's own way, as the user that the workspace's commands run as."""
    user = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}

    async def action() -> None:
        await trio.run_process(TRUE, stdin=b"", capture_stdout=True, capture_stderr=True, **user)

    return action


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for provider in (ProcessProvider(home), LocalProvider(home)):
            handle = await provider.create(WorkspaceRequest(id=f"{provider.name}-1", run="run", nonce="nonce"))
            uid = handle.uid if trees.can_chown() else None
            if isinstance(provider, LocalProvider):
                actions = {"bubblewrap": bubblewrap()}
            else:
                actions = {"trio.run_process, same user": piped(uid), "trio.run_process, our user": piped(None)}
            async with provider.open(handle, SandboxSpec()) as workspace:
                await compare(provider.name, actions | {"a step": logged(workspace, home)})
            await provider.destroy(handle)


if __name__ == "__main__":
    trio.run(main)
