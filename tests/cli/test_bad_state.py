"""Saved plans, homes, stores and logs that are not what they should be: a code, and never a traceback or a wait."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.ops.planning.plan_file import content_digest
from tests.support.bad_input import Make, committed, refused, say
from tests.support.situations import REPO, Project
from tests.support.terminal import on_terminal


@pytest.fixture
def plan(project: Project) -> Path:
    """A saved plan of one run with a repository."""
    committed(project)
    project.script("cat README", workspace=REPO)
    file = project.folder / "plan.json"
    said = say(project, "plan", project.folder, "--save", file)
    assert said.code == 0, said.err
    return file


Edit = Callable[[dict[str, Any]], object]

EDITED: dict[str, Edit] = {
    "18 another digest": lambda c: c.update(digest="sha256:0"),
    "another step": lambda c: c["runs"][0]["steps"][3].update(what="make test"),
    "a step less": lambda c: c["runs"][0]["steps"].pop(),
    "another mount": lambda c: c["runs"][0]["steps"][3]["mounts"][0].update(path="/elsewhere"),
    "other limits": lambda c: c["runs"][0]["limits"].update(cpus=1),
    "a number for a digest": lambda c: c.update(digest=5),
    "another commit": lambda c: c["facts"]["work"]["commit"].update(commit="0" * 40),
    "another format": lambda c: c.update(format="runner/plan/v9"),
    "no format": lambda c: c.pop("format"),
    "no content": lambda c: c.pop("content"),
}


def run_of(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["runs"][0]
    return found


def step_of(content: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(step for step in run_of(content)["steps"] if step["kind"] == kind)


def body_of(content: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = step_of(content, kind)["body"]
    return found


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


FORGED: dict[str, tuple[Edit, str]] = {
    "another digest": (lambda c: c.update(digest="sha256:0"), "plan.stale"),
    "manifests elsewhere": (lambda c: c.update(manifests="repo/README"), "manifest.bad-value"),
    "a number for the manifests": (lambda c: c.update(manifests=5), "plan.unreadable"),
    "manifests with a NUL": (lambda c: c.update(manifests="a\0b"), "plan.unreadable"),
    "a number for a commit": (lambda c: c["facts"]["work"]["commit"].update(commit=5), "plan.unreadable"),
    "84 an option for a commit": (lambda c: c["facts"]["work"]["commit"].update(commit="--output=x"), "git.ref"),
    "84 forty zeros": (lambda c: c["facts"]["work"]["commit"].update(commit="0" * 40), "plan.stale"),
    "another commit to clone": (lambda c: body_of(c, "clone").update(commit="0" * 40), "plan.unreadable"),
    "more isolation than there is": (lambda c: c["probes"]["local"].update(isolation="vm"), "plan.stale"),
    "a probe that is none": (lambda c: c.update(probes={"local": 5}), "plan.unreadable"),
    "a provider that is none": (lambda c: run_of(c).update(providers=["../x"]), "plan.unreadable"),
    "no request": (lambda c: c.pop("request"), "plan.unreadable"),
    "a number for a run": (lambda c: c["request"].update(only=5), "plan.unreadable"),
    "a request of another kind": (lambda c: c.update(request=[]), "plan.unreadable"),
    "a step less": (lambda c: run_of(c)["steps"].pop(), "plan.unreadable"),
    "no scan": (lambda c: run_of(c)["steps"].remove(step_of(c, "scan")), "plan.unreadable"),
    "a step twice": (lambda c: run_of(c)["steps"].append(step_of(c, "agent")), "plan.unreadable"),
    "a step of no kind": (lambda c: step_of(c, "agent").update(kind="..", id=".."), "plan.unreadable"),
    "a step that is called otherwise": (lambda c: step_of(c, "agent").update(id="../../agent"), "plan.unreadable"),
    "a step that needs itself": (lambda c: step_of(c, "agent").update(needs=["agent"]), "plan.unreadable"),
    "a run of no name": (lambda c: run_of(c).update(name="../work"), "plan.unreadable"),
    "a run that needs itself": (lambda c: run_of(c).update(needs=["work"]), "plan.unreadable"),
    "a run that needs another": (lambda c: run_of(c).update(needs=["x"]), "plan.unreadable"),
    "time that runs backwards": (lambda c: step_of(c, "agent").update(deadline_seconds=-1), "plan.unreadable"),
    "an endless number": (lambda c: run_of(c).update(deadline_seconds=10**400), "plan.unreadable"),
    "a deep value": (lambda c: run_of(c)["values"].update(task=nested(100_000)), "plan.unreadable"),
    "a body of another step": (lambda c: step_of(c, "agent").update(body=body_of(c, "clone")), "plan.unreadable"),
    "a file of the host": (
        lambda c: body_of(c, "provision")["script"].update(path="/etc/passwd", sha256="0", whole=False),
        "plan.unreadable",
    ),
    "a file beside its place": (
        lambda c: body_of(c, "provision").update(incident=[["../../x", body_of(c, "provision")["script"]]]),
        "plan.unreadable",
    ),
    "a directory of the host": (
        lambda c: body_of(c, "agent")["mount_plan"].update(toolchains=["/root"]),
        "plan.unreadable",
    ),
    "an incident of the host": (lambda c: body_of(c, "save").update(incident="/etc"), "plan.unreadable"),
    "another source": (lambda c: body_of(c, "clone").update(path="/root"), "plan.unreadable"),
    "a protected path outside": (
        lambda c: body_of(c, "agent")["mount_plan"].update(protected=["../x"]),
        "plan.unreadable",
    ),
}  # fmt: skip


def test_a_plan_that_was_edited_is_refused(project: Project, plan: Path) -> None:
    saved, found = plan.read_text(), {}
    for name, edit in EDITED.items():
        content = json.loads(saved)
        edit(content)
        plan.write_text(json.dumps(content))
        said = refused(project, "apply", plan)
        found[name] = (said.code, said.errors)

    assert found == dict.fromkeys(EDITED, (2, ["plan.unreadable"]))


def test_a_plan_with_a_digest_of_its_own_gets_no_more_than_manifests_would(project: Project, plan: Path) -> None:
    """The digest has no key, so whoever edits on purpose writes a new one."""
    saved, found = plan.read_text(), {}
    for name, (edit, _) in FORGED.items():
        content = json.loads(saved)
        edit(content)
        try:
            content["content"] = content_digest(content)
        except RecursionError:  # it is not compared before the file can be read
            plan.write_text(saved.replace('"task": {}', '"task": ' + "[" * 100_000 + "]" * 100_000))
        else:
            plan.write_text(json.dumps(content))
        said = refused(project, "apply", plan)
        found[name] = (said.code, said.errors)

    assert found == {name: (2, [code]) for name, (_, code) in FORGED.items()}
    assert not (project.folder / "x").exists()


def test_a_plan_is_carried_out_where_its_manifests_are_not(project: Project, plan: Path, tmp_path: Path) -> None:
    """Its script comes along; the repository of the host is where it was."""
    elsewhere = tmp_path / "elsewhere.json"
    plan.rename(elsewhere)
    for path in (project.manifest, project.folder / "agent.sh"):
        path.unlink()

    said = say(project, "apply", "--quiet", elsewhere)

    assert said.code == 0, said.err
    assert project.logs("agent") == "hello\n"


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_bytes(path.read_bytes()[:300]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"[" * 200_000),
        lambda path: path.write_bytes(b"\xff\xfe"),
        lambda path: path.write_bytes(b"[]"),
        lambda path: path.unlink(),
        lambda path: (path.unlink(), os.mkfifo(path)),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
        lambda path: (path.unlink(), path.symlink_to(path.name)),
    ],
    ids=["cut", "empty", "deep", "not UTF-8", "list", "missing", "FIFO", "folder", "device", "circle"],
)
def test_a_file_that_is_no_plan_is_refused(project: Project, plan: Path, make: Make) -> None:
    make(plan)  # type: ignore[arg-type]

    for verb in (("apply",), ("plan", ".", "--against")):
        said = refused(project, *verb, plan)

        assert (said.code, said.errors) == (2, ["plan.unreadable"])


@pytest.mark.parametrize("make", [lambda path: os.mkfifo(path), Path.mkdir], ids=["FIFO", "folder"])
def test_a_plan_is_not_saved_over_what_is_no_file(project: Project, make: Make) -> None:
    """As root, renaming a plan over a device would leave the host without it."""
    project.script("")
    target = project.folder / "there.json"
    make(target)  # type: ignore[arg-type]
    before = target.stat()

    said = refused(project, "plan", project.folder, "--save", target)

    assert (said.code, said.errors) == (2, ["plan.unreadable"])
    assert target.stat().st_ino == before.st_ino


@pytest.mark.parametrize("name", [".", "/", "plan.txt", "missing/plan.json"])
def test_a_plan_is_saved_only_where_apply_will_find_it(project: Project, name: str) -> None:
    project.script("")

    said = refused(project, "plan", project.folder, "--save", name)

    assert (said.code, said.errors) == (2, ["plan.unreadable"])


# --- homes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "home",
    ["agent.sh", "agent.sh/below", "a" * 300, "/proc/none"],
    ids=["a file", "below a file", "too long", "proc"],
)
def test_a_home_that_can_not_be_is_said_so(project: Project, home: str) -> None:
    project.script("echo ran")
    project.env["RUNNER_HOME"] = os.path.join(project.folder, home)

    done = project.runner("apply", ".")

    assert done.code == 4
    assert "error[store.failed]" in done.err
    assert "= hint: set RUNNER_HOME" in done.err
    assert project.runner("runs", "list").code == 0
    assert project.runner("runs", "show", "last").code == 6


@pytest.mark.parametrize("home", ["/", "//", "state"], ids=["everything", "everything twice", "relative"])
def test_a_home_that_is_everything_or_another_one_in_each_directory_is_refused(project: Project, home: str) -> None:
    project.env["RUNNER_HOME"] = home

    done = project.runner("runs", "list")

    assert (done.code, done.out) == (2, "")
    assert f"`RUNNER_HOME` is `{home}`" in done.err


@pytest.mark.parametrize("below", ["", "below"], ids=["itself", "on the way"])
@pytest.mark.parametrize(
    "verb", ["apply", "plan", "runs list", "recover", "gc", "doctor", "pool status", "store rebuild"]
)
def test_a_home_whose_links_lead_in_a_circle_is_bad_input(project: Project, verb: str, below: str) -> None:
    project.script("echo ran")
    (project.home / "a").symlink_to("b")
    (project.home / "b").symlink_to("a")
    project.env["RUNNER_HOME"] = os.path.join(project.home, "a", below)

    done = project.runner(*verb.split(), *([str(project.folder)] if verb in ("apply", "plan") else []))

    assert done.code == 2
    assert "`RUNNER_HOME` is `" in done.err
    assert "= hint: write a path whose links" in done.err


# --- stores ----------------------------------------------------------------------------------------


@pytest.fixture
def ran(project: Project) -> Project:
    """A project with one run in its store, whose agent printed what a terminal would obey."""
    project.script(r"printf 'plain \033]52;c;aGk=\007 \302\233 \342\200\256 \377 \000 end\n'")
    done = project.runner("apply", ".")
    assert done.code == 0, done.out + done.err
    return project


def database(project: Project) -> Path:
    return project.home / "state" / "state.db"


def statement(sql: str) -> Make:
    def make(project: Project) -> None:
        with sqlite3.connect(database(project)) as connection:
            connection.execute(sql)
        connection.close()

    return make


def overwritten(content: bytes) -> Make:
    def make(project: Project) -> None:
        for file in database(project).parent.glob("state.db-*"):
            file.unlink()
        database(project).write_bytes(content)

    return make


def replaced(make_other: Callable[[Path], object]) -> Make:
    def make(project: Project) -> None:
        database(project).unlink()
        make_other(database(project))

    return make


DAMAGED = {
    "no database": (overwritten(b"junk" * 999), "store.damaged"),
    "a folder": (replaced(Path.mkdir), "store.damaged"),
    "a FIFO": (replaced(os.mkfifo), "store.damaged"),
    "a newer schema": (statement("UPDATE meta SET schema_version = 99"), "store.too-new"),
    "an older schema": (statement("UPDATE meta SET schema_version = 6"), "store.too-old"),
    "an event that is no JSON": (statement("UPDATE events SET body = '{'"), "store.damaged"),
    "an event of no known type": (
        statement("UPDATE events SET body = replace(body, type, 'X') WHERE seq = 2"),
        "store.damaged",
    ),
    "no first event": (statement("DELETE FROM events WHERE seq = 1"), "store.damaged"),
}


@pytest.mark.parametrize(("damage", "code"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_store_is_said_so_and_left_alone(ran: Project, damage: Make, code: str) -> None:
    """Case 198."""
    damage(ran)

    said = say(ran, "runs", "show", "last")

    assert (said.code, said.errors) == (7, [code])
    assert "= hint:" in said.err
    assert database(ran).exists()


def test_without_a_store_there_are_no_runs_and_none_is_made(project: Project) -> None:
    assert say(project, "runs", "list").code == 0
    for verb in ("show", "logs", "patch"):
        assert refused(project, "runs", verb, "last").code == 6


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        *((("show", "--", run), "") for run in ("nope", "", "-", "../..", "%", "\x1b[31m", "a" * 5_000)),
        (("logs", "last", "agnt"), "did you mean `agent`?"),
    ],
)
def test_a_run_or_a_step_that_is_not_there_is_not_found(ran: Project, words: tuple[str, ...], hint: str) -> None:
    said = say(ran, "runs", *words)

    assert (said.code, said.errors, hint in said.err) == (6, ["store.unknown-run"], True)


def test_a_patch_whose_file_is_gone_is_not_found(project: Project) -> None:
    project.script("echo x > made", run="snapshot: {}")
    (project.directory(project.succeed()) / "work.patch").unlink()

    said = say(project, "runs", "patch", "last")

    assert (said.code, said.errors) == (6, ["store.unknown-run"])


# --- terminals -------------------------------------------------------------------------------------


def test_logs_on_a_terminal_are_escaped_and_raw_in_a_file(ran: Project) -> None:
    """Case 134."""
    with on_terminal(ran, "runs", "logs", "last", "agent") as terminal:
        seen = terminal.rest()

    assert not {*"\x1b\x07\x00\u202e\x9b"} & {*seen}
    assert r"\x1b]52;c;aGk=\x07" in seen
    raw = next((ran.home / "state" / "runs").glob("*/logs/agent.stdout")).read_bytes()
    assert b"\x1b]52;c;aGk=\x07" in raw


def test_json_on_a_terminal_has_no_character_to_obey(project: Project) -> None:
    project.script(r"printf 'x' > $RUNNER_OUTPUT/a; printf 'bad \302\233 31m\n' >&2; exit 1")
    project.runner("apply", ".")

    with on_terminal(project, "runs", "show", "last", "--output", "json") as terminal:
        assert terminal.rest().isascii()


def test_a_full_disk_behind_standard_output_is_an_error_of_the_host(ran: Project) -> None:
    for arguments in (["plan", "."], ["runs", "show", "last", "--output", "json"], ["runs", "logs", "last", "agent"]):
        with open("/dev/full", "wb") as full:
            words = [sys.executable, "-m", "runner", *arguments]
            done = subprocess.run(
                words, cwd=ran.folder, env=ran.variables, stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        told = "error[host.refused]: standard output cannot be written: No space left on device\n"
        assert (done.returncode, done.stderr) == (4, told)
