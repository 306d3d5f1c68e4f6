"""See ``plan``."""

from __future__ import annotations

from pathlib import Path

import trio

from runner.core.model import Outcome, succeeded
from runner.events import events as ev
from runner.ports.git import PartsRequest, SnapshotOptions
from runner.runtime.agents_file import place_in_tree
from runner.runtime.context import RunContext
from runner.runtime.policy_scan import broken, judge_usable, scan_checkout
from runner.runtime.restore import restore_tree
from runner.steps.clone.plan import CloneBody
from runner.steps.dependencies.layers import hold_kept

STEP = "clone"


async def perform(body: CloneBody, run: RunContext) -> Outcome:
    assert body.commit is not None  # only closed plans are carried out
    git = run.deps.git
    provider, handle = run.workspace.require()
    repository = run.paths.repository
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold_kept, run)  # beside git: a look at all files that are kept takes as long
        await _fetch(body, run, handle.tree)
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


async def _fetch(body: CloneBody, run: RunContext, tree: Path) -> None:
    """Make the private repository, and the checkout in ``tree``."""
    assert body.commit is not None
    git, repository = run.deps.git, run.paths.repository
    if body.url is not None:
        await git.fetch_url(body.url, body.commit, into=repository, depth=body.depth)
    else:
        assert body.path is not None
        await git.fetch(body.path, body.commit, into=repository, depth=body.depth, within=body.within)
    run.workspace.cloned(body.commit)
    await _fetch_parts(body, run)
    await git.check_out(repository, body.commit, into=tree, branch=body.branch, origin=body.url)


async def _fetch_parts(body: CloneBody, run: RunContext) -> None:
    """Fetch what the commit only refers to, as far as it is asked for."""
    assert body.commit is not None
    if body.submodules or body.lfs:
        wanted = PartsRequest(
            url=body.url,
            path=body.path,
            within=body.within,
            submodules=body.submodules,
            lfs=body.lfs,
            untrusted=body.untrusted,
        )
        await run.deps.git.fetch_parts(run.paths.repository, body.commit, wanted)


async def restore(body: CloneBody, run: RunContext) -> None:
    """Restore the tree at the earlier work at once, so that it is never taken for work that undid it."""
    await run.repository()
    await _fetch_parts(body, run)
    await restore_tree(run)
    await place_in_tree(run, body.agents_file)
    assert run.resume_source is not None
    assert run.resume_source.base is not None  # work on a clone has one
    run.workspace.cloned(run.resume_source.base)
    await run.emit(ev.BaseCommitRecorded(run.resume_source.base))
