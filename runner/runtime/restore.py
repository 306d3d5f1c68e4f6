"""Restore the work of an earlier run, so that later steps find it as they would have there."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import trio
from msgspec.structs import replace

from runner.core.errors import HostRefused, WorkMissing
from runner.runtime.context import RunContext
from runner.safefs import trees


async def restore_tree(run: RunContext) -> None:
    """Put the earlier work into the private repository, and on disk in place of what is there."""
    assert run.resume_source is not None  # or nothing is taken over
    _, handle = run.workspace.require()
    repository = await run.repository()
    await trio.to_thread.run_sync(_clear, handle.tree)
    run.workspace.injected_files = {}  # went with the rest
    await run.deps.git.materialise(repository, run.resume_source.commit, handle.tree)


async def restore_commits(run: RunContext) -> None:
    """Restore the earlier run's bundle of the agent's own commits."""
    assert run.resume_source is not None
    taken = run.resume_source.commits
    if taken is None:
        return
    if taken.bundle is not None:
        assert run.workspace.base is not None  # or there would be no bundle
        git, quarantine, to = run.deps.git, run.paths.quarantine, run.paths.directory / taken.bundle
        try:
            content = await trio.to_thread.run_sync((run.resume_source.directory / taken.bundle).read_bytes)
            authored = await git.quarantine(run.paths.repository, content, run.workspace.base, into=quarantine)
            if authored[-1].commit != taken.commit:
                raise WorkMissing(f"`{run.resume_source.directory / taken.bundle}` is not the bundle that the run made")
            await git.accept(run.paths.repository, quarantine, run.workspace.base, taken.commit, to=to)
        finally:
            trees.remove(quarantine)
        content = await trio.to_thread.run_sync(to.read_bytes)
        taken = replace(taken, bundle_sha256=sha256(content).hexdigest(), bundle_bytes=len(content))
    await run.emit(taken)


def _clear(tree: Path) -> None:
    """Remove what is in a directory, which stays: it may be a mount."""
    for path in tree.iterdir():
        if path.is_dir() and not path.is_symlink():
            if left := trees.remove(path):
                raise HostRefused(f"the workspace is not empty: {left[0]}")
        else:
            path.unlink()
