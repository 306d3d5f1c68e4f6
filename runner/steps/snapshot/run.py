"""See ``plan``. A snapshot that breaks policy stays an object without a name: nothing is published."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec.structs import replace

from runner.core.errors import BadRef
from runner.core.ids import BRANCH_HINT, is_branch
from runner.core.model import Outcome, Reason, failed, succeeded
from runner.core.sanitize import excerpt, sanitize
from runner.events import events as ev
from runner.manifest import repository
from runner.ports.git import Snapshot
from runner.runtime.context import RunContext
from runner.runtime.policy_scan import broken, commit_tree, policy_of
from runner.runtime.restore import restore_commits
from runner.steps.agent.commits import take_commits
from runner.steps.snapshot.plan import SnapshotBody

STEP = "snapshot"
_EMPTY = "hint: write `snapshot: {allow_empty: true}` if the work may change nothing"
_TRAILERS = re.compile(r"\n\n(?:[A-Za-z0-9-]+: .*\n?)+\Z")


async def perform(body: SnapshotBody, run: RunContext) -> Outcome:
    branch = _branch(body, run)
    snapshot, changes, violations = await commit_tree(run, STEP, body.policies, _message(body, run))
    if violations:
        return broken(violations)
    if body.wants_change and not changes:
        return failed(Reason.NO_EVIDENCE, "nothing was changed", details=(_EMPTY,))
    run.results.snapshot = snapshot
    await run.emit(
        ev.SnapshotPublished(
            commit=snapshot.commit,
            tree=snapshot.tree,
            base=run.workspace.base,
            branch=branch,
            entries=snapshot.entries,
            ignored=snapshot.ignored,
            changed=len(changes),
        )
    )
    commits = ""
    if body.commits is not None and run.resume_source is None:
        commits = await take_commits(run, body.commits, policy_of(body.policies))
    elif run.resume_source is not None and run.resume_source.commits is not None:
        await run.emit(ev.AgentCommitsImported(withheld="this snapshot was made again, of what they came to"))
    left_out = f", {snapshot.ignored} ignored" if snapshot.ignored else ""
    touched = any(change.path == repository.FILE.encode() for change in changes)
    warnings = (f"the work changes `{repository.FILE}`, which holds only once it is committed where runs start",)
    return succeeded(f"{snapshot.commit[:12]}, {len(changes)} changed{left_out}{commits}", warnings=warnings * touched)


async def restore(body: SnapshotBody, run: RunContext) -> None:
    """Publish the same commit again, under this run's branch name if it has one."""
    assert run.resume_source is not None
    assert run.resume_source.snapshot is not None  # published when the step succeeded
    old = run.resume_source.snapshot
    run.results.snapshot = Snapshot(
        commit=old.commit, tree=old.tree, base=old.base, entries=old.entries, ignored=old.ignored
    )
    await run.emit(replace(old, branch=_branch(body, run)))
    await restore_commits(run)


def _message(body: SnapshotBody, run: RunContext) -> str:
    """Build the commit message: the manifest's, with trailers for the run, its plan and its task."""
    text = run.fill(body.message).rstrip()
    trailers = {"Runner-Run": run.id, "Runner-Plan": run.digest}
    task = run.plan.values.get("task")
    if isinstance(task, Mapping) and task:
        trailers["Runner-Task"] = sanitize(" ".join(f"{key}={value}" for key, value in task.items()), 1000)
    gap = "\n" if _TRAILERS.search(text) else "\n\n"
    return text + gap + "".join(f"{name}: {value}\n" for name, value in trailers.items())


def _branch(body: SnapshotBody, run: RunContext) -> str | None:
    branch = run.fill(body.branch) if body.branch else None
    if branch is not None and not is_branch(branch):
        raise BadRef(f"`{excerpt(branch)}` is not a branch name", hint=BRANCH_HINT)
    return branch
