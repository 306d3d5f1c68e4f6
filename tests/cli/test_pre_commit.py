"""The pre-commit hooks, by pre-commit itself: the one that ``init`` writes, and the one that this repository ships."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.test_init import BIN, PYTHON, commit_files
from tests.support.situations import Project, git

ROOT = Path(__file__).parents[2]


def pre_commit(project: Project, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / "pre-commit", *arguments],
        cwd=project.folder,
        env={"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(project.home), **env},
        capture_output=True,
        text=True,
    )


def check_hook(project: Project, *words: str, **env: str) -> None:
    """A good policy passes, and a misspelt one does not."""
    good = pre_commit(project, *words, **env)
    policy = project.folder / ".runner" / "policy.runner.yaml"
    policy.write_text(policy.read_text().replace("max_file_size", "max_file_sise"))
    git(project.folder, "add", "-A")
    bad = pre_commit(project, *words, **env)

    assert good.returncode == 0, good.stdout + good.stderr
    assert "Passed" in good.stdout
    assert bad.returncode == 1
    assert "did you mean `max_file_size`?" in bad.stdout


@pytest.mark.nightly
def test_the_hook_that_init_writes_judges_what_is_committed(project: Project) -> None:
    commit_files(project.folder, PYTHON)
    project.runner("init", "--pre-commit")
    git(project.folder, "add", "-A")

    check_hook(project, "run")


def test_the_hook_that_init_shows_where_there_are_others_is_the_one_that_it_writes(project: Project) -> None:
    commit_files(project.folder, {**PYTHON, ".pre-commit-config.yaml": "repos: []\n"})

    shown = project.runner("init").out
    shutil.rmtree(project.folder / ".runner")
    (project.folder / ".pre-commit-config.yaml").unlink()
    project.runner("init", "--pre-commit")

    assert (project.folder / ".pre-commit-config.yaml").read_text().strip() in shown


@pytest.mark.nightly
def test_the_hook_of_this_repository_installs_and_runs(project: Project, tmp_path: Path) -> None:
    """Builds the package, and installs it with what it needs, as pre-commit does for a team."""
    ours = tmp_path / "runner"
    left_out = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".runner-state", ".hypothesis", "__pycache__")
    shutil.copytree(ROOT, ours, ignore=left_out)
    commit_files(ours, {})
    commit_files(project.folder, PYTHON)
    project.runner("init")
    git(project.folder, "add", "-A")
    registry = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}

    check_hook(project, "try-repo", str(ours), "runner-validate", "--all-files", **registry)
