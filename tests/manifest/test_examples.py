"""The examples show every kind, and what they show is so."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from runner.core.settings import shipped
from runner.manifest.load import kinds, load
from tests.support import dockerd
from tests.support.needs import GO, program
from tests.support.situations import Project, git, step

EXAMPLES = shipped("manifests") / "examples"
RUNS = [document.name for document in load(EXAMPLES)[0] if document.kind == "IncidentRun"]


def test_every_kind_has_an_example() -> None:
    documents, found = load(EXAMPLES)

    assert not found
    assert {document.kind for document in documents} == {*kinds()}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda p: p.name)
def test_a_file_holds_one_document(path: Path) -> None:
    assert len(load(path)[0]) == 1


@pytest.mark.parametrize("name", RUNS)
def test_an_example_compiles(project: Project, name: str) -> None:
    done = project.runner("plan", str(EXAMPLES), "--run", name)

    of_this_host = (
        r"plan\.not-enforced|agent\.cli-missing|gateway\.key-missing"  # limits that root alone keeps, CLIs, keys
    )
    assert re.findall(rf"^\w+\[(?!{of_this_host}\]).*", done.err, re.MULTILINE) == []
    assert "Nothing started." in done.out


def copy(project: Project, name: str) -> None:
    """Make the project of an example a repository of its own."""
    shutil.copytree(EXAMPLES / name, project.folder, dirs_exist_ok=True)
    git(project.folder, "init", "-q", "-b", "main")


def judge(project: Project) -> list[str]:
    """Commit and apply the project: what verify found."""
    git(project.folder, "add", "-A")
    git(project.folder, "commit", "-qm", "work")
    record = project.apply()[1]
    found: list[str] = step(record, "verify")["outcome"]["details"]
    return found


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("python", "cart.py"),
        pytest.param("node", "cart.js", marks=[program("node").mark, pytest.mark.nightly]),
        pytest.param("go", "cart.go", marks=[GO.mark, pytest.mark.nightly]),
    ],
)
def test_the_agent_of_an_example_mends_its_project(project: Project, name: str, code: str) -> None:
    copy(project, name)

    (mended,) = judge(project)
    (project.folder / ".runner/agent.sh").write_text(f"echo >>{code}")
    (failed,) = judge(project)

    assert mended.endswith(" exited 0")
    assert failed.endswith(" exited 1")


@dockerd.DOCKER.mark
def test_the_example_for_docker_runs_in_the_image_of_that_name(project: Project) -> None:
    """The daemon's image stands in for Debian's: the example asks for a shell and awk."""
    project.env["DOCKER_HOST"] = dockerd.host()
    copy(project, "docker")
    with dockerd.session().client() as client:
        client.tag(dockerd.IMAGE, "debian", "bookworm-slim")

    assert judge(project) == ["`sh test.sh` exited 0"]
