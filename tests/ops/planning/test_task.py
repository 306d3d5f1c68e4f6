"""Where a run's task may come from, which source wins, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.core.errors import Rejected, RunnerError, UsageError
from runner.core.settings import Settings
from runner.ops.planning.task import read_task

HOSTILE = "$(touch pwn)`x`;\"'--upload-pack=x😀"
SHA = "a" * 40


def task(
    *flags: str, file: str | None = None, ci: str | None = None, env: dict[str, str] | None = None, stdin: bytes = b""
) -> dict[str, object]:
    return read_task(flags, file, ci, Settings.from_env({"HOME": "/", **(env or {})}), lambda limit: stdin[:limit])


def test_a_flag_wins_over_the_file_and_the_file_over_the_ci(tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text("branch: of-file\nbase_branch: of-file\n")
    env = {"CI_PROJECT_URL": "https://x.org/a", "CI_COMMIT_BRANCH": "of-ci", "CI_COMMIT_SHA": SHA}

    assert task("branch=of-flag", file=str(file), ci="gitlab", env=env) == {
        "repository_url": "https://x.org/a",
        "branch": "of-flag",
        "base_branch": "of-file",
        "commit": SHA,
    }


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        pytest.param("brnch=x", "did you mean `branch`?", id="near miss"),
        pytest.param("branch", "key=value", id="no value"),
        pytest.param("pull_request_number=x", "pull_request_number", id="no number"),
        pytest.param("pull_request_number=0", "pull_request_number", id="number too small"),
        pytest.param("pull_request_number=" + "9" * 5_000, "pull_request_number", id="number too long"),
        pytest.param("branch=", "branch", id="empty"),
    ],
)
def test_a_flag_that_is_no_field_is_refused_with_what_would_be(flag: str, words: str) -> None:
    with pytest.raises(RunnerError) as refused:
        task(flag)

    error = refused.value
    findings = error.findings if isinstance(error, Rejected) else (error,)
    text = "".join(f"{f.message} {f.hint} {f.at.text if f.at else ''}" for f in findings)
    assert words in text
    assert error.exit_code == 2


@pytest.mark.parametrize("form", ["json", "json in ASCII", "yaml"])
def test_a_hostile_branch_is_data_in_every_form(form: str) -> None:
    text = {
        "json": json.dumps({"branch": HOSTILE, "pull_request_number": 7}, ensure_ascii=False),
        "json in ASCII": json.dumps({"branch": HOSTILE, "pull_request_number": 7}),
        "yaml": f"branch: {json.dumps(HOSTILE, ensure_ascii=False)}\npull_request_number: 7\n",
    }[form]

    assert task(file="-", stdin=text.encode()) == {"branch": HOSTILE, "pull_request_number": 7}
    assert task(f"branch={HOSTILE}") == {"branch": HOSTILE}


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        pytest.param(b"", "manifest.bad-value", id="empty"),
        pytest.param(b"[1]", "manifest.bad-value", id="a list"),
        pytest.param(b"a: [", "manifest.syntax", id="broken"),
        pytest.param(b"brnch: x", "manifest.unknown-field", id="unknown field"),
        pytest.param(b"pull_request_number: '7'", "manifest.bad-value", id="wrong type"),
        pytest.param(b"branch: a\n---\nbranch: b", "manifest.bad-value", id="two documents"),
        pytest.param(b'{"branch": "\\ud800"}', "manifest.encoding", id="a lone surrogate"),
    ],
)
def test_a_file_that_is_no_task_is_refused_at_its_place(raw: bytes, code: str) -> None:
    with pytest.raises(Rejected) as refused:
        task(file="-", stdin=raw)

    assert code in [finding.code for finding in refused.value.findings]
    assert all(finding.exit_code == 2 for finding in refused.value.findings)


def test_a_file_that_is_not_there_or_endless_is_an_error(tmp_path: Path) -> None:
    for name in (str(tmp_path / "none"), "/dev/zero"):
        with pytest.raises(RunnerError, match=r"cannot be read|not a regular file"):
            task(file=name)


PULL = {
    "pull_request": {
        "number": 7,
        "head": {"ref": HOSTILE, "sha": SHA, "repo": {"clone_url": "https://x.org/fork/repo.git"}},
        "base": {"ref": "main"},
    }
}
GITHUB = {
    "GITHUB_SERVER_URL": "https://x.org",
    "GITHUB_REPOSITORY": "org/repo",
    "GITHUB_REF": "refs/heads/topic",
    "GITHUB_REF_NAME": "topic",
    "GITHUB_SHA": "b" * 40,
}


PUSHED = {"repository_url": "https://x.org/org/repo", "commit": "b" * 40}
FORK = {
    "repository_url": "https://x.org/fork/repo",
    "branch": HOSTILE,
    "base_branch": "main",
    "pull_request_number": 7,
    "commit": SHA,
}


@pytest.mark.parametrize(
    ("event", "more", "found"),
    [
        pytest.param(PULL, {}, FORK | {"repository_url": "https://x.org/fork/repo.git"}, id="pull request of a fork"),
        pytest.param({}, {}, PUSHED | {"branch": "topic"}, id="push"),
        pytest.param({}, {"GITHUB_REF": "refs/tags/v1", "GITHUB_REF_NAME": "v1"}, PUSHED, id="tag"),
        pytest.param([], {}, PUSHED | {"branch": "topic"}, id="an event of another shape"),
    ],
)
def test_github_says_the_task(tmp_path: Path, event: object, more: dict[str, str], found: dict[str, object]) -> None:
    (tmp_path / "event.json").write_text(json.dumps(event))

    assert task(ci="github", env={**GITHUB, **more, "GITHUB_EVENT_PATH": str(tmp_path / "event.json")}) == found


def test_gitlab_says_the_merge_request() -> None:
    env = {
        "CI_PROJECT_URL": "https://x.org/org/repo",
        "CI_REPOSITORY_URL": "https://gitlab-ci-token:secret@x.org/org/repo.git",
        "CI_COMMIT_SHA": "b" * 40,
        "CI_MERGE_REQUEST_IID": "7",
        "CI_MERGE_REQUEST_SOURCE_PROJECT_URL": "https://x.org/fork/repo",
        "CI_MERGE_REQUEST_SOURCE_BRANCH_NAME": HOSTILE,
        "CI_MERGE_REQUEST_TARGET_BRANCH_NAME": "main",
        "CI_MERGE_REQUEST_SOURCE_BRANCH_SHA": SHA,
    }

    assert task(ci="gitlab", env=env) == FORK


@pytest.mark.parametrize(
    ("ci", "env", "words"),
    [
        pytest.param("github", {}, "needs `GITHUB_REPOSITORY`", id="not in github"),
        pytest.param("gitlab", {}, "needs `CI_PROJECT_URL`", id="not in gitlab"),
        pytest.param("github", {**GITHUB, "GITHUB_EVENT_PATH": __file__}, "not the JSON of an event", id="no event"),
    ],
)
def test_a_ci_that_is_not_there_is_said(ci: str, env: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        task(ci=ci, env=env)
