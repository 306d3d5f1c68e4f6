"""``--untrusted`` with a pull request whose files pretend to be a repository: its author sees nothing of this host."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.folder_contents import everything
from tests.support.situations import REPO, Project, commit, git

NIGHTLY = pytest.mark.nightly
SECRET = "the secret of another project"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A repository of the user that the author of the pull request cannot read."""
    path = tmp_path / "victim"
    path.mkdir()
    (path / "secret").write_text(SECRET)
    commit(path, SECRET)
    return path


def _bare_of_links(top: Path, victim: Path) -> str:
    """As git itself commits and checks it out."""
    docs = top / "docs"
    docs.mkdir()
    (docs / "HEAD").write_text("ref: refs/heads/main\n")
    for name in ("objects", "refs"):
        (docs / name).symlink_to(victim / ".git" / name)
    commit(top, "docs")
    return "docs"


def _git_file(top: Path, victim: Path) -> str:
    (top / ".git").write_text(f"gitdir: {victim}/.git\n")
    return "."


def _nothing(top: Path, victim: Path) -> str:
    """A dangling link, so that whoever looks further up finds the repository of somebody else."""
    shutil.copytree(victim / ".git", top.parent / ".git")
    (top / ".git").symlink_to("nowhere")
    return "."


PRETENDED = {
    "a bare repository of links": _bare_of_links,
    "a .git file": _git_file,
    "a .git link to nothing": _nothing,
}


BY_DAY = ("a bare repository of links", "a .git file")


@pytest.mark.parametrize(
    "make", [pytest.param(make, id=id, marks=() if id in BY_DAY else NIGHTLY) for id, make in PRETENDED.items()]
)
@pytest.mark.parametrize("dirty", [False, pytest.param(True, marks=NIGHTLY)], ids=["HEAD", "dirty"])
def test_an_untrusted_manifest_reads_no_other_repository(
    project: Project, victim: Path, make: Callable[[Path, Path], str], dirty: bool
) -> None:
    more = ", include_dirty: true" if dirty else ""
    path = make(project.folder, victim)
    project.script("cat secret; git log", workspace=f"repo_source: {{type: local, path: {path}{more}}}")
    before = everything(victim)

    planned = project.runner("plan", ".", "--untrusted", "--output", "json")
    done = project.runner("apply", ".", "--untrusted")

    for said in (planned, done):
        assert (said.code, "error[policy.untrusted]" in said.err, SECRET in said.out + said.err) == (3, True, False)
        assert "repo_source" in said.err  # the line that asks for it
    assert not (project.home / "state" / "snapshots").exists()
    assert everything(victim) == before


def test_an_untrusted_manifest_has_its_own_repository(project: Project, repository: Path) -> None:
    """Its configuration, which a pull request's files may hold when they come as an archive, has no say."""
    git(project.folder, "init", "-q")
    with (repository / ".git" / "config").open("a") as config:
        config.write(f"[include]\n\tpath = {project.folder}/never\n[core]\n\tworktree = /etc\n")
    (project.folder / "never").write_text("[core\n")
    project.script("cat README", workspace=REPO)

    project.succeed("--untrusted")

    assert project.logs("agent") == "hello\n"


def test_the_work_of_an_untrusted_run_does_not_go_where_its_source_leads_by_now(
    project: Project, repository: Path, victim: Path
) -> None:
    git(project.folder, "init", "-q")
    project.script("echo better > README", workspace=REPO, run="snapshot: {branch: taken}")
    project.succeed("--untrusted")
    shutil.rmtree(repository / ".git")
    (repository / ".git").symlink_to(victim / ".git")
    before = everything(victim)

    for words in (("branch",), ("apply",), ("push", "--to", "origin")):
        said = project.runner("runs", words[0], "last", *words[1:], "--unverified")
        assert (said.code, "error[policy.untrusted]" in said.err) == (3, True), said.err

    assert everything(victim) == before
