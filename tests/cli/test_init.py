"""What ``runner init`` writes works at once: validated, planned, and run on the real sandbox in small repositories."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from runner.ops.init import ci
from runner.ops.init.survey import install_words, survey
from tests.support.needs import ROOT, program
from tests.support.situations import Project, commit, git, step, write_files

TESTED = "import unittest\n\nclass T(unittest.TestCase):\n    def test_one(self): self.assertEqual(1, 1)\n"
PYTHON = {"test_app.py": TESTED}
NPM = '{"name": "app", "scripts": {"test": "node -e 0"}}'
BIN = Path(sys.executable).parent  # where `runner` and `pre-commit` are


def commit_files(folder: Path, files: dict[str, str]) -> None:
    """A repository of these files and one commit, whatever git would ignore."""
    write_files(folder, files)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A", "-f")
    git(folder, "commit", "-qm", "first")


def files_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and ".git" not in path.relative_to(folder).parts
    }


WRITTEN: dict[str, tuple[dict[str, str], str]] = {
    "python": (PYTHON, "python3 -m unittest"),
    "python in a folder": ({"tests/test_app.py": TESTED}, "python3 -m unittest discover -s tests"),
    "python package": ({"tests/__init__.py": "", "tests/test_a.py": TESTED}, "python3 -m unittest"),
    "make": ({"Makefile": "all:\n\ntest: ; test -f Makefile\n"}, "make test"),
    "npm": ({"package.json": NPM, "package-lock.json": "{}"}, "npm test"),
}
MARKS: dict[str, Any] = {"python": (), "npm": program("npm").mark}  # the others are for the night


@pytest.mark.parametrize(
    ("files", "command"),
    [pytest.param(*each, id=id, marks=MARKS.get(id, pytest.mark.nightly)) for id, each in WRITTEN.items()],
)
def test_what_is_written_runs_the_tests_of_the_repository(
    project: Project, files: dict[str, str], command: str
) -> None:
    commit_files(project.folder, files)

    begun = project.runner("init")
    validated, planned = project.runner("validate"), project.runner("plan")
    record = project.succeed()

    assert begun.code == 0, begun.out + begun.err
    assert begun.err == f"trying `{command}` in a sandbox\n"
    assert f"run: {command} " in begun.out
    assert "  the tests: passed in a sandbox in " in begun.out
    assert (validated.code, validated.out) == (0, "3 documents fine\n")
    assert planned.code == 0, planned.err
    assert step(record, "verify")["outcome"]["details"] == [f"`{command}` exited 0"]


def test_tests_that_fail_are_said_with_their_last_lines_and_the_nearest_is_written(project: Project) -> None:
    commit_files(project.folder, {"Makefile": "test:\n\t@echo one is wrong; false\n"})

    begun = project.runner("init")
    done, record = project.apply()

    assert begun.code == 1
    assert "✗ `make test`: it exited 2\n" in begun.out
    assert "    | one is wrong\n" in begun.out
    assert "Then: rm -r .runner, and runner init again" in begun.out
    assert (done.code, record["outcome"]["reason"]) == (1, "verify")


LACKING = [
    ("getaddrinfo EAI_AGAIN packages.example.org", "it needs the network, and a workspace has none"),
    ("ModuleNotFoundError: No module named 'requests'", "`requests` is not installed in what a workspace sees"),
    ("Error: Cannot find module 'left-pad'", "`left-pad` is not installed in what a workspace sees"),
    ("env: 'ruby': No such file or directory", "`ruby` is not installed in what a workspace sees"),
    ("FileNotFoundError: No such file or directory: 'golden.txt'", "it exited 2"),
    ("EROFS: Read-only file system, mkdir x", "it writes into what is shown read-only"),
]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        pytest.param(*LACKING[0]),
        pytest.param(*LACKING[1]),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in LACKING[2:]),
    ],
)
def test_what_a_command_lacks_is_named_with_the_way_on(project: Project, said: str, why: str) -> None:
    files = {"package.json": NPM, "package-lock.json": "{}", "Makefile": f'test:\n\t@echo "{said}" >&2; false\n'}
    commit_files(project.folder, files | {"package.json": "{}"})

    begun = project.runner("init")

    assert begun.code == 1
    assert f"✗ `make test`: {why}\n" in begun.out
    assert "  = hint: " in begun.out


@program("npm").mark
def test_the_next_way_is_tried_when_one_does_not_work(project: Project) -> None:
    files = {"package.json": NPM, "Makefile": "test:\n\tpip install x\n"}
    commit_files(project.folder, files)

    begun = project.runner("init")

    assert begun.err == "trying `make test` in a sandbox\ntrying `npm test` in a sandbox\n"
    assert (begun.code, "run: npm test" in begun.out) == (0, True)


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
    write_files(tmp_path, files)
    git(tmp_path, "init", "-q")
    ways = survey(tmp_path).ways

    assert (ways[0].words if ways else None) == command


def agent_of(project: Project) -> Any:
    """The agent type that was written."""
    (agent,) = YAML(typ="safe").load_all(project.folder / ".runner/agent.runner.yaml")
    return agent["spec"]["workspace"]


def mounts_of(record: dict[str, Any], name: str, project: Project) -> set[str]:
    plan = json.loads((project.directory(record) / "plan.json").read_text())
    (step_,) = [s for run in plan["runs"] for s in run["steps"] if s["id"] == name]
    return {mount["path"] for mount in step_["mounts"]}


def test_a_tool_outside_the_system_is_named_and_shown_with_all_that_it_links_to(
    project: Project, tmp_path: Path
) -> None:
    commit_files(project.folder, {"Cargo.toml": ""})
    tool = '#!/bin/sh\ncat "$(dirname "$(readlink -f "$0")")/../VERSION"\n'
    write_files(tmp_path / "rust", {"bin/cargo": tool, "VERSION": "rust 1\n"})
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "cargo").symlink_to("../rust/bin/cargo")
    project.env = {"PATH": f"{tmp_path}/links:{os.environ['PATH']}"}

    begun = project.runner("init")
    project.succeed()

    assert begun.code == 0, begun.out
    assert agent_of(project)["toolchains"] == ["cargo"]
    assert f"{tmp_path}/links, {tmp_path}/rust" in begun.out
    assert [name for name, text in files_of(project.folder).items() if str(tmp_path) in text] == []


def test_the_environment_of_the_repository_is_used_wherever_it_is_cloned(project: Project) -> None:
    """It is named by its path in the repository, and brings the Python that it links to."""
    module = "import left\nimport unittest\n\nclass T(unittest.TestCase):\n    def test_one(self): pass\n"
    commit_files(project.folder, {"test_app.py": module, ".gitignore": ".venv/\n"})
    python = [sys.executable, "-m", "venv", "--without-pip", ".venv"]
    subprocess.run(python, cwd=project.folder, check=True)
    (site,) = (project.folder / ".venv/lib").glob("python*/site-packages")
    (site / "left.py").touch()
    script = project.folder / ".venv/bin/left"
    script.write_text(f"#!{project.folder}/.venv/bin/python\nimport left\n")
    script.chmod(0o755)

    begun = project.runner("init", "--test", "left && python3 -m unittest && { touch .venv/x; true; }")
    project.succeed()

    assert agent_of(project)["dependencies"] == [".venv"]
    assert begun.code == 0, begun.out
    assert not (project.folder / ".venv/x").exists()


def test_a_virtual_environment_of_somebody_else_is_not_written_down(project: Project, tmp_path: Path) -> None:
    """Such as runner's own, which is on the ``PATH`` of whoever activated it and nowhere in a CI."""
    commit_files(project.folder, PYTHON)
    other = tmp_path / "other"
    write_files(other, {"pyvenv.cfg": "", "bin/python3": "#!/bin/sh\nexit 1\n"})
    project.env = {"PATH": f"{other}/bin:/usr/bin:/bin"}

    begun = project.runner("init")

    assert begun.code == 0, begun.out
    assert str(tmp_path) not in begun.out


