"""See ``plan``. The agent starts only in a sandbox whose isolation was read back and is what was asked for."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path

import trio
from msgspec import Struct
from msgspec.structs import replace

from runner.core.errors import IsolationMismatch
from runner.core.model import CommandStatus, Exit, Feature, Isolation, IsolationClass, Limits, Outcome
from runner.events import events as ev
from runner.ports.agent import Agent, AgentResult, AgentSetup, McpAccess, ModelAgent
from runner.ports.provider import Workspace, program_directory
from runner.runtime.cluster import open_cluster
from runner.runtime.context import RunContext, write_new
from runner.runtime.exec import Log, LogFile, RedactedLog, Shared, open_logs, run_command
from runner.runtime.incident_files import PROMPT, Delivery, open_log
from runner.runtime.mcp_servers import open_mcp_servers
from runner.runtime.network import open_network
from runner.runtime.restore import restore_tree
from runner.safefs import trees
from runner.spec import template
from runner.steps.agent.home import furnish
from runner.steps.agent.model import open_way
from runner.steps.agent.plan import AgentBody
from runner.steps.agent.variables import PROMPT as PROMPT_FILE
from runner.steps.agent.variables import standard
from runner.triage.prompt import compose, continued

STEP = "agent"
UNTESTED = "agent.untested-version"
CLOSED = 126  # what is said of a command that is there and cannot be run
SMALL_PROMPT = 64 << 10  # bytes; Linux takes 128 KiB for one variable


async def perform(body: AgentBody, run: RunContext) -> Outcome:
    workspace = await run.open(body.mount_plan)
    seen = await _read_back(body, run, workspace)
    run.results.agent_started = True
    prompt = run.deps.redact.clean(_prompt(body, run))
    await trio.to_thread.run_sync(_keep_prompt, body, run, prompt)
    work = _Work(body, run, workspace, prompt)
    agent = run.deps.agent(body.agent)
    try:
        async with (
            open_cluster(run, workspace, STEP, body.cluster),
            open_network(run, workspace, STEP, body.network) as work.proxied,
            open_mcp_servers(run, workspace, STEP, body.mcp_servers, work.variables()) as work.servers,
        ):
            if body.model is None:
                ended = await work.carry_out(AgentSetup(env={}))
            else:
                assert isinstance(agent, ModelAgent)  # as every one whose manifests may name a model
                opening = partial(open_way, skills=body.mount_plan.skills, mcp_servers=work.servers)
                async with opening(agent, body.model, run, workspace, STEP) as way:
                    ended = await work.carry_out(way.prepare(), way.access.key)
    finally:
        # Killing one command's tree is best effort among processes of one user; killing the sandbox is not.
        run.sandboxes.begin_close()
        _tell_commands(agent, run)
    await run.sandboxes.end_processes()
    outcome = agent.outcome(ended) if body.model is None else await way.judge(ended, run, STEP)
    run.results.agent_succeeded = outcome.ok
    if ended.exit.code != CLOSED or seen.isolation:
        return outcome
    return await trio.to_thread.run_sync(_name_closed, outcome, agent, body, seen.uid)


class _Work(Struct):
    """The inputs that an agent's commands share; ``proxied`` are variables that lead to the hosts they may reach.

    ``servers`` are the MCP servers that it may use.
    """

    body: AgentBody
    run: RunContext
    workspace: Workspace
    prompt: bytes
    proxied: Mapping[str, str] = {}
    servers: tuple[McpAccess, ...] = ()

    def variables(self) -> dict[str, str]:
        """Return what all that the agent starts has in its environment."""
        return {**self.run.variables(self.workspace.paths), **self.proxied, **self.run.fill_all(self.body.env)}

    async def carry_out(self, prepared: AgentSetup, key: str = "") -> AgentResult:
        """Prepare the agent's home and run its CLI on the prompt; what fails first is what it ended with."""
        run, workspace, body = self.run, self.workspace, self.body
        env = {**prepared.env, **self.variables()}
        argv = await run.deps.sub_runner(body.agent, _standard(body, run, workspace, self.prompt))
        furnishing = furnish(prepared, workspace.paths, body.mount_plan.skills)
        commands = [(furnishing, b"")] if furnishing else []
        commands += [(prepared.login, key.encode())] if prepared.login else []
        with open_logs(run.paths.logs, STEP) as logs:
            for words, stdin in commands:
                exit = await run_command(run, workspace, words, logs, env=env, stdin=stdin)
                if not exit.ok:
                    break
            else:
                await _tell_obeyed(run.deps.agent(body.agent), run)
                if (cli := body.cli) is not None and not cli.is_tested:
                    text = f"{argv[0]} {cli.found} is not the version that this runner is tested with, {cli.tested}"
                    await run.emit(ev.WarningIssued(UNTESTED, text, STEP))
                await run.emit(ev.AgentStarted(STEP, tuple(argv), cli.found if cli is not None else ""))
                async with self._heard(logs) as heard:
                    exit = await run_command(run, workspace, argv, heard, env=env, stdin=self.prompt)
        out, err = (log.path for log in logs)
        return AgentResult(exit, out, err)

    @asynccontextmanager
    async def _heard(self, logs: tuple[LogFile, LogFile]) -> AsyncIterator[tuple[Log, Log]]:
        """The step's logs, whose every piece goes to the incident's log as well."""
        run, body = self.run, self.body
        both: list[Log] = []
        with ExitStack() as stack:
            if body.incident is not None:
                directory = body.incident / "output"  # of all members of a matrix, since the names differ
                spec = partial(open_log, directory, body.agent, run.deps.now())
                log = await trio.to_thread.run_sync(spec)
                both.append(stack.enter_context(closing(RedactedLog(log, run.deps.redact))))
                await run.emit(ev.LogOpened(STEP, str(log.path)))
            yield Shared((logs[0], *both)), Shared((logs[1], *both))


