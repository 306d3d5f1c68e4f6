"""What a run publishes can be worked on by the next: names are judged before, and alike, wherever a tree goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.situations import REPO, Project, commit, step

COLLIDING = {
    "case of what was there": ("echo 2 > readme", ["readme"], "readme: name-collision (README)"),
    "composition": (
        "printf x > $(printf 'caf\\303\\251'); printf x > $(printf 'cafe\\314\\201')",
        ["cafe\u0301", "caf\u00e9"],
        "cafe\u0301: name-collision (caf\u00e9)",
    ),
    "a short name": ("echo > git~1", ["git~1"], "git~1: nested-git"),
    "submodules that git refuses": (
        "printf '[submodule \"s\"]\\npath = s\\nurl = -x\\n' > .gitmodules",
        [".gitmodules"],
        ".gitmodules: git-refuses (gitmodulesUrl: disallowed submodule url: -x)",
    ),
}


BY_DAY = ("case of what was there", "a short name")


@pytest.mark.parametrize(
    ("script", "left_out", "said"),
    [pytest.param(*each, id=id, marks=() if id in BY_DAY else pytest.mark.nightly) for id, each in COLLIDING.items()],
)
def test_work_that_no_next_run_could_start_from_is_withheld(
    project: Project, repository: Path, script: str, left_out: list[str], said: str
) -> None:
    project.script(f"echo good > good; {script}", workspace=REPO, run="snapshot: {branch: work}")

    done, record = project.apply()

    assert done.code == 3, done.out + done.err
    assert record["snapshot"] is None
    assert record["saved_work"]["left_out"] == left_out
    assert said in (done.out + done.err).replace("\n", " "), done.out
    withheld = (project.directory(record) / record["saved_work"]["patch"]).read_text()
    assert "+++ b/good" in withheld
    assert withheld.count("diff --git") == 1


def test_a_file_that_changes_its_case_is_published_and_worked_on(project: Project, repository: Path) -> None:
    """And names that are odd, but nobody mistakes: no text, controls, what Windows reserves."""
    odd = "printf x > $(printf 'a\\377'); printf x > \"$(printf 'b\\tc')\"; printf x > aux.c; printf x > 'trailing '"
    project.script(f"mv README readme; {odd}", workspace=REPO, run="snapshot: {branch: work}")
    assert project.apply()[0].code == 0
    assert project.runner("runs", "branch", "last", "--unverified").code == 0
    onto = f"{REPO[:-1]}, branch: work}}"

    project.script("ls -b", workspace=onto, run="snapshot: {allow_empty: true}")
    project.succeed()

    assert set(project.logs("agent").splitlines()) == {r"a\377", "aux.c", r"b\tc", "readme", "src", r"trailing\ "}


@pytest.mark.nightly
def test_work_of_odd_names_is_resumed(project: Project, repository: Path) -> None:
    odd = "printf x > $(printf 'a\\377'); printf x > 'b\n'; printf x > aux.c; mkdir -p deep/er; echo > deep/er/CON"
    verify = "verify: {commands: [{run: [test, -e, ok]}]}"
    project.script(f"{odd}; echo > ok", workspace=REPO, run=f"snapshot: {{}}\n{verify.replace('ok', 'nowhere')}")
    assert project.apply()[0].code == 1
    project.script(f"{odd}; echo > ok", workspace=REPO, run=f"snapshot: {{}}\n{verify}")

    done = project.runner("resume", "last")

    record = project.record()
    assert done.code == 0, done.out + done.err
    assert step(record, "agent")["reused"] is not None


UNCOMMITTED = {
    "a collision": ("readme", "mine\n", "readme: name-collision (README)"),
    "submodules": (".gitmodules", '[submodule "s"]\npath = s\nurl = -x\n', ".gitmodules: git-refuses (gitmodulesUrl"),
}


@pytest.mark.parametrize(("name", "content", "said"), UNCOMMITTED.values(), ids=UNCOMMITTED)
def test_uncommitted_files_that_no_run_could_start_from_end_it_before_anything_ran(
    project: Project, repository: Path, name: str, content: str, said: str
) -> None:
    (repository / name).write_text(content)
    project.script("echo ran", workspace=f"{REPO[:-1]}, include_dirty: true}}", run="snapshot: {}")

    done, record = project.apply()

    assert done.code == 3, done.out + done.err
    assert step(record, "clone")["outcome"]["message"].startswith(f"1 violation before anything ran: {said}")
    assert step(record, "agent")["status"] == "skipped"


def test_names_that_collide_and_are_not_published_are_nobodys_concern(project: Project, repository: Path) -> None:
    """As in the dependencies of many a project."""
    (repository / ".gitignore").write_text("node_modules/\n")
    commit(repository, "ignore")
    script = "mkdir node_modules; echo > node_modules/a; echo > node_modules/A; echo > made"
    project.script(script, workspace=REPO, run="snapshot: {}")

    done, record = project.apply()

    assert (done.code, record["snapshot"]["changed"]) == (0, 1), done.out + done.err