@pytest.mark.nightly
@program("npm").mark
def test_modules_that_are_installed_are_seen_by_the_tests_and_a_changed_tree_is_what_they_test(
    project: Project,
) -> None:
    test = "require('pad'); if (require('fs').readFileSync('app.txt', 'utf8') !== 'right') process.exit(3)"
    package = {"name": "app", "scripts": {"test": "node test.js"}}
    files = {"package.json": json.dumps(package), "test.js": test, "app.txt": "right", ".gitignore": "node_modules\n"}
    commit_files(project.folder, files)
    (project.folder / "node_modules/pad").mkdir(parents=True)
    (project.folder / "node_modules/pad/index.js").write_text("module.exports = 1")

    begun = project.runner("init")
    record = project.succeed()
    (project.folder / ".runner/agent.sh").write_text("echo wrong >app.txt; touch node_modules/x\n")
    broken, _ = project.apply()

    assert begun.code == 0, begun.out
    assert agent_of(project)["dependencies"] == ["node_modules"]
    assert "node_modules" in mounts_of(record, "verify", project) & mounts_of(record, "agent", project)
    assert broken.code == 1
    assert not (project.folder / "node_modules/x").exists()


@pytest.mark.parametrize(
    ("dependency", "words"),
    [
        ("src", "`src` holds files of the repository"),
        ("loose", "`loose` is not ignored by git"),
        ("absent", "`absent` is not a directory of"),
        ("link", "`link` is not a directory of"),
        ("'*'", "is a pattern"),
    ],
)
def test_only_a_directory_that_git_ignores_is_a_dependency(project: Project, dependency: str, words: str) -> None:
    commit_files(project.folder, {**PYTHON, "src/app.py": "", ".gitignore": "/absent\n/link\n"})
    (project.folder / "loose").mkdir()
    (project.folder / "loose/file").touch()
    (project.folder / "link").symlink_to("/etc")
    source = "repo_source: {type: local, path: .}\n"
    project.script("true", workspace=f"{source}dependencies: [{dependency}]")

    done = project.runner("plan", ".")

    assert done.code == 2
    assert words in done.err


