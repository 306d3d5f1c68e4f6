"""Which code a run starts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runner.model import Checkout


@dataclass(frozen=True)
class RepoSource:
    """The agent type's side. ``path`` is absolute; ``depth`` ``None`` means the whole history."""

    type: Literal["task_context", "fixed", "local", "none"]
    url: str | None = None
    path: Path | None = None
    branch: str | None = None
    depth: int | None = None
    include_dirty: bool = False


@dataclass(frozen=True)
class TaskContext:
    """The task's side; what the agent reads as ``task.json`` and ``RUNNER_TASK_*``."""

    repository_url: str | None = None
    branch: str | None = None
    base_branch: str | None = None
    pull_request_number: int | None = None
    commit: str | None = None


def resolve_checkout(source: RepoSource, task: TaskContext) -> Checkout | None:
    """Decide what to clone; ``None`` means start from an empty workspace.

    A fixed or local source ignores the task's repository, and with it the task's branch and commit,
    which speak of that repository. A task without a repository is not an error: the agent simply
    starts in an empty directory.
    """
    match source.type:
        case "none":
            return None
        case "fixed":
            return Checkout(url=source.url, branch=source.branch, depth=source.depth)
        case "local":
            return Checkout(
                path=source.path, branch=source.branch, depth=source.depth, include_dirty=source.include_dirty
            )
        case "task_context":
            if task.repository_url is None:
                return None
            return Checkout(
                url=task.repository_url,
                branch=task.branch or source.branch,
                commit=task.commit,
                depth=source.depth,
            )
