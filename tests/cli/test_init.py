"""What ``runner init`` writes works at once: validated, planned, and run on the real sandbox in small repositories."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from runner.app.init import find_rule
from tests.needs import program
from tests.situations import Project, git, step

TESTED = "import unittest\n\nclass T(unittest.TestCase):\n    def test_one(self): self.assertEqual(1, 1)\n"
PYTHON = {"test_app.py": TESTED}
NPM = '{"name": "app", "scripts": {"test": "node -e 0"}}'
BIN = Path(sys.executable).parent  # where `runner` and `pre-commit` are


def commit(folder: Path, files: dict[str, str]) -> None:
    """A repository of these files and one commit; those that start with `#!` may be executed."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if text.startswith("#!") else 0o644)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A", "-f")
    git(folder, "commit", "-qm", "first")


def files_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and ".git" not in path.relative_to(folder).parts
    }


@pytest.mark.parametrize(
    ("files", "command"),
    [
        pytest.param(PYTHON, "python3 -m unittest", id="python"),
        pytest.param(
            {"tests/test_app.py": TESTED},
            "python3 -m unittest discover -s tests",
            id="python in a folder",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"tests/__init__.py": "", "tests/test_a.py": TESTED},
            "python3 -m unittest",
            id="python package",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"Makefile": "all:\n\ntest: ; test -f Makefile\n"}, "make test", id="make", marks=pytest.mark.nightly
        ),
        pytest.param({"package.json": NPM, "package-lock.json": "{}"}, "npm test", id="npm", marks=program("npm").mark),
    ],
)
def test_what_is_written_runs_the_tests_of_the_repository(
    project: Project, files: dict[str, str], command: str
) -> None:
    commit(project.folder, files)

    begun = project.runner("init")
    validated, planned = project.runner("validate"), project.runner("plan")
    applied, record = project.apply()

    assert (begun.code, begun.err) == (0, "")
    assert f"tests: {command}\n" in begun.out
    assert (validated.code, validated.out) == (0, "3 documents fine\n")
    assert planned.code == 0, planned.err
    assert applied.code == 0, applied.out + project.logs("verify", "stderr")
    assert step(record, "verify")["outcome"]["details"] == [f"`{command}` exited 0"]


def test_a_repository_whose_tests_fail_fails_the_run(project: Project) -> None:
    commit(project.folder, {"Makefile": "test:\n\tfalse\n"})
    project.runner("init")

    done, record = project.apply()

    assert (done.code, record["outcome"]["reason"]) == (1, "verify")


@pytest.mark.parametrize(
    ("files", "command"),
    [
        pytest.param({"Makefile": "test: build\n", "go.mod": ""}, "make test", id="make before all"),
        pytest.param({"Makefile": "test := x\n", "go.mod": ""}, "go test ./...", id="make variable"),
        pytest.param({"package.json": NPM, "pnpm-lock.yaml": ""}, "pnpm test", id="pnpm"),
        pytest.param({"package.json": NPM, "yarn.lock": ""}, "yarn test", id="yarn"),
        pytest.param({"package.json": "{}"}, None, id="npm without tests"),
        pytest.param({"conftest.py": "", **PYTHON}, "python3 -m pytest", id="conftest"),
        pytest.param({"tox.ini": "deps = pytest"}, "python3 -m pytest", id="pytest by tox"),
        pytest.param({"pyproject.toml": "[tool.pytest.ini_options]"}, "python3 -m pytest", id="pytest by pyproject"),
        pytest.param({"setup.py": ""}, "python3 -m unittest", id="setup.py"),
        pytest.param({"Cargo.toml": ""}, "cargo test", id="cargo"),
        pytest.param({"pom.xml": "", "mvnw": ""}, "./mvnw test", id="maven wrapper"),
        pytest.param({"pom.xml": ""}, "mvn test", id="maven"),
        pytest.param({"build.gradle.kts": "", "gradlew": ""}, "./gradlew test", id="gradle wrapper"),
        pytest.param({"build.gradle": ""}, "gradle test", id="gradle"),
        pytest.param({"README": ""}, None, id="nothing known"),
    ],
)
def test_the_test_command_is_found_by_the_files(tmp_path: Path, files: dict[str, str], command: str | None) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    rule = find_rule(tmp_path)

    assert (" ".join(rule.command) if rule else None) == command


