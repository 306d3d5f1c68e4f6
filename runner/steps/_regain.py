"""Bringing back what an earlier run kept, so that later steps find what they would have found there."""

from __future__ import annotations

from pathlib import Path

import trio

from runner import trees
from runner.errors import HostRefused
from runner.steps._run import Run


async def regain_tree(run: Run) -> None:
    """Put the kept work into the private repository, and on disk in the place of what is there."""
    assert run.kept is not None  # or nothing is taken over
    _, handle = run.require()
    repository = await run.repository()
    await trio.to_thread.run_sync(_clear, handle.tree)
    run.placed = {}  # went with the rest
    await run.ports.git.materialise(repository, run.kept.commit, handle.tree)


def _clear(tree: Path) -> None:
    """Remove what is in a directory, which stays: it may be a mount."""
    for path in tree.iterdir():
        if path.is_dir() and not path.is_symlink():
            if left := trees.remove(path):
                raise HostRefused(f"the workspace is not empty: {left[0]}")
        else:
            path.unlink()
