"""See ``plan``."""

from __future__ import annotations

from runner.core.model import Outcome, succeeded
from runner.events import events as ev
from runner.ports.git import SnapshotOptions
from runner.runtime.agents_file import place_in_tree
from runner.runtime.context import RunContext
from runner.runtime.policy_scan import broken, judge_usable, scan_checkout
from runner.runtime.restore import restore_tree
from runner.steps.clone.plan import CloneBody

STEP = "clone"


async def perform(body: CloneBody, run: RunContext) -> Outcome:
    assert body.commit is not None  # only closed plans are carried out
    git = run.deps.git
    provider, handle = run.workspace.require()
    repository = run.paths.repository
    if body.url is not None:
        await git.fetch_url(body.url, body.commit, into=repository, depth=body.depth)
    else:
        assert body.path is not None
        await git.fetch(body.path, body.commit, into=repository, depth=body.depth, within=body.within)
    run.workspace.cloned(body.commit)
    await git.check_out(repository, body.commit, into=handle.tree, branch=body.branch, origin=body.url)
    message = f"{body.commit[:12]} on {body.branch}"
    count = 0
    if body.include_dirty and body.path is not None:
        count = await git.copy_uncommitted(body.path, into=handle.tree, within=body.within)
    if violations := await scan_checkout(run, STEP, body.policies):
        return broken(violations, " before anything ran")
    if body.include_dirty:
        # What was uncommitted before the agent came is not the agent's work, so it belongs to the base.
        wanted = SnapshotOptions("uncommitted files", run.author())
        made = await git.snapshot(repository, handle.tree, body.commit, wanted)
        changes = await git.changes(repository, body.commit, made.commit)
        if unusable := tuple((await judge_usable(run, made, changes)).values()):
            await run.emit(ev.ViolationsFound(STEP, unusable))
            return broken(unusable, " before anything ran")
        run.workspace.cloned(made.commit)
        message += f" with {count} uncommitted"
    await place_in_tree(run, body.agents_file)
    await provider.chown_to_workspace_user(handle)
    assert run.workspace.base is not None
    await run.emit(ev.BaseCommitRecorded(run.workspace.base))
    return succeeded(message)


async def restore(body: CloneBody, run: RunContext) -> None:
    """Restore the tree at the earlier work at once, so that it is never taken for work that undid it."""
    await restore_tree(run)
    await place_in_tree(run, body.agents_file)
    assert run.resume_source is not None
    assert run.resume_source.base is not None  # work on a clone has one
    run.workspace.cloned(run.resume_source.base)
    await run.emit(ev.BaseCommitRecorded(run.resume_source.base))
