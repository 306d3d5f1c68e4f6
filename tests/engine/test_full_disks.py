"""A disk that is full from any write of a run on: nothing is lost that was acknowledged, and nothing is left.

One that breaks may lose what was not flushed, such as a repository: then the work is kept, and that is said.

On real file systems of a few megabytes, which the runner fills and the test empties. Mounting takes root.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest

from tests.engine.test_crash_points import Crashing, assert_whole, commits, crashing, quick
from tests.support.crashing import fill
from tests.support.needs import ROOT
from tests.support.situations import Project, step

__all__ = ["crashing", "quick"]

Disk = AbstractContextManager[Callable[[], None]]


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def memory(home: Path) -> Iterator[Callable[[], None]]:
    """A disk in memory at ``home``; calling what is yielded makes room again."""
    run("mount", "-t", "tmpfs", "-o", "size=8m", "none", home)
    try:
        yield (home / "ballast").unlink
    finally:
        run("umount", home)


@contextmanager
def ext4(home: Path) -> Iterator[Callable[[], None]]:
    image = home.with_suffix(".ext4")
    with image.open("wb") as file:
        file.truncate(24 << 20)
    run("mkfs.ext4", "-q", "-m", "0", image)
    run("mount", "-o", "loop", image, home)
    try:
        yield (home / "ballast").unlink
    finally:
        run("umount", home)
        image.unlink()


@contextmanager
def failing(home: Path) -> Iterator[Callable[[], None]]:
    """An ext4 whose device answers writes with EIO once the ballast beside its image has filled what that lies on."""
    under = home.with_suffix(".under")
    under.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=16m", "none", under)
    image = under / "image"
    with image.open("wb") as file:
        file.truncate(24 << 20)
    run("mkfs.ext4", "-q", "-m", "0", image)
    run("mount", "-o", "loop", image, home)

    def repair() -> None:
        run("umount", home)
        whole = home.with_suffix(".ext4")  # the kernel may keep the old one, read-only, for a while
        run("cp", "--sparse=always", image, whole)
        subprocess.run(["e2fsck", "-fy", whole], check=False, capture_output=True)
        run("mount", "-o", "loop", whole, home)

    try:
        yield repair
    finally:
        run("umount", home)
        run("umount", "--lazy", under)
        home.with_suffix(".ext4").unlink(missing_ok=True)


def ballast_of(disk: Callable[[Path], Disk], home: Path) -> Path:
    return home.with_suffix(".under") / "ballast" if disk is failing else home / "ballast"


def journal(home: Path) -> list[str]:
    """What a run has said, which it says only of what is durable; the last line may be torn."""
    files = home.glob("state/runs/*/events.jsonl")
    return [line for file in files for line in file.read_text().splitlines(keepends=True) if line.endswith("}\n")]


def break_and_recover(crashing: Crashing, disk: Callable[[Path], Disk], at: int) -> int:
    """How the run ended whose disk broke at its ``at``-th commit; afterwards everything is there or away."""
    place = crashing.home()
    with disk(place) as repair:
        home, count = place / "home", str(place.with_suffix(".commits"))
        home.mkdir()
        run("sync", "-f", home)
        code, _ = crashing.ask("apply", home, count=count, point="before", at=at, ballast=str(ballast_of(disk, place)))
        said = journal(home)
        crashing.ask("recover", home, count=count)
        repair()
        code_of_recovery, _ = crashing.ask("recover", home, count=count)
        if disk is failing:
            assert_ended(home, code_of_recovery)
        else:
            assert_whole(home, code_of_recovery)
        assert said == journal(home)[: len(said)]
    shutil.rmtree(place)
    return code


def assert_ended(home: Path, recovered: int) -> None:
    """After a disk that has lost files: each run has ended once, nobody has a lease, and what is kept is named."""
    assert recovered == 0
    with closing(sqlite3.connect(home / "state" / "state.db")) as store:
        runs = [run for (run,) in store.execute("SELECT id FROM runs")]
        ended = store.execute("SELECT run FROM events WHERE type = 'RunEnded'").fetchall()
        assert store.execute("SELECT * FROM leases WHERE id <> ''").fetchall() == []
    assert sorted(ended) == sorted((run,) for run in runs)
    kept = {path.name for path in home.glob("state/projects/default/workspaces/*")}
    named = [json.loads((home / "state" / "runs" / run / "run.json").read_text())["left_behind"] for run in runs]
    assert kept == {text.split()[1] for left in named for text in left}


@ROOT.mark
@pytest.mark.slow
@pytest.mark.parametrize(
    ("disk", "stride"),
    [
        pytest.param(memory, 18, id="full-some"),
        pytest.param(memory, 1, id="full-all", marks=pytest.mark.nightly),
        pytest.param(ext4, 1, id="ext4-full-all", marks=pytest.mark.nightly),
        pytest.param(failing, 1, id="ext4-broken-all", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("crashing", ["fake"], indirect=True)
def test_a_disk_that_is_full_from_any_write_on_loses_nothing(
    crashing: Crashing, disk: Callable[[Path], Disk], stride: int
) -> None:
    codes = [break_and_recover(crashing, disk, at) for at in range(1, commits(crashing) + 1, stride)]

    assert {*codes} <= {0, 1, 4, 5}
    assert 4 in codes


@ROOT.mark
@pytest.mark.nightly
def test_work_that_the_disk_under_its_volume_did_not_take_is_not_taken_for_done(project: Project) -> None:
    """Whoever writes into a volume hears nothing of the disk that its image is on, here one of the runner alone."""
    volumes, tools = project.home / "state" / "volumes", project.home / "tools"
    for made in (volumes, tools):
        made.mkdir(parents=True)
    mounting = f'mount -t tmpfs -o size=20m none {volumes} && exec "$@"'
    project.within = ("unshare", "--mount", "sh", "-c", mounting, "sh")
    project.script(
        f"while [ ! -e {tools}/full ]; do sleep 0.02; done; head -c 8M /dev/urandom > big",
        workspace=f"resource_limits: {{disk: 16M}}\ntoolchains: [{tools}]",
    )
    process = project.start("apply", str(project.folder), "--output", "jsonl")
    assert any("IsolationObserved" in line for line in process.stdout)
    fill(Path(f"/proc/{process.pid}/root{volumes}/ballast"))
    (tools / "full").touch()
    process.communicate()
    record = json.loads(project.runner("runs", "show", "last", "--output", "json").out)

    assert (step(record, "agent")["status"], process.returncode) == ("succeeded", 4)
    message = step(record, "scan")["outcome"]["message"]
    assert message.startswith("host.refused: the disk of this host did not take all that was written")
