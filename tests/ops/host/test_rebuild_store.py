"""A store that is lost, damaged or an older copy costs no evidence: nothing goes because it is unknown, and all that
the directories of runs and workspaces have of their events is read anew.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest

from runner.events.events import Event
from tests.ops.runs.test_recover import kill, run_in_agent
from tests.support.needs import ROOT
from tests.support.situations import Project, leftovers

LIMITED = "resource_limits: {disk: 64M}"


def state(project: Project) -> Path:
    return project.home / "state"


def files_of(project: Project) -> dict[str, str]:
    """All that runs and workspaces have left, by content."""
    found = {}
    for top in ("runs", "snapshots", "workspaces", "projects", "saved"):
        for path in sorted((state(project) / top).rglob("*")):
            if path.is_file() and not path.is_symlink():
                found[str(path)] = sha256(path.read_bytes()).hexdigest()
    return found


def fold_log(project: Project) -> None:
    """Bring what is in the log of the store into the store."""
    with closing(sqlite3.connect(state(project) / "state.db")) as store:
        store.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def overwrite(content: bytes) -> Callable[[Project], None]:
    def lose(project: Project) -> None:
        remove(project)
        (state(project) / "state.db").write_bytes(content)

    return lose


def remove(project: Project) -> None:
    for file in state(project).glob("state.db*"):
        file.unlink()


def put_back(project: Project) -> None:
    remove(project)
    shutil.copy(project.home / "older.db", state(project) / "state.db")


def flip(project: Project) -> None:
    """One bit in the table of events."""
    fold_log(project)
    path = state(project) / "state.db"
    content = bytearray(path.read_bytes())
    at = content.rindex(b'{"type":')
    content[at] ^= 0x08
    path.write_bytes(content)


def break_page(project: Project) -> None:
    fold_log(project)
    path = state(project) / "state.db"
    content = bytearray(path.read_bytes())
    for page in range(4096, len(content), 4096):
        content[page : page + 8] = b"\xff" * 8
    path.write_bytes(content)


LOSSES = {
    "empty": overwrite(b""),
    "one byte": overwrite(b"\n"),
    "missing": remove,
    "another file": overwrite(b"this is text" * 1000),
    "an older copy": put_back,
    "a flipped bit": flip,
    "a broken page": break_page,
}
BY_DAY = ("an older copy",)


@pytest.fixture
def ran(project: Project) -> Project:
    """Two runs that succeeded, and a copy of the store from between them."""
    project.script("echo work > made")
    project.apply()
    fold_log(project)
    shutil.copy(state(project) / "state.db", project.home / "older.db")
    project.apply()
    return project


@pytest.mark.parametrize(
    "lose",
    [pytest.param(lose, id=id, marks=() if id in BY_DAY else pytest.mark.nightly) for id, lose in LOSSES.items()],
)
def test_no_evidence_goes_with_the_store_and_a_rebuilt_one_knows_all(
    ran: Project, lose: Callable[[Project], None]
) -> None:
    listed, evidence = ran.runner("runs", "list", "--output", "json").out, files_of(ran)
    lose(ran)

    recovered, collected = ran.runner("recover"), ran.runner("gc")

    if lose is not flip:  # which nobody notices who does not read that event
        assert (recovered.code, collected.code) == (7, 7), recovered.out + collected.out
        assert "runner store rebuild" in recovered.err
        assert "runner store rebuild" in collected.err
    assert "removed  " not in recovered.out + collected.out
    assert files_of(ran) == evidence

    rebuilt = ran.runner("store", "rebuild")

    assert rebuilt.code == 0, rebuilt.out + rebuilt.err
    assert ran.runner("runs", "list", "--output", "json").out == listed
    assert "+work" in ran.runner("runs", "patch", "last").out
    assert (ran.runner("recover").code, ran.runner("recover").out) == (0, "nothing to recover\n")
    assert ran.runner("store", "rebuild").out == "nothing is missing\n"
    assert files_of(ran) == evidence
    kept = list(state(ran).glob("state.db.damaged-*"))
    assert bool(kept) is (lose not in (remove, put_back))


def test_no_verb_makes_a_new_store_in_the_place_of_a_lost_one(ran: Project) -> None:
    remove(ran)

    for verb in ("apply .", "runs list", "workspace list", "recover last"):
        done = ran.runner(*verb.split())

        assert done.code == 7, verb
        assert "error[store.damaged]" in done.err
        assert "runner store rebuild" in done.err
        assert not (state(ran) / "state.db").exists()


@ROOT.mark
@pytest.mark.parametrize(
    "lose",
    [pytest.param(remove, id="missing"), pytest.param(overwrite(b""), id="empty", marks=pytest.mark.nightly)],
)
def test_what_a_killed_run_has_on_the_host_is_listed_and_recovered_once_the_store_is_there_again(
    project: Project, lose: Callable[[Project], None]
) -> None:
    project.script("echo work > made\nsleep 300\n", workspace=LIMITED)
    process = project.start("apply", str(project.folder))
    while not (found := list(state(project).glob("projects/default/workspaces/*/made"))):
        assert process.poll() is None, process.communicate()
    run = found[0].parent.name.rpartition("-")[0]
    kill(process)
    lose(project)

    done = project.runner("recover")

    assert done.code == 7
    assert f"LEFT ALONE  run {run}: " in done.out
    for place in ("state/volumes/", "loop device /dev/loop", "mount /run/runner-volumes/"):
        assert place in done.out
    assert leftovers(project.home) != []

    assert project.runner("store", "rebuild").code == 0
    again = project.runner("recover")

    assert again.code == 0, again.out + again.err
    assert "saved    work.patch" in again.out
    assert leftovers(project.home) == []


@pytest.mark.slow
def test_a_run_that_lives_is_not_rebuilt_under(project: Project) -> None:
    project.script("echo work > made\nsleep 300\n")
    with run_in_agent(project) as (process, _):
        known = project.runner("store", "rebuild")
        (state(project) / "state.db").rename(project.home / "aside")

        done = project.runner("store", "rebuild")

        (project.home / "aside").rename(state(project) / "state.db")
        assert (known.code, known.out) == (0, "nothing is missing\n")
        assert done.code == 5
        assert process.poll() is None


def made(project: Project) -> str:
    done = project.runner("workspace", "create", "--output", "json")
    assert done.code == 0, done.err
    id: str = json.loads(done.out)["id"]
    return id


def test_a_workspace_of_no_run_is_known_again_with_its_work(project: Project) -> None:
    id = made(project)
    assert project.runner("workspace", "exec", id, "--", "sh", "-c", "echo work > made").code == 0
    listed = project.runner("workspace", "list").out
    remove(project)

    done = project.runner("recover")

    assert done.code == 7
    assert "LEFT ALONE  workspace " in done.out

    assert project.runner("store", "rebuild").code == 0
    assert project.runner("workspace", "list").out == listed
    assert project.runner("recover").out == "nothing to recover\n"
    assert project.runner("workspace", "destroy", id).code == 0
    (patch,) = state(project).glob("saved/*/work.patch")
    assert "+work" in patch.read_text()


def test_an_older_store_removes_no_workspace_that_was_finished_since(project: Project) -> None:
    """In the copy it is half made, which recovering would undo."""
    id = made(project)
    with closing(sqlite3.connect(state(project) / "state.db")) as store, store:
        store.execute("DELETE FROM workspace_events WHERE seq > 2")
        store.execute("UPDATE agent_workspaces SET status = 'creating'")

    done = project.runner("recover")

    assert done.code == 7
    assert "LEFT ALONE  workspace " in done.out
    assert list(state(project).glob("projects/default/workspaces/*/.git"))
    assert project.runner("store", "rebuild").code == 0
    assert " ready " in project.runner("workspace", "list").out
    assert project.runner("workspace", "destroy", "--discard", id).code == 0


@pytest.mark.parametrize(
    "left",
    ["work.patch", *(pytest.param(left, marks=pytest.mark.nightly) for left in ("run.json", "output", "logs/x"))],
)
def test_a_directory_with_evidence_and_no_events_is_left_alone(ran: Project, left: str) -> None:
    stray = state(ran) / "runs" / "abc"
    (stray / "logs").mkdir(parents=True)
    (stray / left).touch()

    recovered, rebuilt = ran.runner("recover"), ran.runner("store", "rebuild")

    assert (recovered.code, rebuilt.code) == (7, 7)
    assert f"there    {stray}" in recovered.out
    assert f"NOT READ {stray}: " in rebuilt.out
    assert (stray / left).exists()


def test_events_that_were_cut_off_or_spoilt_are_said(ran: Project) -> None:
    remove(ran)
    whole, cut = sorted((state(ran) / "runs").iterdir())
    with (cut / "events.jsonl").open("a") as file:
        file.write('{"run": "half')
    lines = (whole / "events.jsonl").read_text().splitlines(keepends=True)
    lines[2] = "{}\n"
    (whole / "events.jsonl").write_text("".join(lines))

    done = ran.runner("store", "rebuild")

    assert done.code == 7
    assert f"NOT READ {whole / 'events.jsonl'}: line 3 is not an event" in done.out
    assert f"read     run {cut.name}" in done.out
    assert ran.runner("runs", "show", cut.name).code == 0
    assert ran.runner("recover").code == 7
    assert whole.exists()


def test_no_event_has_a_field_that_its_line_has_for_itself() -> None:
    for kind in Event.__subclasses__():
        assert not {"run", "seq", "at", "type"} & set(kind.__struct_fields__)


@pytest.mark.nightly
@ROOT.mark
@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
def test_reading_verbs_work_on_a_medium_that_takes_no_writes(ran: Project, killed: bool) -> None:
    """With a log beside the store, as a killed runner leaves it, what is in that log counts."""
    made(ran)
    shown = ran.runner("runs", "list", "--output", "json").out
    if killed:
        add = "import sqlite3, os; c = sqlite3.connect('state.db'); c.execute('BEGIN IMMEDIATE');"
        add += " c.execute(\"UPDATE runs SET name = 'renamed'\"); c.execute('COMMIT'); os._exit(0)"
        assert os.spawnlp(os.P_WAIT, "sh", "sh", "-c", f'cd {state(ran)} && exec python3 -c "$0"', add) == 0
        assert (state(ran) / "state.db-wal").stat().st_size
        shown = shown.replace('"name": "work"', '"name": "renamed"')
    mount = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    ran.within = ("unshare", "--mount", "sh", "-c", mount, str(state(ran)))

    id = json.loads(ran.runner("workspace", "list", "--output", "json").out)[0]["id"]
    reading = ["runs show last", "runs logs last", "runs patch last", "workspace list", f"workspace show {id}"]
    reading += ["lease list", f"lease show {id}", "pool status", "project list", "recover --dry-run", "gc --dry-run"]
    for verb in (*reading, f"plan {ran.folder}"):
        done = ran.runner(*verb.split())
        assert done.code == 0, (verb, done.err)
    assert ran.runner("runs", "list", "--output", "json").out == shown
    for verb in (f"apply {ran.folder}", f"workspace destroy {id}", "gc", "workspace create"):
        refused = ran.runner(*verb.split())
        assert (refused.code, "Traceback" in refused.err) == (4, False), (verb, refused.out, refused.err)
        assert "ead-only" in refused.err or "readonly" in refused.err, refused.err
    ran.within = ()
    assert ran.runner("workspace", "destroy", id).code == 0


@pytest.mark.nightly
def test_a_log_that_is_spoilt_loses_nothing(ran: Project) -> None:
    """SQLite takes what is behind the damage for never written: the store is then an older one."""
    listed = ran.runner("runs", "list", "--output", "json").out
    program = "import os, sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT * FROM runs').fetchall(); "
    program += "from runner.cli.main import main; from runner.cli.output import standard; "
    program += "main(['apply', sys.argv[2]], standard()); os._exit(0)"
    words = [sys.executable, "-c", program, str(state(ran) / "state.db"), str(ran.folder)]
    subprocess.run(words, env=ran.variables, check=True, capture_output=True)
    log = state(ran) / "state.db-wal"
    whole = ran.runner("runs", "list", "--output", "json").out
    assert len(json.loads(whole)) == 3
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1
    for name in ("state.db", "state.db-shm"):
        (state(ran) / name).touch()
    log.write_bytes(content)
    (state(ran) / "state.db-shm").unlink()
    assert ran.runner("runs", "list", "--output", "json").out != whole

    done = ran.runner("recover")

    assert done.code == 7
    assert ran.runner("store", "rebuild").code == 0
    assert ran.runner("runs", "list", "--output", "json").out == whole
    assert json.loads(whole)[-len(json.loads(listed)) :] == json.loads(listed)
    assert ran.runner("recover").out == "nothing to recover\n"


@pytest.mark.nightly
def test_flipped_bits_are_said_and_never_a_bug(ran: Project) -> None:
    """Whatever can be read goes on; else the store is damaged, and rebuilding it brings all runs back."""
    assert ran.runner("project", "create", "shop", "--root", str(ran.folder)).code == 0
    listed = ran.runner("runs", "list", "--output", "json").out
    fold_log(ran)
    path, seeded = state(ran) / "state.db", random.Random("flipped")
    content = path.read_bytes()
    used = [at for at, byte in enumerate(content) if byte]
    verbs = [
        "runs list",
        "runs show last",
        "workspace list",
        "recover",
        "gc",
        "lease list",
        "project list",
        "pool status",
    ]
    for _ in range(400):
        spoilt = bytearray(content)
        for _ in range(seeded.choice((1, 1, 4))):
            spoilt[seeded.choice(used)] ^= 1 << seeded.randrange(8)
        overwrite(bytes(spoilt))(ran)
        for verb in seeded.sample(verbs, 2):
            done = ran.runner(*verb.split())
            assert (done.code in (0, 6, 7), "Traceback" in done.err) == (True, False), (verb, done.err)

        rebuilt = ran.runner("store", "rebuild")

        assert rebuilt.code == 0, rebuilt.out + rebuilt.err
        found = ran.runner("runs", "list", "--output", "json")
        assert found.code == 0
        assert len(json.loads(found.out)) == len(json.loads(listed))
