"""``runner gc``: what is older than the retention goes, and nothing that is in use or has an impossible age."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import trio

from runner.artifacts.run_lock import create_locked
from runner.git.mirror import try_lock
from runner.ops.runs.gc import GcVerdict, judge
from runner.ports.provider import WorkspaceRequest
from runner.providers.process import ProcessProvider
from tests.support.folder_contents import folder
from tests.support.situations import Project, leftovers

DAY = 86_400


@pytest.mark.parametrize(
    ("age", "verdict"),
    [
        pytest.param(0, GcVerdict.YOUNG, id="new"),
        pytest.param(30 * DAY, GcVerdict.YOUNG, id="just within"),
        pytest.param(30 * DAY + 1, GcVerdict.STALE, id="just over"),
        pytest.param(-1, GcVerdict.CLOCK, id="of the future"),
        pytest.param(3_651 * DAY, GcVerdict.CLOCK, id="over ten years"),
    ],
)
def test_an_age_is_judged_against_the_retention(age: float, verdict: GcVerdict) -> None:
    assert judge(age, 30 * DAY) is verdict


def age(project: Project, days: float) -> None:
    """Let everything that ended have ended earlier, and every file be older."""
    with closing(sqlite3.connect(project.home / "state" / "state.db")) as store, store:
        store.execute("UPDATE runs SET ended = ended - ?", (days * DAY * 1e6 // 1,))


def set_age(path: Path, days: float) -> None:
    then = path.stat().st_mtime - days * DAY
    os.utime(path, (then, then))


def found(project: Project, *arguments: str) -> dict[str, str]:
    """What gc speaks of: the last part of its path, and the verdict."""
    done = project.runner("gc", "--output", "json", *arguments)
    assert done.code == 0, done.err
    return {Path(kept["path"]).name: kept["verdict"] for kept in json.loads(done.out)["found"]}


def test_what_a_server_was_sent_goes_when_nothing_has_used_it_for_long(project: Project) -> None:
    project.script("true")
    project.apply()
    sent = [project.home / "state" / place for place in ("uploads/a/.runner", "plans/b.json", "incidents/c/output")]
    for path in sent:
        path.mkdir(parents=True)
    kept = [path.parent if path.name != "b.json" else path for path in sent]
    assert found(project) == {}
    for path in kept:
        set_age(path, 31)

    assert found(project) == dict.fromkeys(("a", "b.json", "c"), "stale")
    assert not any(path.exists() for path in kept)


def test_what_ended_runs_keep_goes_after_the_retention_and_the_journal_stays(
    project: Project, repository: Path
) -> None:
    project.script("echo work > made", workspace="repo_source: {type: local, path: repo}")
    _, record = project.apply()
    run = record["id"]
    assert found(project) == {}
    age(project, 31)

    foreseen, there = found(project, "--dry-run"), project.directory(record).exists()
    done = project.runner("gc")

    assert foreseen == {run: "stale", f"{run}.git": "stale"}
    assert there
    assert done.code == 0
    assert f"removed  run {project.directory(record)}  31.0d old, " in done.out
    assert "\n2 removed, " in done.out
    assert [list((project.home / "state" / name).iterdir()) for name in ("runs", "snapshots")] == [[], []]
    assert json.loads(project.runner("runs", "show", run, "--output", "json").out)["status"] == "succeeded"
    assert project.runner("runs", "patch", run).code == 6
    assert project.runner("recover").out == "nothing to recover\n"


def test_the_retention_is_a_setting(project: Project) -> None:
    project.script("true")
    _, record = project.apply()
    age(project, 2)
    assert found(project) == {}

    project.env["RUN_RETENTION"] = "1d"

    assert found(project, "--dry-run")[record["id"]] == "stale"
    assert re.search(r"^RUN_RETENTION +1d +\(environment\)$", project.runner("doctor", "--settings").out, re.MULTILINE)


@pytest.mark.scenario("WSM-25")
def test_temporary_directories_are_listed_and_stale_ones_removed_by_age(project: Project) -> None:
    project.script("true")
    project.apply()
    temporary = project.home / "state" / "tmp"
    for name, days in (("old-verify", 31), ("new-verify", 1), ("future-verify", -1), ("ancient-verify", 4_000)):
        (temporary / name / "deep").mkdir(parents=True)
        set_age(temporary / name, days)

    listed, done = found(project, "--dry-run"), project.runner("gc")

    assert listed == {
        "old-verify": "stale",
        "new-verify": "young",
        "future-verify": "the clock has jumped",
        "ancient-verify": "the clock has jumped",
    }
    assert done.code == 0
    assert sorted(path.name for path in temporary.iterdir()) == ["ancient-verify", "future-verify", "new-verify"]
    shutil.rmtree(temporary)


def test_manifests_that_were_generated_go_when_they_were_long_unused(project: Project) -> None:
    project.script("true")
    project.apply()
    generated = folder(project.home / "state" / "triage")
    for name, days in (("old", 31), ("new", 1)):
        (generated / f"{name}.runner.yaml").write_text("x: y\n")
        set_age(generated / f"{name}.runner.yaml", days)

    done = project.runner("gc")

    assert done.code == 0
    assert [path.name for path in generated.iterdir()] == ["new.runner.yaml"]


def test_nothing_of_a_run_that_has_not_ended_is_removed_whether_it_lives_or_is_lost(project: Project) -> None:
    project.script("true")
    _, record = project.apply()
    age(project, 31)
    with closing(sqlite3.connect(project.home / "state" / "state.db")) as store, store:
        store.execute("UPDATE runs SET ended = NULL")
    temporary = folder(project.home / "state" / "tmp" / f"{record['id']}-verify")
    set_age(temporary, 31)
    living = project.home / "state" / "runs" / "beginning"
    held = create_locked(living)
    set_age(living, 31)

    assert found(project) == {temporary.name: "in use"}

    os.close(held)
    assert project.directory(record).exists()
    assert found(project) == {temporary.name: "in use", "beginning": "stale"}
    temporary.rmdir()


def test_a_workspace_that_was_kept_goes_with_its_record(project: Project) -> None:
    project.script("echo work > made", provider="process")
    _, record = project.apply()
    age(project, 31)
    provider = ProcessProvider(project.home / "state")
    with closing(sqlite3.connect(project.home / "state" / "state.db")) as store:
        (nonce,) = store.execute("SELECT nonce FROM meta").fetchone()
    handle = trio.run(provider.create, WorkspaceRequest(id=f"{record['id']}-1", run=record["id"], nonce=nonce))
    (handle.tree / "made").write_text("work\n")

    assert found(project)[handle.id] == "stale"

    assert leftovers(project.home) == []
    events = project.runner("runs", "show", record["id"], "--output", "json")
    assert json.loads(events.out)["left_behind"] == []


def test_a_mirror_goes_when_it_was_long_unused_and_nobody_holds_it(project: Project) -> None:
    project.script("true")
    project.apply()
    mirrors = project.home / "state" / "mirrors"
    for name, days in (("old", 31), ("used", 1)):
        (mirrors / name / "ready" / "commit").mkdir(parents=True)
        set_age(mirrors / name, 31)
        set_age(mirrors / name / "ready" / "commit", days)

    assert found(project) == {"old": "stale"}

    assert [path.name for path in mirrors.iterdir() if path.is_dir()] == ["used"]


def test_the_longest_unused_mirrors_go_when_all_are_over_their_limit(project: Project) -> None:
    project.script("true")
    project.apply()
    mirrors = project.home / "state" / "mirrors"
    for name, days in (("a", 3), ("b", 2), ("held", 4), ("c", 1)):
        (mirrors / name / "ready" / "commit").mkdir(parents=True)
        (mirrors / name / "repository").write_bytes(os.urandom(1 << 20))
        os.link(mirrors / name / "repository", mirrors / name / "ready" / "commit" / "pack")
        set_age(mirrors / name / "ready" / "commit", days)
        set_age(mirrors / name, days)
    project.env["RUNNER_MIRROR_LIMIT"] = "2600K"
    lock = try_lock(mirrors / "held")

    foreseen = found(project, "--dry-run")
    done = project.runner("gc")
    os.close(lock)

    assert foreseen == {"a": "over the limit", "held": "over the limit"}
    removed = next(
        line for line in done.out.splitlines() if line.startswith(f"removed  mirror {mirrors / 'a'}  3.0d old")
    )
    assert removed.endswith("M, over RUNNER_MIRROR_LIMIT")
    assert f"left alone  mirror {mirrors / 'held'}  4.0d old, in use" in done.out
    assert sorted(path.name for path in mirrors.iterdir() if path.is_dir()) == ["b", "c", "held"]
    assert re.search(r"^RUNNER_MIRROR_LIMIT +2600K ", project.runner("doctor", "--settings").out, re.MULTILINE)


def test_unused_dependencies_go_after_the_retention_and_over_their_limit_but_never_those_in_use(
    project: Project,
) -> None:
    project.script("true")
    project.apply()
    layers = project.home / "state" / "dependencies"
    for name, days in (("stale", 31), ("held", 32), ("large", 2), ("young", 1)):
        (layers / name).mkdir(parents=True)
        (layers / name / "data").write_bytes(os.urandom(1 << 20))
        set_age(layers / name, days)
    project.env["RUNNER_DEPENDENCIES_LIMIT"] = "1100K"
    with (layers / "held.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # as a run has it
        done = project.runner("gc")

    assert f"removed  dependencies {layers / 'stale'}  31.0d old" in done.out
    assert "M, over RUNNER_DEPENDENCIES_LIMIT" in done.out
    assert f"left alone  dependencies {layers / 'held'}  32.0d old, in use" in done.out
    assert sorted(path.name for path in layers.iterdir() if path.is_dir()) == ["held", "young"]