@pytest.mark.parametrize(
    ("workspace", "words"),
    [
        ("toolchains: [/opt]", "mount directories of the host"),
        ("toolchains: [aws]", "mount directories of the host"),
        ("dependencies: [secrets]", "see directories but those of package managers"),
    ],
)
def test_a_fork_sees_only_languages_and_what_package_managers_install(
    project: Project, workspace: str, words: str
) -> None:
    commit_files(project.folder, {".gitignore": "secrets\nnode_modules\n"})
    for name in ("secrets", "node_modules"):
        (project.folder / name).mkdir()
    source = "repo_source: {type: local, path: .}\n"
    project.script("true", workspace=f"{source}{workspace}")
    refused = project.runner("plan", ".", "--untrusted")
    project.script("true", workspace=f"{source}dependencies: [node_modules]\ntoolchains: [python3]")
    planned = project.runner("plan", ".", "--untrusted")

    assert (refused.code, words in refused.err) == (3, True)
    assert planned.code == 0, planned.err


def test_a_toolchain_that_nobody_has_is_named_in_the_plan(project: Project) -> None:
    project.script("true", workspace="toolchains: [no-such-program]\nrepo_source: {type: none}")

    done = project.runner("plan", ".")

    assert done.code == 2
    assert "`no-such-program` is not on the `PATH` here" in done.err


@pytest.mark.parametrize(
    ("files", "words"),
    [
        pytest.param({"uv.lock": ""}, "uv sync", id="uv"),
        pytest.param({"poetry.lock": ""}, "POETRY_VIRTUALENVS_IN_PROJECT=true poetry install", id="poetry"),
        pytest.param(
            {"requirements.txt": "", "requirements/tests.txt": ""},
            "-r requirements.txt -r requirements/tests.txt",
            id="files",
        ),
        pytest.param(
            {"pyproject.toml": "[project.optional-dependencies]\ntest = []"}, "pytest -e '.[test]'", id="extra"
        ),
        pytest.param({"pyproject.toml": "[dependency-groups]\ndev = []"}, "pytest --group dev -e .", id="group"),
        pytest.param({"pyproject.toml": "] broken"}, "pytest -e .", id="broken"),
    ],
)
def test_what_installs_the_dependencies_is_read_from_the_repository(
    tmp_path: Path, files: dict[str, str], words: str
) -> None:
    write_files(tmp_path, files)

    assert install_words(tmp_path, "python").endswith(words)


def test_an_interrupted_trial_leaves_nothing(project: Project) -> None:
    commit_files(project.folder, {"Makefile": "test:\n\tsleep 300\n"})
    begun = project.start("init")
    assert begun.stderr is not None
    assert begun.stderr.readline() == "trying `make test` in a sandbox\n"

    begun.send_signal(signal.SIGINT)
    begun.communicate(timeout=60)

    assert begun.returncode == 130
    assert not (project.folder / ".runner").exists()
    assert project.runner("workspace", "list", "--output", "json").out == "[]\n"


@ROOT.mark
def test_where_no_sandbox_can_be_had_nothing_is_tried_and_that_is_said(project: Project) -> None:
    commit_files(project.folder, PYTHON)
    none = 'echo 0 >/proc/sys/user/max_user_namespaces; exec setpriv --reuid 0 "$@"'
    project.within = ("unshare", "--user", "--map-root-user", "sh", "-c", none, "sh")

    begun = project.runner("init")

    assert begun.code == 4
    assert "Nothing was tried: `local` is not available: " in begun.out
    assert (project.folder / ".runner/check.runner.yaml").exists()


