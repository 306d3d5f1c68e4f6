from __future__ import annotations

from pathlib import Path

import pytest

from runner.core.model import Checkout
from runner.spec.checkout import RepoSource, TaskContext, holds_secret, judge_url, resolve_checkout

URL, OTHER = "https://git.example.org/org/repo", "https://git.example.org/org/other"


@pytest.mark.parametrize(
    ("source", "task", "checkout"),
    [
        pytest.param(RepoSource(type="none"), TaskContext(repository_url=URL), None, id="none clones nothing"),
        pytest.param(RepoSource(type="task_context"), TaskContext(), None, id="task without repository"),
        pytest.param(
            RepoSource(type="task_context", branch="main"),
            TaskContext(repository_url=URL, branch="develop"),
            Checkout(url=URL, branch="develop", depth=1),
            id="the task's branch wins",
        ),
        pytest.param(
            RepoSource(type="task_context", branch="main"),
            TaskContext(repository_url=URL),
            Checkout(url=URL, branch="main", depth=1),
            id="the agent type's branch is the fallback",
        ),
        pytest.param(
            RepoSource(type="task_context", depth=50),
            TaskContext(repository_url=URL, commit="a" * 40),
            Checkout(url=URL, commit="a" * 40, depth=50),
            id="the task's commit",
        ),
        pytest.param(
            RepoSource(type="fixed", url=URL, branch="main"),
            TaskContext(repository_url=OTHER, branch="develop", commit="a" * 40),
            Checkout(url=URL, branch="main", depth=1),
            id="fixed ignores the task's repository, and its branch and commit with it",
        ),
        pytest.param(
            RepoSource(type="local", path=Path("/src"), include_dirty=True),
            TaskContext(repository_url=OTHER, branch="develop"),
            Checkout(path=Path("/src"), include_dirty=True),
            id="local ignores the task's repository",
        ),
    ],
)
def test_what_to_clone(source: RepoSource, task: TaskContext, checkout: Checkout | None) -> None:
    assert resolve_checkout(source, task) == checkout


@pytest.mark.parametrize(
    "url",
    [
        "https://git.example.org/org/repo",
        "https://git.example.org:8443/~me/repo.git/",
        "https://[::1]/a",
        "https://localhost/a_b/c.d-e+f@2",
        "ssh://git@git.example.org/org/repo",
        "ssh://git.example.org:2222/~/repo",
        "git@git.example.org:org/repo.git",
        "git.example.org:/srv/repo",
    ],
)
def test_a_url_that_is_cloned(url: str) -> None:
    assert judge_url(url) is None


@pytest.mark.parametrize(
    "url",
    [
        "",
        "x",
        "/srv/repo",
        "./repo",
        "../repo",
        "http://git.example.org/org/repo",
        "git://git.example.org/org/repo",
        "ftp://git.example.org/org/repo",
        "HTTPS://git.example.org/org/repo",
        "file:///etc",
        "ext::sh -c touch% pwned",
        "fd::17",
        "--upload-pack=touch pwned",
        "-oProxyCommand=x:repo",
        "git@-oProxyCommand=x:repo",
        "-x@git.example.org:repo",
        "ssh://-oProxyCommand=touch",
        "ssh://-oProxyCommand=touch/x",
        "ssh://git@-x/repo",
        "git@git.example.org:-x",
        "git@git.example.org:a/-x:y",
        "https://e.org/..%2f",
        "https://e.org/a/../b",
        "https://e.org/./b",
        "git@e.org:../b",
        "https://e.org/a b",
        "https://e.org/a\n",
        "https://e.org/a?b",
        "https://e.org/a#b",
        "https://e.org/",
        "https:///a",
        "https://e.org:port/a",
        "https://e.örg/a",
        "https://e.org//a",
        "https://e.org/" + "a" * 2000,
    ],
)
def test_a_url_that_is_not_cloned(url: str) -> None:
    fault = judge_url(url)

    assert fault.hint


@pytest.mark.parametrize(
    "url",
    [
        "https://me:hunter2@e.org/a",
        "https://hunter2@e.org/a",
        "ssh://me:hunter2@e.org/a",
        "http://hunter2@e.org/a",
        "HTTPS://me:hunter2@e.org/a",
        "git+https://me:hunter2@e.org/a",
        "ftp://me:hunter2@e.org/a",
        "//me:hunter2@e.org/a",
        "me:hunter2@e.org/a",
        "https:me:hunter2@e.org/a",
        "https://me:hunter2/hunter2@e.org/a",
        " https://me:hunter2@e.org/a",
        "https://me:hunter2@e.org/a b",
    ],
)
def test_a_password_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    assert holds_secret(url)
    fault = judge_url(url)

    assert "hunter2" not in fault.message + (fault.hint or "")


@pytest.mark.parametrize("url", ["https://e.org/a?token=hunter2", "https://e.org/a#hunter2", "e.org/a?x=hunter2"])
def test_of_a_url_that_is_not_cloned_no_query_is_repeated(url: str) -> None:
    fault = judge_url(url)

    assert "hunter2" not in fault.message + (fault.hint or "")


@pytest.mark.parametrize(
    "url",
    [
        "https://e.org/a@v1",
        "e.org:a/b@1",
        "git@e.org:@scope/a",
        "e.org:@scope/a",
        "ssh://git@e.org/a",
        "a thing",
        "git@e",
    ],
)
def test_not_every_at_is_a_password_s(url: str) -> None:
    assert not holds_secret(url)
