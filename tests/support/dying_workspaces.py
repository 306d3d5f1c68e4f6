"""A program that works on workspaces in forks, each of which dies at a chosen commit of its store.

One request a line, as JSON: what to do, and at which commit and point of it to die, counted from 1; 0 never. With a
``call`` it dies right before that one of its effects instead. The answer is how the fork ended, its exit code or the
negative number of its signal, and how many effects it had. The parent never has a thread.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
from itertools import count
from pathlib import Path
from typing import Any

import trio

from runner.cli.streams import descriptor_streams
from runner.core.errors import RunnerError
from runner.core.nurseries import unwrapping_groups
from runner.core.settings import Settings
from runner.ops.host.state import this_runner
from runner.ops.runs.dependencies import dependencies_of
from runner.ops.workspaces import workspaces as ws
from runner.ops.workspaces.exec import CommandCancellation, execute
from runner.ops.workspaces.maintenance import complete_changes, sweep
from runner.ops.workspaces.workspace_lease import WorkspaceEnv
from runner.store.sqlite import open_store
from tests.support import effects


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        watcher, watched = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            watcher.close()
            if "call" in request:
                effects.submit(watched)
            try:
                os._exit(trio.run(_perform, request))
            except RunnerError as error:
                os._exit(error.exit_code)
        watched.close()
        with watcher:
            calls = effects.watch(pid, watcher, request["call"]) if "call" in request else []
        _, status = os.waitpid(pid, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), len(calls)]), flush=True)


async def _perform(request: dict[str, Any]) -> int:
    commits = count(1)
    now = 0

    def hook(point: str) -> None:
        nonlocal now
        now = next(commits) if point == "before" else now
        if [now, point] == [request.get("at"), request.get("point")]:
            os.kill(os.getpid(), signal.SIGKILL)

    settings = Settings.from_env({"RUNNER_HOME": request["home"], "PATH": os.environ["PATH"]})
    settings.home.mkdir(exist_ok=True)
    path, runner = settings.home / "state.db", this_runner(settings.home)
    async with open_store(path, entropy=secrets.token_bytes, hook=hook, runner=runner) as store:
        with unwrapping_groups():
            return await _do(
                WorkspaceEnv(settings=settings, store=store, deps=dependencies_of(settings, store)), request
            )


async def _do(env: WorkspaceEnv, request: dict[str, Any]) -> int:
    theirs = request.get("path")
    rows = await env.store.workspaces()
    match request["do"]:
        case "create":
            await ws.create(env, ws.WorkspaceOptions(path=Path(theirs) if theirs else None))
        case "exec":
            nothing = os.open(os.devnull, os.O_RDWR)
            streams = descriptor_streams(nothing, nothing, nothing)
            return await execute(env, rows[0].id, ["sh", "-c", "echo work > made"], streams, CommandCancellation())
        case "stop":
            await ws.stop(env, rows[0].id)
        case "destroy":
            await ws.destroy(env, rows[0].id)
        case "recover":
            done = await complete_changes(env, dry_run=False)
            await sweep(env, dry_run=False)
            return len([one for one in done if one.left is not None])
    return 0


if __name__ == "__main__":
    main()
