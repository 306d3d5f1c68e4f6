"""See ``plan``. A snapshot that breaks policy stays an object without a name: nothing is published."""

from __future__ import annotations

from runner import events as ev
from runner.errors import BadRef, shown
from runner.ids import BRANCH_HINT, is_branch
from runner.manifest import repository
from runner.model import Outcome, succeeded
from runner.steps._judge import broken, commit_tree
from runner.steps._run import Run
from runner.steps.snapshot.plan import Body

STEP = "snapshot"


async def perform(body: Body, run: Run) -> Outcome:
    branch = run.fill(body.branch) if body.branch else None
    if branch is not None and not is_branch(branch):
        raise BadRef(f"`{shown(branch)}` is not a branch name", hint=BRANCH_HINT)
    snapshot, changes, violations = await commit_tree(run, STEP, body.policies, run.fill(body.message))
    if violations:
        return broken(violations)
    run.snapshot = snapshot
    await run.emit(
        ev.SnapshotPublished(
            snapshot.commit, snapshot.tree, run.base, branch, snapshot.entries, snapshot.ignored, len(changes)
        )
    )
    left_out = f", {snapshot.ignored} ignored" if snapshot.ignored else ""
    touched = any(change.path == repository.FILE.encode() for change in changes)
    warnings = (f"the work changes `{repository.FILE}`, which holds only once it is committed where runs start",)
    return succeeded(f"{snapshot.commit[:12]}, {len(changes)} changed{left_out}", warnings=warnings * touched)
