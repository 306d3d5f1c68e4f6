"""Submodules and files of LFS in whole runs: what the agent and the checks see, and what is delivered."""

from __future__ import annotations

import subprocess
from hashlib import sha256
from pathlib import Path

import pytest

from tests.support.git_servers import lfs_pointer
from tests.support.needs import GIT
from tests.support.situations import Project, commit, git, step

BIG = b"big\n" * 1000
READ = "cat lib/code && test $(wc -c < big.bin) = 4000"
WITH = "repo_source: {type: local, path: repo, submodules: true, lfs: true}"

pytestmark = GIT.mark


@pytest.fixture
def repo(project: Project, repository: Path) -> Path:
    """A repository with a submodule that its user has cloned, and a file of LFS whose content is here."""
    library = project.folder.parent / "library"
    library.mkdir()
    (library / "code").write_text("code\n")
    git(library, "init", "-q", "-b", "main")
    commit(library)
    add = ("-c", "protocol.file.allow=always", "submodule", "add", "-q", "--name", "lib", str(library), "lib")
    subprocess.run(["git", "-C", str(repository), *add], check=True)
    text = (repository / ".gitmodules").read_text().replace(str(library), "https://library.invalid/lib")
    (repository / ".gitmodules").write_text(text)
    (repository / ".gitattributes").write_text("*.bin filter=lfs diff=lfs merge=lfs -text\n")
    (repository / "big.bin").write_bytes(lfs_pointer(BIG))
    git(repository, "-c", "filter.lfs.clean=", "-c", "filter.lfs.required=false", "add", "--all")
    git(repository, "commit", "-qm", "parts")
    digest = sha256(BIG).hexdigest()
    content = repository / ".git/lfs/objects" / digest[:2] / digest[2:4] / digest
    content.parent.mkdir(parents=True)
    content.write_bytes(BIG)
    return repository


def manifest(project: Project, script: str, source: str = WITH, check: str = READ) -> None:
    project.script(script, workspace=source, run=f"verify: {{commands: [{{run: '{check}'}}]}}")


def test_agent_and_checks_see_submodules_and_files_of_lfs(project: Project, repo: Path) -> None:
    """They come from the user's own clones here. The work has neither, and git inside sees no change but the work's."""
    manifest(project, f"{READ} && touch lib/new && echo more >> notes && git status --porcelain")

    planned = " ".join(project.runner("plan", ".").out.split())
    record = project.succeed()

    assert "private clone, with submodules lib, with files of" in planned
    assert project.logs("agent") == "code\n?? notes\n"
    assert project.logs("verify") == "code\n"
    assert step(record, "scan")["outcome"]["warnings"] == ["1 new path in submodules: no part of the work"]
    assert project.runner("runs", "patch", "last").out.count("diff --git") == 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("script", "path", "rule"),
    [
        ("echo more >> lib/code", "lib/code", "submodule-changed"),
        ("rm -r lib", "lib", "submodule-changed"),
        ("rm -r lib && ln -s /etc lib", "lib", "link-outside"),
        ("echo more >> big.bin", "big.bin", "lfs-changed"),
        ("rm big.bin && ln -s notes big.bin", "big.bin", "lfs-changed"),
    ],
)
def test_work_that_cannot_be_delivered_is_a_violation(
    project: Project, repo: Path, script: str, path: str, rule: str
) -> None:
    """Nothing of it is delivered in the place of a link or a pointer, also not as withheld work."""
    manifest(project, f"echo mine > notes; {script}")

    done, record = project.apply()

    assert done.code == 3
    assert (path, rule) in [(found["path"], found["rule"]) for found in record["violations"]]
    patch = next((project.home / "state/runs" / record["id"]).glob("withheld.patch")).read_text()
    assert patch.count("diff --git") == 1
    assert "+mine" in patch


@pytest.mark.nightly
def test_what_is_not_asked_for_stays_as_the_commit_has_it_and_the_plan_says_so(project: Project, repo: Path) -> None:
    seen = "ls -A lib; cat big.bin"
    manifest(project, seen, "repo_source: {type: local, path: repo}", 'test -z "$(ls -A lib)"'.replace("'", ""))

    planned = " ".join(project.runner("plan", ".").out.split())
    project.succeed()

    assert "submodules left empty: lib" in planned
    assert project.logs("agent").encode() == lfs_pointer(BIG)


@pytest.mark.nightly
def test_a_resumed_run_and_one_that_was_killed_keep_links_and_pointers(project: Project, repo: Path) -> None:
    manifest(project, f"{READ} && echo mine > notes", check="false")
    assert project.apply()[0].code == 1
    project.edit("run: 'false'", f"run: '{READ}'")

    assert project.runner("resume", "last").code == 0
    again = project.record()

    assert step(again, "agent")["reused"]
    assert project.runner("runs", "patch", "last").out.count("diff --git") == 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"https://library.invalid/lib": "../lib"}, "is relative, and a repository by path has no URL"),
        ({"https://library.invalid/lib": "file:///etc"}, "`file:///etc` is not a URL that can be cloned"),
        ({"path = lib": "path = other"}, "submodule `lib` is not in `.gitmodules`"),
    ],
)
def test_a_submodule_that_cannot_be_had_fails_the_clone(
    project: Project, repo: Path, changes: dict[str, str], words: str
) -> None:
    text = (repo / ".gitmodules").read_text()
    for old, new in changes.items():
        text = text.replace(old, new)
    (repo / ".gitmodules").write_text(text)
    git(repo, "-c", "filter.lfs.clean=", "-c", "filter.lfs.required=false", "commit", "-qam", "other")
    (repo / ".git/modules/lib").rename(project.folder.parent / "elsewhere")
    manifest(project, "true")

    done, record = project.apply()

    assert done.code != 0
    assert words in step(record, "clone")["outcome"]["message"]


@pytest.mark.parametrize(
    "source",
    [
        "repo_source: {type: none, submodules: true}",
        "repo_source: {type: local, path: repo, include_dirty: true, lfs: true}",
    ],
)
def test_parts_that_nothing_has_are_refused_at_their_line(project: Project, repository: Path, source: str) -> None:
    manifest(project, "true", source)

    refused = project.runner("plan", ".")

    assert refused.code == 2
    assert "all.runner.yaml:" in refused.err