@pytest.mark.parametrize("there", [".runner/x", ".github/workflows/runner.yml", ".pre-commit-config.yaml"])
def test_nothing_is_overwritten(project: Project, there: str) -> None:
    files = {**PYTHON, ".github/x": "", there: "mine\n"}
    commit_files(project.folder, files)

    done = project.runner("init", "--pre-commit")

    assert done.code == 2
    assert "error[init.exists]" in done.err
    assert f"`{'.runner' if there == '.runner/x' else there}` exists already" in done.err
    assert files_of(project.folder) == files


def test_a_write_that_fails_leaves_nothing_half_written(project: Project) -> None:
    files = {**PYTHON, ".github/workflows": "a file where a folder belongs\n"}
    commit_files(project.folder, files)

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
        commit_files(project.folder, files)
    elif files is not None:
        git(project.folder, "init", "-q")

    done = project.runner("init")

    assert done.code != 0
    assert f"error[{code}]" in done.err
    assert not (project.folder / ".runner").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("fork", [False, True], ids=["own", "fork"])
def test_the_job_for_github_does_what_it_says(project: Project, fork: bool) -> None:
    """On a shallow, detached checkout, with what its own steps install, and a stranger's manifests untrusted."""
    commit_files(project.folder, {**PYTHON, ".gitignore": ".venv/\n", "requirements.txt": ""})
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=project.folder, check=True)
    project.runner("init", "--ci", "github")
    commit(project.folder, "runner")
    checkout = project.home / "checkout"
    git(project.home, "clone", "-q", "--depth", "1", f"file://{project.folder}", str(checkout))
    git(checkout, "checkout", "-q", "--detach")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=checkout, check=True)

    workflow = YAML(typ="safe").load(checkout / ".github/workflows/runner.yml")
    job = workflow["jobs"]["runner"]
    commands = [s["run"] for s in job["steps"] if s.get("run", "").startswith("runner ")]
    env = {"PATH": f"{BIN}:/usr/bin:/bin", "HOME": str(project.home), "RUNNER_HOME": str(project.home / "state")}
    env |= {"GITHUB_REPOSITORY": "team/shop", "GITHUB_REF": "refs/pull/7/merge", "GITHUB_SHA": "0" * 40}
    env |= {"GITHUB_ACTIONS": "true", "CI": "true", "TRUST": "--untrusted" if fork else ""}
    ended = {c: subprocess.run(["bash", "-e", "-c", c], cwd=checkout, env=env).returncode for c in commands}

    assert job["env"] == {"TRUST": "${{ github.event.pull_request.head.repo.fork && '--untrusted' || '' }}"}
    apply = "runner apply --task-from github $TRUST --junit runs.xml"
    assert ended == {"runner validate .": 0, "runner plan --task-from github $TRUST": 0, apply: 0}
    assert "<testsuite " in (checkout / "runs.xml").read_text()


@pytest.mark.parametrize(
    ("files", "steps"),
    [
        pytest.param({"package-lock.json": "{}", "package.json": NPM}, ["npm ci"], id="npm"),
        pytest.param({"requirements.txt": "", **PYTHON}, [".venv/bin/pip install"], id="python"),
        pytest.param({"go.mod": "module x\n"}, ["go mod download"], id="go"),
        pytest.param({"Makefile": "test:\n"}, [], id="make"),
    ],
)
def test_the_job_installs_what_the_repository_needs_and_runner_by_its_own_name(
    tmp_path: Path, files: dict[str, str], steps: list[str]
) -> None:
    write_files(tmp_path, {**files, ".gitignore": "node_modules/\n.venv/\n"})
    git(tmp_path, "init", "-q")
    (tmp_path / "node_modules").mkdir()

    job = YAML(typ="safe").load(ci.github_job(survey(tmp_path)))["jobs"]["runner"]

    commands = [s["run"] for s in job["steps"] if "run" in s]
    name = ci.package().partition("==")[0]
    assert [any(step in command for command in commands) for step in steps] == [True] * len(steps)
    assert f"pipx install {name}=={version(name)}" in commands
    assert YAML(typ="safe").load(ci.gitlab_job(survey(tmp_path)))["runner"]["script"]


def test_the_job_for_gitlab_is_shown_and_its_file_left_alone(project: Project) -> None:
    files = {**PYTHON, ".gitlab-ci.yml": "stages: [test]\n"}
    commit_files(project.folder, files)

    done = project.runner("init")

    shown = done.out.partition("for .gitlab-ci.yml:\n")[2].partition("\nfor ")[0]
    job = YAML(typ="safe").load(shown)["runner"]
    assert f"runner apply --task-from gitlab ${{TRUST:-}} --junit {job['artifacts']['reports']['junit']}" in str(
        job["script"]
    )
    assert (project.folder / ".gitlab-ci.yml").read_text() == files[".gitlab-ci.yml"]
