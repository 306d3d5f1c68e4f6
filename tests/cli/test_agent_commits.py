"""The agent's own commits: bundled where the agent ran, judged, kept, and delivered if they are all of the work."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from tests.support.bad_input import say
from tests.support.situations import IDENTITY, REPO, Project, git, step

TWO = "echo 1 > one; git add -A; git commit -qm 'first of mine'; echo 2 > one; git commit -qam 'second of mine'\n"


@pytest.mark.nightly
def test_the_agents_own_history_becomes_a_branch_when_asked_for(project: Project, repository: Path) -> None:
    project.script(IDENTITY + TWO, workspace=REPO)
    base = git(repository, "rev-parse", "HEAD")

    record = project.succeed()
    whole = say(project, "runs", "branch", "last", "--unverified", "--name", "whole")
    said = say(project, "runs", "branch", "last", "--unverified", "--commits", "--name", "own")

    commits = record["commits"]
    bundle = project.directory(record) / commits["bundle"]
    assert (commits["count"], commits["tree"], commits["withheld"]) == (2, record["snapshot"]["tree"], "")
    assert commits["bundle_sha256"] == sha256(bundle.read_bytes()).hexdigest()
    assert f"commits    2 of the agent's own: {bundle}" in project.runner("runs", "show", "last").out
    assert whole.code == said.code == 0, said.err
    assert git(repository, "log", "--format=%s %an", f"{base}..own").splitlines() == [
        "second of mine a", "first of mine a",
    ]  # fmt: skip
    assert git(repository, "diff", "whole", "own") == ""
    assert git(repository, "bundle", "list-heads", str(bundle)) == f"{commits['commit']} HEAD"


def test_no_commits_are_no_commits(project: Project, repository: Path) -> None:
    project.script("echo 1 > one; git add one", workspace=REPO)

    done, record = project.apply()
    said = say(project, "runs", "branch", "last", "--unverified", "--commits")

    assert (done.code, record["commits"]) == (0, None)
    assert (said.code, said.errors) == (6, ["deliver.nothing-published"])


def test_commits_that_are_not_all_of_the_work_are_kept_and_not_delivered(project: Project, repository: Path) -> None:
    project.script(f"{IDENTITY}{TWO}echo 3 > one", workspace=REPO)

    record = project.succeed()
    said = say(project, "runs", "branch", "last", "--unverified", "--commits")

    assert (project.directory(record) / record["commits"]["bundle"]).is_file()
    assert (said.code, said.errors) == (2, ["deliver.commits-differ"])
    assert say(project, "runs", "branch", "last", "--unverified").code == 0


TAKEN_BACK = {
    "secret": ("echo TOKEN=1 > .env; git add -f .env; git commit -qm a; git rm -q .env", "forbidden"),
    "size": ("head -c 2000 /dev/zero > a; git add a; git commit -qm a; git rm -q a", "max-file-size"),
    "protected": (
        "git update-index --cacheinfo 100644,$(git hash-object -w one),src/app.sh; git commit -qm a; "
        "git reset -q --soft HEAD; git add -A",
        "protected",
    ),
}


@pytest.mark.parametrize(("script", "rule"), TAKEN_BACK.values(), ids=TAKEN_BACK)
def test_what_a_later_commit_takes_back_still_breaks_policy(
    project: Project, repository: Path, script: str, rule: str
) -> None:
    project.script(
        f"{IDENTITY}{TWO}{script}; git commit -qm 'as if nothing had been'",
        workspace=f"{REPO}\nprotected_paths: [src]",
        policy="max_file_size: 1000",
    )

    record = project.succeed()
    said = say(project, "runs", "branch", "last", "--unverified", "--commits")

    assert record["violations"] == []
    assert [violation["rule"].split(":")[0] for violation in record["commits"]["violations"]][:1] == [rule]
    assert "of the agent withheld" in step(record, "snapshot")["outcome"]["message"]
    assert not list(project.directory(record).glob("*.bundle"))
    assert (said.code, said.errors) == (3, ["deliver.withheld"])
    assert say(project, "runs", "branch", "last", "--unverified").code == 0


ELSEWHERE = {
    "orphan": ("git checkout -q --orphan x; git commit -qm x", "not all of the commits are built on"),
    "amended": ("git reset -q --soft HEAD~2; git commit -q --amend -m x", "not all of the commits"),
    "of no version": ("git config core.repositoryFormatVersion 99", "git inside exited 128"),
}


@pytest.mark.parametrize(("script", "words"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_history_that_is_not_on_the_base_is_withheld(
    project: Project, repository: Path, script: str, words: str
) -> None:
    project.script(f"{IDENTITY}{TWO}{script}", workspace=REPO)

    record = project.succeed()

    assert words in record["commits"]["withheld"]
    assert not list(project.directory(record).glob("*.bundle"))


def test_what_an_agents_git_starts_reaches_neither_tree_nor_output(project: Project, repository: Path) -> None:
    """Its git is asked where the agent ran, in a tree that is thrown away."""
    project.script(
        f"""{IDENTITY}{TWO}
        printf '#!/bin/sh\\ntouch /workspace/canary\\ntouch /output/canary\\nexit 1\\n' > .git/evil; chmod +x .git/evil
        for key in core.fsmonitor core.sshCommand core.pager uploadpack.packObjectsHook diff.external; do
            git config $key /workspace/.git/evil
        done
        """,
        workspace=REPO,
    )

    record = project.succeed()

    assert record["commits"]["count"] == 2
    assert "canary" not in json.dumps(record)


def test_uncommitted_files_of_the_user_are_no_base_for_commits(project: Project, repository: Path) -> None:
    (repository / "README").write_text("dirty\n")
    project.script(IDENTITY + TWO, workspace="repo_source: {type: local, path: repo, include_dirty: true}")

    done, record = project.apply()

    assert (done.code, record["commits"]) == (0, None), done.out + done.err
