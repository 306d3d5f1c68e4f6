"""Whole runs on repositories by URL, with git's own back end behind https on the loopback."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.safefs import trees
from tests.support.git_servers import Https, https
from tests.support.needs import OPENSSL
from tests.support.situations import Project, commit, git, step

pytestmark = OPENSSL.mark


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """`org/repo` with main, develop and feature/auth; each has a file of its name."""
    path = tmp_path / "served" / "org" / "repo"
    path.mkdir(parents=True)
    git(path, "init", "-q", "-b", "main")
    for branch in ("main", "develop", "feature/auth"):
        git(path, "checkout", "-q", "-B", branch)
        (path / branch.replace("/", "-")).write_text(f"{branch}\n")
        git(path, "add", "-A")
        git(path, "commit", "-qm", branch)
    git(path, "checkout", "-q", "main")
    other = path.with_name("other")
    subprocess.run(["git", "clone", "-q", str(path), str(other)], check=True)
    return path


@pytest.fixture
def server(served: Path, tmp_path: Path, project: Project) -> Iterator[Https]:
    with https(tmp_path / "served", tmp_path) as server:
        project.env |= server.env
        yield server


def fixed(server: Https) -> str:
    return f"repo_source: {{type: fixed, url: '{server.url}/org/repo'}}"


@pytest.mark.scenario("CFG-11")
@pytest.mark.slow
def test_the_branch_of_a_task_is_cloned_and_the_agent_reads_the_task(
    project: Project, server: Https, served: Path
) -> None:
    url = f"{server.url}/org/repo"
    project.script(
        """
        git rev-parse HEAD --abbrev-ref HEAD; git remote get-url origin; git rev-parse --abbrev-ref '@{upstream}'
        cat feature-auth
        tr -d ' \n"' < /run/runner/task.json; echo
        echo $RUNNER_TASK_PULL_REQUEST_NUMBER $RUNNER_TASK_BASE_BRANCH $RUNNER_TASK_BRANCH $RUNNER_TASK_REPOSITORY_URL
        """,
        run=f"""
        task: {{repository_url: "{url}", branch: feature/auth, pull_request_number: 42, base_branch: main}}
        """,
    )

    record = project.succeed()

    head = git(served, "rev-parse", "feature/auth")
    said = project.logs("agent").splitlines()
    assert said[:5] == [head, "feature/auth", url, "origin/feature/auth", "feature/auth"]
    assert all(field in said[5] for field in ("base_branch:main", "pull_request_number:42", "branch:feature/auth"))
    assert said[6] == f"42 main feature/auth {url}"
    assert f"{head[:12]} on feature/auth" in step(record, "clone")["outcome"]["message"]


@pytest.mark.scenario("CFG-12")
@pytest.mark.parametrize(
    ("task", "expected"), [(", branch: develop", "develop"), ("", "feature/auth")], ids=["of the task", "the fallback"]
)
def test_a_task_branch_wins_over_the_agent_types(
    project: Project, server: Https, served: Path, task: str, expected: str
) -> None:
    project.script(
        "git rev-parse --abbrev-ref HEAD; git rev-parse HEAD",
        workspace="repo_source: {type: task_context, branch: feature/auth}",
        run=f"task: {{repository_url: '{server.url}/org/repo'{task}}}",
    )

    project.succeed()

    assert project.logs("agent").split() == [expected, git(served, "rev-parse", expected)]


@pytest.mark.scenario("CFG-03")
def test_a_fixed_repository_is_cloned_whatever_the_task_says(project: Project, server: Https, served: Path) -> None:
    project.script(
        "git remote get-url origin; git rev-parse --abbrev-ref HEAD; git rev-list --count HEAD",
        workspace=fixed(server),
        run=f"task: {{repository_url: '{server.url}/org/other', branch: develop, commit: {'a' * 40}}}",
    )

    project.succeed()

    assert project.logs("agent").split() == [f"{server.url}/org/repo", "main", "1"]
    assert not any("other" in path for path in server.server.seen)


def test_a_plan_shows_and_pins_what_a_url_means(project: Project, server: Https, served: Path) -> None:
    project.env["COLUMNS"] = "240"
    project.script("git rev-parse HEAD", workspace=fixed(server))
    planned = git(served, "rev-parse", "main")
    file = project.folder / "plan.json"

    shown = project.runner("plan", ".", "--save", str(file))
    git(served, "commit", "-q", "--allow-empty", "-m", "moved")
    done = project.runner("apply", str(file))

    assert f"{planned[:12]} = main of {server.url}/org/repo, pinned" in shown.out
    assert "depth 1" in shown.out
    assert done.code == 0, done.out + done.err
    assert project.logs("agent").strip() == planned


def test_a_plan_whose_commit_is_gone_from_server_and_mirror_is_stale(
    project: Project, server: Https, served: Path
) -> None:
    project.script("true", workspace=fixed(server))
    file = project.folder / "plan.json"
    project.runner("plan", ".", "--save", str(file))
    shutil.rmtree(served)
    served.mkdir()
    git(served, "init", "-q", "-b", "main")
    git(served, "commit", "-q", "--allow-empty", "-m", "another history")

    kept = project.runner("apply", str(file))
    trees.remove(project.home / "state")
    done = project.runner("apply", str(file))

    assert kept.code == 0, kept.out + kept.err
    assert (done.code, "error[plan.stale]" in done.err) == (2, True)
    assert project.json("runs", "list") == []


OWN = ".agentgate/policy.yaml"


def own_policy(served: Path, text: str) -> str:
    """A commit on main with a policy; its id."""
    (served / OWN).parent.mkdir(exist_ok=True)
    (served / OWN).write_text(text)
    commit(served, "policy")
    return git(served, "rev-parse", "HEAD")


@pytest.mark.scenario("WSM-18")
def test_the_policy_of_a_repository_by_url_is_in_force_as_its_pinned_commit_has_it(
    project: Project, server: Https, served: Path
) -> None:
    commit = own_policy(served, "forbiddenPatterns: ['**/*.bak']\n")
    project.env["COLUMNS"] = "240"
    project.script("echo > .env", workspace=fixed(server))
    file = project.folder / "plan.json"
    shown = project.runner("plan", ".", "--save", str(file))
    own_policy(served, "forbiddenPatterns: ['**/.env']\n")
    changed = project.runner("plan", ".", "--against", str(file), "--exit-code")

    done = project.runner("apply", str(file))

    assert f"policy repository ({OWN} at {commit[:12]})" in " ".join(shown.out.split())
    assert changed.code == 9
    assert done.code == 0, done.out + done.err
    record = project.record()
    assert "not in force" not in json.dumps(record)
    assert "+++ b/.env" in project.runner("runs", "patch", "last").out
    assert project.runner("apply", ".").code == 3


def test_a_bad_policy_behind_a_url_is_said_at_its_place_and_offline_stays_open(
    project: Project, server: Https, served: Path
) -> None:
    own_policy(served, "forbidenPatterns: ['**/*.pem']\n")
    project.script("true", workspace=fixed(server))

    offline, asked = project.runner("plan", ".", "--offline"), server.asked
    planned = project.runner("plan", ".")
    checked = project.runner("policy", "check", "x", "--run", "work", "--manifests", str(project.folder))

    assert (offline.code, asked) == (0, 0)
    for said in (planned, checked):
        assert said.code == 2
        assert "error[manifest.unknown-field]" in said.err
        assert f"{OWN}:1:1" in said.err
