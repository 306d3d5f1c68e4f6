"""A program that starts, recovers and resumes runs of one project, each in a fork, and kills them at a chosen point.

One request a line, as JSON; the answer is how the fork ended, how many commits it began, and its effects. A fork costs
milliseconds where a new interpreter costs half a second. The parent never has a thread.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import secrets
import signal
import socket
import sqlite3
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio
from msgspec.structs import replace

from runner.core.errors import RunnerError
from runner.core.model import Exit
from runner.core.nurseries import unwrapping_groups
from runner.core.settings import Settings
from runner.ops.host.state import make_home, this_runner
from runner.ops.planning.make_plan import PlanResult, Request, make_plan
from runner.ops.runs.dependencies import dependencies_of
from runner.ops.runs.history import find_run
from runner.ops.runs.recover import recover_runs
from runner.ops.runs.resume import plan_resume, start_resumed_in
from runner.ports.provider import Provider
from runner.ports.store import Store
from runner.providers import docker, gvisor, local
from runner.store.sqlite import open_store
from tests.support import effects
from tests.support.fake_provider import FakeProvider, Script, Scripted
from tests.support.forked import change_user, load_everything
from tests.support.runs import apply_in

FAULTS = {"ENOSPC": sqlite3.SQLITE_FULL, "EIO": sqlite3.SQLITE_IOERR}
SECONDS = 60  # until a fork is given up


def main() -> None:
    user = int(sys.argv[2])
    planned = _planned(Path(sys.argv[1]), user)
    load_everything()
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        code, calls = _fork(lambda request=request: trio.run(_perform, planned, request), request, user)
        count = _count(request)
        commits = len(count.read_bytes()) if count.exists() else 0
        print(json.dumps({"code": code, "commits": commits, "calls": calls}), flush=True)


def _planned(folder: Path, user: int) -> PlanResult:
    """Made in a fork, because planning starts threads, and a fork of a process with threads cannot be trusted."""
    reading, writing = os.pipe()

    def plan() -> int:
        if user:
            change_user(user)
        planned = trio.run(make_plan, folder, _settings(folder / "unused"))
        with open(writing, "wb") as pipe:
            pickle.dump((planned.plan, planned.facts), pipe)
        return 0

    pid = os.fork()
    if pid == 0:
        os._exit(plan())
    os.close(writing)
    with open(reading, "rb") as pipe:
        plan_, facts = pickle.load(pipe)
    os.waitpid(pid, 0)
    return PlanResult(plan=plan_, facts=facts, path=folder, warnings=(), request=Request(), documents={}, settings={})


def _fork(action: Callable[[], int], request: dict[str, Any], user: int) -> tuple[int, list[str]]:
    """The exit code, or the negative number of the signal that ended it, and its effects if they are watched: it dies
    right before number ``call`` of them, or its writes fail as ``write`` says, and then it is these that are told."""
    call, write = request.get("call", 0), request.get("write")
    fault = effects.Fault(**write) if write else None
    watching = "call" in request or fault is not None
    watcher, watched = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        watcher.close()
        signal.alarm(SECONDS)
        if watching:
            effects.submit(watched, writes=fault is not None)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if user:
            change_user(user)
        code = 99
        try:
            code = action()
        except RunnerError as error:
            code = error.exit_code
        finally:
            if code == 99:
                sys.excepthook(*sys.exc_info())
            os._exit(code)
    watched.close()
    with watcher:
        calls = effects.watch(pid, watcher, call, fault) if watching else []
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), ["write"] * fault.seen if fault else calls


async def _perform(planned: PlanResult, request: dict[str, Any]) -> int:
    settings = _settings(Path(request["home"]))
    make_home(settings)
    hook = _hook(_count(request), request)
    path, runner = settings.home / "state.db", this_runner(settings.home)
    async with open_store(path, entropy=secrets.token_bytes, hook=hook, runner=runner) as store:
        with unwrapping_groups():
            return await _in_store(planned, request, settings, store)


async def _in_store(planned: PlanResult, request: dict[str, Any], settings: Settings, store: Store) -> int:
    deps = replace(dependencies_of(settings, store), provider=lambda name: _provider(name, request, settings))
    if request["what"] == "apply":
        records = await apply_in(planned, settings, store, deps)
        return max(record.exit_code or 0 for record in records)
    if request["what"] == "resume":
        resuming = await plan_resume(await find_run(settings, request["run"]), None, settings)
        async with start_resumed_in(resuming, settings, store, deps) as handle:
            return (await handle.wait()).exit_code or 0
    names = ["local", "process"] if request["provider"] == "chain" else [request["provider"]]
    recovery = await recover_runs(settings, store, deps, names, None, dry_run=False)
    return 0 if recovery.clean else 7


def _settings(home: Path) -> Settings:
    names = ("PATH", "DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH")
    env = {name: os.environ[name] for name in names if name in os.environ}
    return Settings.from_env({"RUNNER_HOME": str(home / "state"), **env})


class Named(FakeProvider):
    """A provider of a chain, of which the first fails at whatever it is asked to run."""

    def __init__(self, name: str, home: Path, script: Script) -> None:
        self.name = name
        super().__init__(home, script if name == "process" else lambda argv: Scripted(Exit(code=1)))


def _provider(name: str, request: dict[str, Any], settings: Settings) -> Provider:
    if real := {"local": local, "docker": docker, "gvisor": gvisor}.get(request["provider"]):
        return real.provider(settings)

    def play(argv: Sequence[str]) -> Scripted:
        """Whatever is run leaves work behind, and a witness of it outside."""
        for tree in settings.home.glob("projects/default/workspaces/*"):
            (tree / "made").write_text("work\n")
            (settings.home.parent / "witness").touch()
        return Scripted()

    return Named(name, settings.home, play) if request["provider"] == "chain" else FakeProvider(settings.home, play)


def _count(request: dict[str, Any]) -> Path:
    """In the home, unless that is on a disk which will be full."""
    return Path(request.get("count", f"{request['home']}/commits"))


def _hook(count: Path, request: dict[str, Any]) -> Callable[[str], None]:
    """Die, or fail, at the point ``point`` of the ``at``-th commit; with ``until`` also at those up to that one.

    With ``ballast`` the disk that this file is on is filled to the last byte instead.
    """
    calls = itertools.count(1)
    count.unlink(missing_ok=True)

    def hook(point: str) -> None:
        if point == "before":
            with count.open("ab") as file:
                file.write(b".")
        if point != request.get("point"):
            return
        number = next(calls)
        if not request["at"] <= number <= request.get("until", request["at"]):
            return
        if ballast := request.get("ballast"):
            fill(Path(ballast))
            return
        if fault := request.get("fault"):
            error = sqlite3.OperationalError(fault)
            error.sqlite_errorcode = FAULTS[fault]
            raise error
        os.kill(os.getpid(), signal.SIGKILL)

    return hook


def fill(ballast: Path) -> None:
    with suppress(OSError), ballast.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)


if __name__ == "__main__":
    main()
