"""See ``plan``. The agent starts only in a sandbox whose isolation was read back and is what was asked for."""

from __future__ import annotations

import trio

from runner import events as ev
from runner import trees
from runner.errors import IsolationMismatch
from runner.model import Feature, Isolation, Limits, Outcome
from runner.ports.agent import Ended
from runner.ports.provider import Workspace
from runner.spec import template
from runner.steps._exec import open_logs, run_command
from runner.steps._regain import regain_tree
from runner.steps._run import Run, write_new
from runner.steps.agent.plan import Body

STEP = "agent"


async def perform(body: Body, run: Run) -> Outcome:
    workspace = await run.open(body.shape)
    await _read_back(body, run, workspace)
    prompt = _prompt(body, run)
    write_new(run.places.directory / "prompt-sent.md", prompt)
    env = run.variables(workspace.paths) | run.fill_all(body.env)
    argv = await run.ports.sub_runner(body.agent, _standard(body, run, workspace))
    try:
        with open_logs(run.places.logs, STEP) as logs:
            exit = await run_command(run, workspace, argv, logs, env=env, stdin=prompt)
    finally:
        # Killing one command's tree is best effort among processes of one user; killing the sandbox is not.
        run.retire()
    await run.close()
    out, err = (log.path for log in logs)
    return run.ports.agent(body.agent).judge(Ended(exit, out, err))


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


def _standard(body: Body, run: Run, workspace: Workspace) -> dict[str, str]:
    """The documented variables of a sub-runner; keys and the host's environment are not among them."""
    paths = workspace.paths
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LC_ALL": "C.UTF-8",
        "AGENT_CLI": body.agent,
        "AGENT_HOME": paths.home,
        "AGENT_SCRIPT": f"{paths.runner}/script",
        "WORKSPACE_DIR": paths.workspace,
        "RUN_ID": run.id,
    }
