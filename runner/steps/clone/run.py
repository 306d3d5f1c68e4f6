"""See ``plan``."""

from __future__ import annotations

from runner.model import Outcome, succeeded
from runner.ports.git import Snapshotting
from runner.steps._run import Run
from runner.steps.clone.plan import Body


async def perform(body: Body, run: Run) -> Outcome:
    assert body.path is not None  # only closed plans are carried out
    assert body.commit is not None
    git = run.ports.git
    provider, handle = run.require()
    repository = run.places.repository
    await git.fetch(body.path, body.commit, into=repository, depth=body.depth)
    run.cloned(body.commit)
    await git.check_out(repository, body.commit, into=handle.tree, branch=body.branch)
    message = f"{body.commit[:12]} on {body.branch}"
    if body.include_dirty:
        count = await git.add_dirty(body.path, into=handle.tree)
        # What was uncommitted before the agent came is not the agent's work, so it belongs to the base.
        wanted = Snapshotting("uncommitted files", run.author())
        run.cloned((await git.snapshot(repository, handle.tree, body.commit, wanted)).commit)
        message += f" with {count} uncommitted"
    await provider.give(handle)
    return succeeded(message)
