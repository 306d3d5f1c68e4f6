"""``runner init --quickstart``: the quickstart where it can be run, with a repository of its own, whatever is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.situations import Project, git


@pytest.fixture(params=["git", "no git"])
def quickstart(request: pytest.FixtureRequest, project: Project, tmp_path: Path) -> Path:
    if request.param == "no git":
        (tmp_path / "empty").mkdir()
        project.env["PATH"] = str(tmp_path / "empty")
    to = project.folder / "a copy"
    done = project.runner("init", "--quickstart", str(to))
    project.env.pop("PATH", None)
    assert (done.code, done.out) == (0, f"wrote {to}\n\nNext: runner apply '{to}'\n"), done.err
    return to


def test_the_copy_has_a_repository_with_what_the_selftest_lists(quickstart: Path) -> None:
    repository = quickstart / "repository"
    tracked = git(repository, "ls-files").split()

    assert git(repository, "status", "--porcelain") == ""
    assert {"runners/claude.sh", "runners/common.sh", "tests/runners/check.sh"} <= set(tracked)
    assert not any(name.startswith("runners/image/") for name in tracked)
    assert sorted(path.name for path in quickstart.iterdir()) == [
        "incident", "repository", "selftest.runner.yaml", "selftest.sh", "triage.runner.yaml", "triage.sh",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("quickstart", ["no git"], indirect=True)
def test_both_runs_of_the_copy_succeed(project: Project, quickstart: Path) -> None:
    done = project.runner("apply", str(quickstart))

    assert done.code == 0, done.out + done.err
    assert "verify       " in done.out
    assert (quickstart / "incident" / "output" / "investigation.md").exists()
    assert git(quickstart / "repository", "status", "--porcelain") == ""


def test_an_empty_directory_is_filled_and_any_other_refused(project: Project) -> None:
    (project.folder / "full").mkdir()
    (project.folder / "full" / "file").touch()
    (project.folder / "empty").mkdir()

    filled = project.runner("init", "--quickstart", "empty")
    again = project.runner("init", "--quickstart", "empty")
    full = project.runner("init", "--quickstart", "full")
    file = project.runner("init", "--quickstart", "full/file")
    nowhere = project.runner("init", "--quickstart", "/proc/nowhere/x")
    mixed = project.runner("init", "--quickstart", "other", "--pre-commit")

    assert filled.code == 0, filled.err
    assert [done.code for done in (again, full, file, nowhere, mixed)] == [2] * 5
    assert "error[init.exists]" in again.err
    assert "error[init.exists]" in full.err
    assert "error[init.not-written]" in file.err
    assert "error[init.not-written]" in nowhere.err
    assert "error[cli.usage]" in mixed.err
    assert not (project.folder / "other").exists()
    assert [path.name for path in (project.folder / "full").iterdir()] == ["file"]
