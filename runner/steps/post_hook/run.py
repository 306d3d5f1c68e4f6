"""See ``plan``. Runs in a sandbox of its own, since the agent's sandbox is gone by now."""

from __future__ import annotations

from runner.core.model import Outcome, succeeded
from runner.core.plural import plural
from runner.runtime.context import RunContext
from runner.runtime.exec import open_logs, run_command
from runner.runtime.network import open_network
from runner.steps.post_hook.plan import PostHookBody
from runner.steps.setup.plan import command_words


async def perform(body: PostHookBody, run: RunContext) -> Outcome:
    warnings: list[str] = []
    workspace = await run.open(body.mount_plan)
    network = open_network(run, workspace, "post_hook", body.network)
    async with network as proxied:
        env = {**run.variables(workspace.paths), **proxied, **run.fill_all(body.env)}
        with open_logs(run.paths.logs, "post_hook") as logs:
            for argv in body.commands:
                exit = await run_command(run, workspace, argv, logs, env=env)
                if not exit.ok:
                    warnings.append(f"post-hook `{command_words(argv)}` {exit}")
    await run.sandboxes.close()
    return succeeded(plural(len(body.commands), "hook"), warnings=tuple(warnings))
