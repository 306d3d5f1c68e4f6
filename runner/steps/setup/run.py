"""See ``plan``."""

from __future__ import annotations

from collections.abc import Mapping

import trio

from runner.core.model import Outcome, Reason, failed, succeeded
from runner.core.plural import plural
from runner.core.settings import limit
from runner.ports.provider import Workspace
from runner.runtime.context import RunContext
from runner.runtime.exec import LogFile, blame, open_logs, run_command, written
from runner.runtime.network import open_network
from runner.steps.setup.plan import SetupBody, command_words


async def perform(body: SetupBody, run: RunContext) -> Outcome:
    """Run the commands in order, stopping at the first that fails.

    With ``on_failure: warn`` a failed or slow command does not fail the run: the workspace is still
    usable, so the outcome is a success that carries a warning.
    """
    workspace = await run.open(body.mount_plan)
    network = open_network(run, workspace, "setup", body.network)
    with open_logs(run.paths.logs, "setup") as logs:
        async with network as proxied:
            env = {**run.variables(workspace.paths), **proxied}
            return await _run_all(body, run, workspace, logs, env)


async def _run_all(
    body: SetupBody, run: RunContext, workspace: Workspace, logs: tuple[LogFile, LogFile], env: Mapping[str, str]
) -> Outcome:
    for position, argv in enumerate(body.commands, start=1):
        since = written(logs)
        try:
            exit = await run_command(run, workspace, argv, logs, env=env, seconds=body.command_seconds)
            how = "" if exit.ok else str(exit)
        except trio.TooSlowError:
            how = f"timed out after {limit(body.command_seconds)}"
        if how:
            blame(run, "setup", logs, since)
            return _partial(body, position, how)
    return succeeded(plural(len(body.commands), "command"))


def _partial(body: SetupBody, position: int, how: str) -> Outcome:
    total = len(body.commands)
    text = f"setup command {position} of {total} {how}"
    if position < total:
        text += "; the rest were skipped"
    words = command_words(body.commands[position - 1])
    if body.may_fail:
        return succeeded(f"{position - 1} of {total} commands", warnings=(text,), details=(words,))
    return failed(Reason.SETUP, text, details=(words,))
