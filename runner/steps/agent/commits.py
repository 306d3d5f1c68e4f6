"""The commits that an agent made itself: bundled inside a sandbox, judged in quarantine, kept beside the snapshot.

The agent's ``.git`` may say anything and start anything, so git reads it only where the agent ran. Whatever is wrong
with the commits is said in the record and never decides about the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import trio
from msgspec.structs import replace

from runner.core.errors import HostileTree, PlatformError, PolicyError, RemoteOverLimit, first_leaf
from runner.core.model import Violation
from runner.core.plural import plural
from runner.core.sanitize import sanitize
from runner.events import events as ev
from runner.policy.paths import PathPolicy
from runner.ports.git import AgentCommit
from runner.ports.provider import SandboxSpec
from runner.runtime.context import RunContext
from runner.runtime.mount_plan import MountPlan
from runner.runtime.tree_scan import leaves_tree
from runner.safefs import trees
from runner.safefs.safe_open import read_beneath
from runner.steps.agent.plan import AgentBody

BUNDLE = "agent-commits.bundle"
MOST = 64 << 20  # bytes of a bundle
SECONDS = 60.0
_SMALL = 4096  # bytes of HEAD, of a ref
_NAMED = 100  # violations
_ENVIRONMENT = {
    "LC_ALL": "C",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_TERMINAL_PROMPT": "0",
}


async def take_commits(run: RunContext, mount_plan: MountPlan, policy: PathPolicy) -> str:
    """Import the agent's own commits onto the base, as an event. Returns a note for the step's message.

    Bounded by ``SECONDS`` and by half of the step's remaining time. Only a journal that refuses the event is an error.
    """
    _, handle = run.workspace.require()
    if run.workspace.base is None or not await trio.to_thread.run_sync(_moved, handle.tree, run.workspace.base):
        return ""
    if any(step.secrets for step in run.plan.steps) or _had_key(
        run
    ):  # in what a later commit takes back, or in a message, one could be
        await run.emit(ev.AgentCommitsImported(withheld="the commits of a run with secrets are not searched for them"))
        return ", commits of the agent withheld"
    now = trio.current_time()
    until = min(now + SECONDS, now + (trio.current_effective_deadline() - now) / 2)
    taken: ev.AgentCommitsImported | None = ev.AgentCommitsImported(withheld="they were not done in time")
    quarantine = run.paths.quarantine
    try:
        with trio.move_on_at(until):
            taken = await _taken(run, mount_plan, policy, quarantine)
    except* (PolicyError, PlatformError, RemoteOverLimit, OSError) as group:
        taken = ev.AgentCommitsImported(withheld=sanitize(str(first_leaf(group)), 500))
    finally:
        trees.remove(quarantine)
    if taken is None:
        return ""
    await run.emit(taken)
    return f", {taken.count} commits of the agent" if not taken.withheld else ", commits of the agent withheld"


def _had_key(run: RunContext) -> bool:
    """Tell whether the agent had the key of its model."""
    models = (step.body.model for step in run.plan.steps if isinstance(step.body, AgentBody))
    return any(model is not None and model.key_inside for model in models)


def _moved(tree: Path, base: str) -> bool:
    """Tell from two small files whether the agent's HEAD may have left the base, since git is not run here."""
    try:
        head = read_beneath(tree, ".git/HEAD", _SMALL).decode(errors="replace").strip()
        if head.startswith("ref: "):
            head = read_beneath(tree, f".git/{head.removeprefix('ref: ')}", _SMALL).decode(errors="replace").strip()
    except (OSError, ValueError):  # packed, or odd
        return True
    return head != base


async def _taken(
    run: RunContext, mount_plan: MountPlan, policy: PathPolicy, quarantine: Path
) -> ev.AgentCommitsImported | None:
    assert run.workspace.base is not None
    git, repository = run.deps.git, await run.repository()
    bundle = await _bundle(run, mount_plan, run.workspace.base)
    if bundle is None:
        return None
    authored = await git.quarantine(repository, bundle, run.workspace.base, into=quarantine)
    tip = authored[-1].commit
    if violations := _judge(authored, policy, mount_plan):
        text = f"{plural(len(violations), 'violation')}: {violations[0]}"
        return ev.AgentCommitsImported(count=len(authored), commit=tip, withheld=text, violations=violations[:_NAMED])
    kept = run.paths.directory / BUNDLE
    tree = await git.accept(repository, quarantine, run.workspace.base, tip, to=kept)
    content = await trio.to_thread.run_sync(kept.read_bytes)
    return ev.AgentCommitsImported(
        count=len(authored),
        commit=tip,
        tree=tree,
        bundle=BUNDLE,
        bundle_sha256=sha256(content).hexdigest(),
        bundle_bytes=len(content),
    )


async def _bundle(run: RunContext, mount_plan: MountPlan, base: str) -> bytes | None:
    """Bundle the commits from the base to HEAD by git inside; ``None`` when there is no git, or no commit."""
    spec = SandboxSpec(toolchains=mount_plan.toolchains, tree_writable=False, fresh_home=True)
    workspace = await run.open_as(spec)
    argv = ["git", "-C", workspace.paths.workspace, "bundle", "create", "--quiet", "-", f"{base}..HEAD"]
    result = await workspace.run(argv, env=_ENVIRONMENT, keep_bytes=MOST)
    await run.sandboxes.close()
    if result.exit.code == 127 or b"empty bundle" in result.stderr:
        return None
    if result.cut:
        raise RemoteOverLimit(f"they have more than {MOST >> 20} MiB")
    if not result.exit.ok:
        raise HostileTree(f"git inside {result.exit}: {sanitize(result.stderr.decode(errors='replace').strip())}")
    return result.stdout


def _judge(authored: Sequence[AgentCommit], policy: PathPolicy, mount_plan: MountPlan) -> tuple[Violation, ...]:
    """Find violations in any commit, also when a later one takes them back."""
    found: list[Violation] = []
    protected = [name.rstrip("/") for name in mount_plan.protected]
    for each in authored:
        sizes = [(_text(change.path), change.entry.size if change.entry else None) for change in each.changes]
        bad = [*policy.judge_changes(sizes)]
        for path, _ in sizes:
            bad += [Violation(sanitize(path), "protected") for name in protected if f"{path}/".startswith(f"{name}/")]
        for link, target in each.links:
            if leaves_tree(link.count(b"/"), _text(target)):
                bad.append(Violation(sanitize(_text(link)), "link-outside", sanitize(_text(target))))
        found += [replace(one, detail=f"{one.detail} in {each.commit[:12]}".strip()) for one in bad]
    return tuple(found)


def _text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")
