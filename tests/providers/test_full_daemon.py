"""A daemon whose disk is full, or becomes so while commands write to a volume."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.safefs import trees
from tests.providers import test_docker_volumes
from tests.providers.test_docker_volumes import as_member, had_by, settle, write
from tests.support import dockerd
from tests.support.dockerd import Daemon
from tests.support.needs import ROOT
from tests.support.situations import Project

homes = test_docker_volumes.homes
pytestmark = [ROOT.mark, pytest.mark.nightly]

SIZE = 400 << 20  # bytes; the image takes some hundred


@pytest.fixture
def small() -> Iterator[Daemon]:
    """A daemon with a small disk of its own."""
    dockerd.DOCKER.require()
    data = Path(tempfile.mkdtemp(prefix="runner-small-", dir="/tmp"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "small", data], check=True)
    daemon = Daemon(dockerd.root(f"small-{os.getpid()}"), data)
    try:
        daemon.start()
        daemon.make_image()
        yield daemon
    finally:
        daemon.stop()
        subprocess.run(["umount", "--lazy", data], check=True)
        data.rmdir()


@pytest.fixture
def on_small(project: Project, homes: Path) -> Iterator[Project]:
    """A project of a user who may use that daemon, once it is written."""
    place = settle(project, homes)
    yield project
    trees.remove(place)


def test_a_volume_that_commands_fill_refuses_their_writes_and_the_work_is_saved(
    on_small: Project, small: Daemon
) -> None:
    write(
        on_small,
        "echo work > made; cat /dev/zero > fill || echo refused; cat made; truncate -s 0 fill",
        run="snapshot: {message: work}",
    )
    as_member(on_small, small)

    record = on_small.succeed()

    assert on_small.logs("agent").splitlines() == ["refused", "work"]
    assert "+work" in (on_small.directory(record) / "work.patch").read_text()


def test_a_daemon_without_room_says_so_and_nothing_is_left(on_small: Project, small: Daemon) -> None:
    write(on_small, "true")
    as_member(on_small, small)
    filler = small.data / "filler"
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(bytes(SIZE))
    try:
        done, record = on_small.apply()
    finally:
        filler.unlink()

    assert done.code == 4, done.out + done.err
    assert "no space left on device" in done.out + done.err
    assert record["ended"] is not None
    assert had_by(small) == (set(), set(), set())
