"""Volumes themselves: one device for an image whoever mounts it, and nothing left however making and removing end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from runner.core.errors import CleanUpIncomplete, ProviderFailed
from runner.core.model import Handle, Limits
from runner.ports.provider import SandboxSpec, WorkspaceRequest
from runner.providers.local import LocalProvider
from runner.safefs.linux import unmount
from runner.sandbox.directories import WorkspaceDirectories
from runner.sandbox.volumes import Volumes
from runner.testing.outside import eventually, on_host, volumes_of
from runner.testing.place import MIB
from tests.support.needs import USERS

pytestmark = USERS.mark

LIMIT = Limits(disk_bytes=8 * MIB)
ROOT = Path(__file__).parents[2]


def requested(id: str = "w") -> WorkspaceRequest:
    return WorkspaceRequest(id=id, run="run", nonce="nonce", limits=LIMIT)


def left(home: Path) -> list[Path]:
    """What there is of workspaces below a home, and where its volumes are mounted."""
    places = list(Volumes(home).place("w").parent.glob("*"))
    return [*places, *home.glob("volumes/*"), *home.glob("sandboxes/[!.]*"), *home.glob("projects/*/workspaces/*")]


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[tuple[LocalProvider, Handle]]:
    local = LocalProvider(tmp_path)
    handle = await local.create(requested())
    yield local, handle
    await local.destroy(handle)
    eventually(lambda: volumes_of(tmp_path) == [])  # sandboxes that are just made beside us have each mount of the host
    assert (left(tmp_path), on_host(tmp_path)) == ([], set())


async def test_a_link_is_where_people_look_for_the_tree(made: tuple[LocalProvider, Handle], tmp_path: Path) -> None:
    _, handle = made

    assert (tmp_path / "projects" / "default" / "workspaces" / "w").resolve() == handle.tree


MOUNTER = """
import sys
from pathlib import Path
from runner.sandbox.mounts import stage_directory
from runner.sandbox.volumes import Volumes

if sys.argv[2] == "staged":
    stage_directory()
print("begun", flush=True)
volumes = Volumes(Path(sys.argv[1]))
for line in sys.stdin:
    volumes.mount(volumes.place("w"))
    print((volumes.place("w") / "tree" / "kept").read_text(), flush=True)