def _tell_commands(agent: Agent, run: RunContext) -> None:
    """Record the counts of the agent's commands, also of an agent that was stopped."""
    out, err = (run.paths.logs / f"{STEP}.{stream}" for stream in ("stdout", "stderr"))
    if isinstance(agent, ModelAgent) and out.exists():
        statuses = Counter(command.status for command in agent.commands(AgentResult(Exit(), out, err)))
        run.events.pending.append(
            ev.CommandsReportedByAgent(
                STEP,
                statuses[CommandStatus.EXECUTED],
                statuses[CommandStatus.DENIED],
                statuses[CommandStatus.UNFINISHED],
            )
        )


async def _tell_obeyed(agent: Agent, run: RunContext) -> None:
    if not isinstance(agent, ModelAgent):
        return
    _, handle = run.workspace.require()
    for place in agent.autorun_paths:
        if (handle.tree / place).exists():
            text = f"`{agent.program}` runs by itself what the repository has in `{place}`"
            await run.emit(ev.WarningIssued("agent.repository-hooks", text, STEP))


async def restore(body: AgentBody, run: RunContext) -> None:
    """Restore the tree, unless a clone does, and the output."""
    assert run.resume_source is not None
    provider, handle = run.workspace.require()
    if run.workspace.base is None:
        await restore_tree(run)
    await trio.to_thread.run_sync(trees.copy_out, run.resume_source.directory / "output", handle.private / "output")
    await provider.chown_to_workspace_user(handle)


def _name_closed(outcome: Outcome, agent: Agent, body: AgentBody, uid: int) -> Outcome:
    """An outcome with the directory that keeps the user of commands, which see this host's own, from a toolchain."""
    paths = [Path(program_directory(toolchain)) for toolchain in body.mount_plan.toolchains]
    if isinstance(agent, ModelAgent):
        paths += [(place / agent.program).resolve().parent for place in paths]
    closed = next((folder for place in paths if (folder := _closed_to(uid, place))), None)
    if closed is None:
        return outcome
    hint = f"hint: the user of its commands cannot enter `{closed}`: take a toolchain that everybody can read"
    return replace(outcome, details=(*outcome.details, hint))


def _closed_to(uid: int, place: Path) -> Path | None:
    """The first directory on the way to a place that a user of no group cannot enter."""
    for folder in (*reversed(place.parents), place):
        if not folder.exists():
            return None
        open_to_all = folder.stat().st_mode & stat.S_IXOTH
        if not (os.access(folder, os.X_OK) if uid == os.geteuid() else open_to_all):
            return folder
    return None


