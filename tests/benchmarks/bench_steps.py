"""A ``/bin/true`` with its output in files, without a guest, beside the least that starts the same.

Run: ``python tests/benchmarks/bench_steps.py``, as root and as an ordinary user. Medians of wall and CPU (ours
and the children's) a command; asserts nothing. The target is a ratio of 1.3 to the floor above it: for
``process`` trio's own ``run_process`` with pipes, for ``local`` bubblewrap with the same words and user.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from runner import trees
from runner.ports.provider import Opening, Workspace, WorkspaceRequest
from runner.providers._confined import Sandbox
from runner.providers.local import Local
from runner.providers.process import OnHost
from runner.steps._exec import open_logs, run_logged

ROUNDS, EACH = 15, 20
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
    return sum(each.ru_utime + each.ru_stime for each in used)


def logged(workspace: Workspace, folder: Path) -> Action:
    async def action() -> None:
        with open_logs(folder, "true") as logs:
            await run_logged(workspace, TRUE, logs)

    return action


def bubblewrap(sandbox: Sandbox, uid: int | None) -> Action:
    """The sandbox's own words, given to bubblewrap by ``subprocess``."""
    recipe, shell = sandbox._recipe, sandbox._shell
    argv = [shell.bwrap, *recipe.words, "--remount-ro", "/", "--chdir", "/workspace", "--", *TRUE]

    async def action() -> None:
        subprocess.run(
            argv,
            check=True,
            env={},
            stdin=subprocess.PIPE,
            capture_output=True,
            user=uid,
            group=uid,
            extra_groups=None if uid is None else [],
            pass_fds=recipe.descriptors,
        )

    return action


async def compare(title: str, actions: dict[str, Action]) -> None:
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in actions}
    for _ in range(ROUNDS):
        for name, action in actions.items():
            costs[name].append(await measure(action))
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in costs.items()}
    floor = next(iter(medians.values()))
    print(title)
    for name, (wall, cpu) in medians.items():
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
        for title, provider in {
            "process": OnHost(home, guest=False),
            "local": Local(home, guest=False),
            "local without a user of its own": Local(home, own_users=False, guest=False),
        }.items():
            handle = await provider.create(WorkspaceRequest(f"bench{len(title)}", "run", "nonce"))
            async with provider.open(handle, Opening()) as workspace:
                uid = handle.uid if trees.can_give() else None
                actions = {"trio.run_process, same user": piped(uid), "trio.run_process, our user": piped(None)}
                if isinstance(workspace, Sandbox):
                    actions = {"bubblewrap": bubblewrap(workspace, workspace._shell.uid)}
                await compare(title, actions | {"run_logged": logged(workspace, home)})
            await provider.destroy(handle)


if __name__ == "__main__":
    trio.run(main)