def test_a_tool_outside_the_system_is_shown_to_the_sandbox(project: Project, tmp_path: Path) -> None:
    commit(project.folder, {"Cargo.toml": ""})
    tool = tmp_path / "rust" / "bin" / "cargo"
    tool.parent.mkdir(parents=True)
    tool.write_text('#!/bin/sh\ncat "$(dirname "$(readlink -f "$0")")/../VERSION"\n')
    tool.chmod(0o755)
    (tmp_path / "rust" / "VERSION").write_text("rust 1\n")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "cargo").symlink_to("../rust/bin/cargo")
    project.env = {"PATH": f"{tmp_path}/links:{os.environ['PATH']}"}

    project.runner("init")
    done, _ = project.apply()

    assert done.code == 0, done.err + project.logs("verify", "stderr")
    (agent,) = YAML(typ="safe").load_all(project.folder / ".runner/agent.runner.yaml")
    assert agent["spec"]["workspace"]["toolchains"] == [f"{tmp_path}/links", f"{tmp_path}/rust"]


def test_of_a_home_folder_only_the_programs_are_shown(project: Project) -> None:
    """``~/.cargo`` holds the credentials of a registry beside `bin`."""
    commit(project.folder, {"Cargo.toml": ""})
    tool = project.home / ".cargo" / "bin" / "cargo"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    project.env = {"PATH": f"{tool.parent}:/usr/bin:/bin"}

    project.runner("init")

    (agent,) = YAML(typ="safe").load_all(project.folder / ".runner/agent.runner.yaml")
    assert agent["spec"]["workspace"]["toolchains"] == [str(tool.parent)]


def test_the_environment_of_the_repository_is_used(project: Project) -> None:
    commit(project.folder, PYTHON)
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", ".venv"], cwd=project.folder, check=True)

    project.runner("init")
    done, _ = project.apply()

    (agent,) = YAML(typ="safe").load_all(project.folder / ".runner/agent.runner.yaml")
    assert agent["spec"]["workspace"]["toolchains"] == [str(project.folder / ".venv")]
    assert agent["spec"]["env"]["PATH"].startswith(f"{project.folder}/.venv/bin:")
    assert done.code == 0, project.logs("verify", "stderr")


def test_a_virtual_environment_of_somebody_else_is_not_written_down(project: Project, tmp_path: Path) -> None:
    """Such as runner's own, which is on the ``PATH`` of whoever activated it and nowhere in a CI."""
    commit(project.folder, {"conftest.py": ""})
    other = tmp_path / "other"
    (other / "bin").mkdir(parents=True)
    (other / "pyvenv.cfg").write_text("")
    (other / "bin" / "pytest").write_text("#!/bin/sh\n")
    (other / "bin" / "pytest").chmod(0o755)
    project.env = {"PATH": f"{other}/bin:/usr/bin:/bin"}

    begun = project.runner("init")

    assert "note: `pytest` is neither in the repository's .venv nor elsewhere here" in begun.out
    assert [name for name, text in files_of(project.folder).items() if str(tmp_path) in text] == []


def test_the_python_that_an_environment_leads_to_is_shown_too(project: Project, tmp_path: Path) -> None:
    python = tmp_path / "versions" / "3" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    commit(project.folder, {"conftest.py": "", ".venv/bin/pytest": "#!/bin/sh\n"})
    (project.folder / ".venv/bin/python3").symlink_to(python)

    begun = project.runner("init")

    (agent,) = YAML(typ="safe").load_all(project.folder / ".runner/agent.runner.yaml")
    places = [f"{project.folder}/.venv", str(python.parents[1])]
    assert agent["spec"]["workspace"]["toolchains"] == places
    assert f"note: `{places[0]}`, `{places[1]}`: of this machine" in begun.out