async def _read_back(body: AgentBody, run: RunContext, workspace: Workspace) -> Isolation:
    assert run.workspace.probe is not None
    seen = await workspace.effective()
    run.events.pending.append(ev.IsolationObserved(STEP, seen))
    wrong = _mismatch(body, run, seen)
    if wrong:
        raise IsolationMismatch(f"the sandbox is not what was planned: {'; '.join(wrong)}", hint="see `runner doctor`")
    return seen


def _mismatch(body: AgentBody, run: RunContext, seen: Isolation) -> list[str]:
    """List promised features that are missing."""
    assert run.workspace.probe is not None
    assert run.workspace.handle is not None
    wrong: list[str] = []
    if seen.isolation < run.workspace.probe.isolation:
        wrong.append(f"isolation is {seen.isolation.value}, not {run.workspace.probe.isolation.value}")
    if run.workspace.probe.enforces(Feature.NETWORK_NONE) and seen.interfaces not in ((), ("lo",)):
        wrong.append(f"network interfaces {', '.join(seen.interfaces or ('of the host',))}")
    if not _same(run.workspace.handle.limits, seen.limits):
        wrong.append(f"limits are {seen.limits}, not {run.workspace.handle.limits}")
    if run.workspace.probe.enforces(Feature.PROTECTED_PATHS):
        expected = {f"/workspace/{path.rstrip('/')}" for path in body.mount_plan.protected}
        present = {p for p in expected if (run.workspace.handle.tree / p.removeprefix("/workspace/")).exists()}
        wrong += [f"{path} is writable" for path in sorted(present - set(seen.read_only))]
    if run.workspace.probe.isolation and (not seen.no_new_privileges or seen.capabilities != "none"):
        wrong.append("privileges can be gained")
    if run.workspace.probe.isolation is IsolationClass.NAMESPACES and not seen.filtered:
        wrong.append("system calls that lead out of the sandbox are not refused")
    return wrong


def _same(wanted: Limits, seen: Limits) -> bool:
    """Tell whether every limit that was set holds, apart from the kernel's rounding to a page."""
    pairs = ((getattr(wanted, name), getattr(seen, name)) for name in ("cpus", "memory_bytes", "disk_bytes", "pids"))
    return all(w is None or (s is not None and abs(w - s) <= w * 0.01) for w, s in pairs)


def _prompt(body: AgentBody, run: RunContext) -> bytes:
    own = run.fill(body.prompt)
    values = run.values(prompt=own)
    system, user = (template.render(text, values) for text in (body.system, body.user))
    attempt = continued(run.attempt, boundary=run.deps.random_hex(16)) if run.attempt is not None else ""
    return compose(system, run.results.context.decode(), attempt, user).encode()


def _keep_prompt(body: AgentBody, run: RunContext, prompt: bytes) -> None:
    """Evidence of what was sent, with the incident as well, and the same where the workspace can read it."""
    _, handle = run.workspace.require()
    write_new(run.paths.directory / PROMPT, prompt)
    write_new(handle.private / "runner" / PROMPT_FILE, prompt, 0o644)
    if body.incident is not None:
        Delivery(body.incident, body.member).put_prompt(run.paths.directory)


def _standard(body: AgentBody, run: RunContext, workspace: Workspace, prompt: bytes) -> dict[str, str]:
    """The documented variables of a sub-runner; keys and the host's environment are not among them.

    ``PROMPT`` is there only when it fits into an environment.
    """
    paths, model = workspace.paths, body.model
    variables = standard(run, body.agent, paths)
    variables["AGENT_SCRIPT"] = f"{paths.runner}/script"
    if body.mount_plan.skills:
        variables["AGENT_SKILLS"] = ",".join(body.mount_plan.skills)
    if model is not None:
        variables["LLM_MODEL"] = model.name
        if model.budget.turns is not None:
            variables["AGENT_MAX_TURNS"] = str(model.budget.turns)
        if body.mcp_servers:
            variables["AGENT_MCP_SERVERS"] = ",".join(one.name for one in body.mcp_servers)
        if model.tools is not None:
            variables["AGENT_ALLOWED_TOOLS"] = ",".join(model.tools)
    if len(prompt) <= SMALL_PROMPT and b"\0" not in prompt:
        variables["PROMPT"] = prompt.decode()
    return variables