"""


async def test_however_many_mount_it_there_is_one_device_and_all_see_it(
    made: tuple[LocalProvider, Handle], tmp_path: Path
) -> None:
    """Also those that moved to a namespace of their own before it was mounted."""
    _, handle = made
    (handle.tree / "kept").write_text("kept")
    words = [[sys.executable, "-c", MOUNTER, str(tmp_path), how] for how in ("staged", "plain")]
    mounters = [subprocess.Popen(w, stdin=-1, stdout=-1, text=True, cwd=ROOT, bufsize=1) for w in words]
    try:
        for mounter in mounters:
            assert mounter.stdout.readline() == "begun\n"
        for _ in range(3):
            unmount(handle.private)
            eventually(lambda: volumes_of(tmp_path) == [])
            for mounter in mounters:
                mounter.stdin.write("\n")
            assert [mounter.stdout.readline() for mounter in mounters if mounter.stdout] == ["kept\n"] * 2
            assert len(volumes_of(tmp_path)) == 1
    finally:
        for mounter in mounters:
            mounter.communicate()


async def test_a_volume_is_mounted_again_after_the_host_was_started_again(
    made: tuple[LocalProvider, Handle], tmp_path: Path
) -> None:
    """A host that has crashed leaves a file system that nobody has unmounted."""
    local, handle = made
    (handle.tree / "kept").write_text("kept\n")
    await local.chown_to_workspace_user(handle)
    for path in (handle.tree / "kept", handle.tree, handle.private):
        written = os.open(path, os.O_RDONLY)
        os.fsync(written)
        os.close(written)
    (image,) = (tmp_path / "volumes").glob("*.ext4")
    crashed = image.with_suffix(".crashed")
    for end in (lambda: None, lambda: crashed.rename(image)):
        shutil.copyfile(image, crashed)
        unmount(handle.private)
        end()
        assert not handle.tree.exists()
        assert await LocalProvider(tmp_path).list_owned("nonce") == [handle]
        assert (handle.tree / "kept").read_text() == "kept\n"
        unmount(handle.private)
        async with local.open(handle, SandboxSpec()) as workspace:
            assert (await workspace.run(["sh", "-c", "cat kept; echo more > more"])).stdout == b"kept\n"
            assert (await workspace.effective()).limits == LIMIT


async def test_one_that_is_in_use_is_removed_and_its_device_goes_when_it_is_not(tmp_path: Path) -> None:
    local = LocalProvider(tmp_path)
    handle = await local.create(requested())
    (handle.tree / "open").touch()
    with (handle.tree / "open").open():
        await local.destroy(handle)
        assert left(tmp_path) == []
        assert len(volumes_of(tmp_path)) == 1
    eventually(lambda: volumes_of(tmp_path) == [])


async def test_what_is_mounted_in_a_workspace_keeps_its_files(
    made: tuple[LocalProvider, Handle], tmp_path: Path
) -> None:
    """A file system of another on the way of whoever removes a tree."""
    local, _ = made
    plain = await local.create(WorkspaceRequest(id="plain", run="run", nonce="nonce"))
    (plain.tree / "in" / "mount").mkdir(parents=True)
    other = await local.create(requested("other"))
    (other.tree / "kept").write_text("kept")
    subprocess.run(["mount", "--bind", other.private, plain.tree / "in" / "mount"], check=True)
    try:
        # In this thread: one that trio keeps from before the first volume may see other mounts.
        with pytest.raises(CleanUpIncomplete, match="another file system is mounted there"):
            WorkspaceDirectories(tmp_path, "local").destroy(plain)
        assert (other.tree / "kept").read_text() == "kept"
    finally:
        unmount(plain.tree / "in" / "mount")
    await local.destroy(plain)
    await local.destroy(other)


def test_a_host_that_is_nearly_full_gets_no_further_volumes(tmp_path: Path) -> None:
    volumes = Volumes(tmp_path, floor=1 << 60)
    with pytest.raises(ProviderFailed, match="has only"):
        volumes.make(volumes.place("w"), 1 << 60)
    volumes.remove(volumes.place("w"))
    assert left(tmp_path) == []


async def test_an_adopted_directory_has_no_limit_of_its_own(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    with pytest.raises(ProviderFailed, match="others write to the same disk"):
        await LocalProvider(tmp_path / "home").create(
            WorkspaceRequest(id="w", run="run", nonce="nonce", limits=LIMIT, tree=theirs)
        )


CRASHING = """
import os, signal, sys, trio
from pathlib import Path
from runner.core.model import Limits
from runner.ports.provider import SandboxSpec, WorkspaceRequest
from runner.sandbox.mounts import stage_directory
from runner.sandbox.volumes import Volumes
from runner.providers.local import LocalProvider

home, first, step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
EVENTS = {"fcntl.flock", "fcntl.ioctl", "open", "os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove",
          "os.rename", "os.rmdir", "os.symlink", "os.truncate"}

async def live():
    local = LocalProvider(home)
    handle = await local.create(WorkspaceRequest(id="w", run="run", nonce="nonce", limits=Limits(disk_bytes=8 << 20)))
    (handle.tree / "made").write_text("made")
    await local.destroy(handle)

async def recover():
    local = LocalProvider(home)
    for handle in await local.list_owned("nonce"):
        await local.evict(handle)
        await local.destroy(handle)

def count(at):
    def see(event, words):
        nonlocal at
        if event in EVENTS and (event != "open" or str(home) in str(words[0]) or "loop" in str(words[0])):
            at -= 1
            if at == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(see)

def forked(act, at=0):
    child = os.fork()
    if not child:
        count(at)
        trio.run(act)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

trio.run(live)
at = first
while forked(live, at) == -signal.SIGKILL:
    assert forked(recover) == 0, at
    backing = [place.read_text() for place in Path("/sys/block").glob("loop*/loop/backing_file")]
    left = [p for d in ("volumes/*", "sandboxes/[!.]*", "projects/*/workspaces/*") for p in home.glob(d)]
    left += [place for place in Volumes(home).place("w").parent.glob("*")]
    assert not [b for b in backing if str(home) in b] and not left, (at, backing, left)
    at += step
print(at)
"""


@pytest.mark.parametrize(
    ("first", "step"), [(1, 13), pytest.param(1, 1, marks=pytest.mark.nightly)], ids=["some", "all"]
)
def test_wherever_making_or_removing_is_killed_nothing_is_left_after_recovery(
    tmp_path: Path, first: int, step: int
) -> None:
    words = [sys.executable, "-c", CRASHING, str(tmp_path), str(first), str(step)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50
    assert left(tmp_path) == []
