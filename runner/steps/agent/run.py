"""See ``plan``. The agent starts only in a sandbox whose isolation was read back and is what was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import trio

from runner import events as ev
from runner import trees
from runner.errors import IsolationMismatch
from runner.model import Feature, Isolation, Limits, Outcome
from runner.ports.agent import Ended, ModelAgent, Preparation
from runner.ports.provider import PATH, Workspace
from runner.spec import template
from runner.steps._exec import open_logs, run_command
from runner.steps._regain import regain_tree
from runner.steps._run import Run, write_new
from runner.steps.agent.model import open_way
from runner.steps.agent.plan import Body

STEP = "agent"
SMALL_PROMPT = 64 << 10  # bytes; Linux takes 128 KiB for one variable

_PROMPT = "prompt.md"
_WRITE = ("sh", "-c", 'umask 077; mkdir -p -- "${1%/*}" && cat > "$1"', "sh")


async def perform(body: Body, run: Run) -> Outcome:
    workspace = await run.open(body.shape)
    await _read_back(body, run, workspace)
    run.moved_in = True
    prompt = run.ports.redact.clean(_prompt(body, run))
    _keep_prompt(run, prompt)
    work = _Work(body, run, workspace, prompt)
    agent = run.ports.agent(body.agent)
    try:
        if body.model is None:
            ended = await work.carry_out(Preparation({}))
        else:
            assert isinstance(agent, ModelAgent)  # as every one whose manifests may name a model
            async with open_way(agent, body.model, run, workspace, STEP) as way:
                ended = await work.carry_out(way.prepare(), way.access.key)
    finally:
        # Killing one command's tree is best effort among processes of one user; killing the sandbox is not.
        run.retire()
    await run.close()
    return agent.judge(ended) if body.model is None else await way.judge(ended, run, STEP)


@dataclass(frozen=True)
class _Work:
    """What an agent's commands have in common."""

    body: Body
    run: Run
    workspace: Workspace
    prompt: bytes

    async def carry_out(self, prepared: Preparation, key: str = "") -> Ended:
        """Prepare the agent's home and run its CLI on the prompt; what fails first is what it ended with."""
        run, workspace, body = self.run, self.workspace, self.body
        env = {**prepared.env, **run.variables(workspace.paths), **run.fill_all(body.env)}
        argv = await run.ports.sub_runner(body.agent, _standard(body, run, workspace, self.prompt))
        home = workspace.paths.home
        commands: list[tuple[Sequence[str], bytes]] = [
            ((*_WRITE, f"{home}/{name}"), content.encode()) for name, content in prepared.files.items()
        ]
        commands += [(prepared.login, key.encode())] if prepared.login else []
        commands.append((argv, self.prompt))
        with open_logs(run.places.logs, STEP) as logs:
            for words, stdin in commands:
                exit = await run_command(run, workspace, words, logs, env=env, stdin=stdin)
                if not exit.ok:
                    break
        out, err = (log.path for log in logs)
        return Ended(exit, out, err)


async def take_over(body: Body, run: Run) -> None:
    """Without a clone, the tree comes back here; the output does in any case."""
    assert run.kept is not None
    provider, handle = run.require()
    if run.base is None:
        await regain_tree(run)
    await trio.to_thread.run_sync(trees.copy_out, run.kept.directory / "output", handle.private / "output")
    await provider.give(handle)


async def _read_back(body: Body, run: Run, workspace: Workspace) -> None:
    assert run.probe is not None
    seen = await workspace.effective()
    await run.emit(ev.IsolationObserved(STEP, seen))
    wrong = _mismatch(body, run, seen)
    if wrong:
        raise IsolationMismatch(f"the sandbox is not what was planned: {'; '.join(wrong)}", hint="see `runner doctor`")


def _mismatch(body: Body, run: Run, seen: Isolation) -> list[str]:
    """What was promised and is not there."""
    assert run.probe is not None
    assert run.handle is not None
    wrong: list[str] = []
    if seen.isolation < run.probe.isolation:
        wrong.append(f"isolation is {seen.isolation.word}, not {run.probe.isolation.word}")
    if run.probe.enforces(Feature.NETWORK_NONE) and seen.interfaces not in ((), ("lo",)):
        wrong.append(f"network interfaces {', '.join(seen.interfaces or ('of the host',))}")
    if not _same(run.handle.limits, seen.limits):
        wrong.append(f"limits are {seen.limits}, not {run.handle.limits}")
    if run.probe.enforces(Feature.PROTECTED_PATHS):
        expected = {f"/workspace/{path.rstrip('/')}" for path in body.shape.protected}
        present = {p for p in expected if (run.handle.tree / p.removeprefix("/workspace/")).exists()}
        wrong += [f"{path} is writable" for path in sorted(present - set(seen.read_only))]
    if run.probe.isolation and (not seen.no_new_privileges or seen.capabilities != "none"):
        wrong.append("privileges can be gained")
    return wrong


def _same(wanted: Limits, seen: Limits) -> bool:
    """Whether every limit that was set is there, give or take the kernel's rounding to a page."""
    pairs = ((getattr(wanted, name), getattr(seen, name)) for name in ("cpus", "memory_bytes", "disk_bytes", "pids"))
    return all(w is None or (s is not None and abs(w - s) <= w * 0.01) for w, s in pairs)


def _prompt(body: Body, run: Run) -> bytes:
    own = run.fill(body.prompt)
    values = run.values(prompt=own)
    parts = [template.render(text, values) for text in (body.system, body.user)]
    return "\n\n".join(part for part in parts if part).encode()


def _keep_prompt(run: Run, prompt: bytes) -> None:
    """Evidence of what was sent, and the same where the workspace can read it."""
    _, handle = run.require()
    write_new(run.places.directory / "prompt-sent.md", prompt)
    write_new(handle.private / "runner" / _PROMPT, prompt, 0o644)


def _standard(body: Body, run: Run, workspace: Workspace, prompt: bytes) -> dict[str, str]:
    """The documented variables of a sub-runner; keys and the host's environment are not among them.

    Paths are those inside the workspace. ``PROMPT`` is there only when it fits into an environment.
    """
    paths, model, incident = workspace.paths, body.model, run.plan.values.get("incident")
    known = incident.get("incidentId") if isinstance(incident, Mapping) else None
    variables = {
        "PATH": PATH,
        "LC_ALL": "C.UTF-8",
        "AGENT_CLI": body.agent,
        "AGENT_HOME": paths.home,
        "AGENT_SCRIPT": f"{paths.runner}/script",
        "PROMPT_FILE": f"{paths.runner}/{_PROMPT}",
        "WORKSPACE_DIR": paths.workspace,
        "INCIDENT_ID": known if isinstance(known, str) and known.isprintable() and known else run.id,
        "RUN_ID": run.id,
    }
    if model is not None:
        variables["LLM_MODEL"] = model.name
        if model.budget.turns is not None:
            variables["AGENT_MAX_TURNS"] = str(model.budget.turns)
        if model.tools is not None:
            variables["AGENT_ALLOWED_TOOLS"] = ",".join(model.tools)
    if len(prompt) <= SMALL_PROMPT and b"\0" not in prompt:
        variables["PROMPT"] = prompt.decode()
    return variables