def test_a_test_command_can_be_named(project: Project) -> None:
    commit(project.folder, {"README": "hello\n"})

    begun = project.runner("init", "--test", "grep -q hello README && true")
    done, record = project.apply()

    assert (begun.code, done.code) == (0, 0)
    assert "grep -q hello README && true" in str(step(record, "verify")["outcome"]["details"])


@pytest.mark.parametrize("there", [".runner/x", ".github/workflows/runner.yml", ".pre-commit-config.yaml"])
def test_nothing_is_overwritten(project: Project, there: str) -> None:
    files = {**PYTHON, ".github/x": "", there: "mine\n"}
    commit(project.folder, files)

    done = project.runner("init", "--pre-commit")

    assert done.code == 2
    assert "error[init.exists]" in done.err
    assert f"`{'.runner' if there == '.runner/x' else there}` exists already" in done.err
    assert files_of(project.folder) == files


def test_a_write_that_fails_leaves_nothing_half_written(project: Project) -> None:
    files = {**PYTHON, ".github/workflows": "a file where a folder belongs\n"}
    commit(project.folder, files)

    done = project.runner("init")

    assert (done.code, "error[init.not-written]" in done.err) == (2, True)
    assert not (project.folder / ".runner").exists()
    assert files_of(project.folder) == files


@pytest.mark.parametrize(
    ("files", "code"),
    [
        pytest.param({"README": ""}, "cli.usage", id="no test command"),
        pytest.param(None, "git.source", id="no repository"),
        pytest.param({}, "git.unknown-commit", id="no commit"),
    ],
)
def test_what_cannot_be_run_is_not_begun(project: Project, files: dict[str, str] | None, code: str) -> None:
    if files:
        commit(project.folder, files)
    elif files is not None:
        git(project.folder, "init", "-q")

    done = project.runner("init")

    assert done.code != 0
    assert f"error[{code}]" in done.err
    assert not (project.folder / ".runner").exists()


def test_the_job_for_github_does_what_it_says(project: Project) -> None:
    commit(project.folder, {**PYTHON, ".github/dependabot.yml": "version: 2\n"})
    project.runner("init")

    workflow = YAML(typ="safe").load(project.folder / ".github/workflows/runner.yml")
    commands = [s["run"] for s in workflow["jobs"]["runner"]["steps"] if s.get("run", "").startswith("runner ")]
    env = {"PATH": f"{BIN}:/usr/bin:/bin", "HOME": str(project.home), "RUNNER_HOME": str(project.home / "state")}
    env |= {"GITHUB_REPOSITORY": "team/shop", "GITHUB_REF": "refs/pull/7/merge", "GITHUB_SHA": "0" * 40}
    ended = {c: subprocess.run(["bash", "-e", "-c", c], cwd=project.folder, env=env).returncode for c in commands}

    apply = "runner apply --task-from github --junit runs.xml"
    assert ended == {"runner validate .": 0, "runner plan --task-from github": 0, apply: 0}
    assert "<testsuite " in (project.folder / "runs.xml").read_text()


def test_the_job_for_gitlab_is_shown_and_its_file_left_alone(project: Project) -> None:
    files = {**PYTHON, ".gitlab-ci.yml": "stages: [test]\n"}
    commit(project.folder, files)

    done = project.runner("init")

    shown = done.out.partition("for .gitlab-ci.yml:\n")[2].partition("\nfor ")[0]
    job = YAML(typ="safe").load(shown)["runner"]
    assert f"runner apply --task-from gitlab --junit {job['artifacts']['reports']['junit']}" in str(job["script"])
    assert (project.folder / ".gitlab-ci.yml").read_text() == files[".gitlab-ci.yml"]
