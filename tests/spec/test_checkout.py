from __future__ import annotations

from pathlib import Path

import pytest

from runner.model import Checkout
from runner.spec.checkout import RepoSource, TaskContext, resolve_checkout

URL, OTHER = "https://git.example.org/org/repo", "https://git.example.org/org/other"


@pytest.mark.parametrize(
    ("source", "task", "checkout"),
    [
        pytest.param(RepoSource("none"), TaskContext(URL), None, id="none clones nothing"),
        pytest.param(RepoSource("task_context"), TaskContext(), None, id="task without repository"),
        pytest.param(
            RepoSource("task_context", branch="main"),
            TaskContext(URL, "develop"),
            Checkout(URL, branch="develop"),
            id="the task's branch wins",
        ),
        pytest.param(
            RepoSource("task_context", branch="main"),
            TaskContext(URL),
            Checkout(URL, branch="main"),
            id="the agent type's branch is the fallback",
        ),
        pytest.param(
            RepoSource("task_context", depth=1),
            TaskContext(URL, commit="a" * 40),
            Checkout(URL, commit="a" * 40, depth=1),
            id="the task's commit",
        ),
        pytest.param(
            RepoSource("fixed", url=URL, branch="main"),
            TaskContext(OTHER, "develop", commit="a" * 40),
            Checkout(URL, branch="main"),
            id="fixed ignores the task's repository, and its branch and commit with it",
        ),
        pytest.param(
            RepoSource("local", path=Path("/src"), include_dirty=True),
            TaskContext(OTHER, "develop"),
            Checkout(path=Path("/src"), include_dirty=True),
            id="local ignores the task's repository",
        ),
    ],
)
def test_what_to_clone(source: RepoSource, task: TaskContext, checkout: Checkout | None) -> None:
    assert resolve_checkout(source, task) == checkout
