"""A process swaps files, links and directories of a tree while the runner looks at it: nothing outside is seen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from hashlib import sha1
from pathlib import Path

import pytest

from runner.core.errors import GitFailed, HostileTree
from runner.core.settings import Settings
from runner.git import open_git
from runner.policy.paths import PathPolicy
from runner.ports.git import Author, SnapshotOptions
from runner.runtime.tree_scan import scan
from runner.safefs import trees
from runner.safefs.safe_open import read_beneath
from tests.support.folder_contents import put

NAMES = 16  # of each sort that are swapped
LENGTH = 200  # of every file and of every link's target, so that a size tells nothing
CANARY = b"CANARY of the host".ljust(LENGTH)
INSIDE = b"inside of the tree".ljust(LENGTH)

# Exchanges each name with its twin, for ever; both exist at any time.
ADVERSARY = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
os.chdir(sys.argv[1])
pairs = [line.encode().split(b" ") for line in sys.argv[2].split(",")]
print("ready", flush=True)
while True:
    for one, other in pairs:
        libc.renameat2(-100, one, -100, other, 2)
"""


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """Files of the host, which must stay as they are."""
    folder = tmp_path / "outside"
    put(folder / "inner" / "file", CANARY)
    (folder / "file").write_bytes(CANARY)
    before = state(folder)
    yield folder
    assert state(folder) == before


def state(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (status.st_mode, status.st_uid, status.st_mtime_ns, content)
    return found


@pytest.fixture
def swapped(tmp_path: Path, outside: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A tree in which files `f`, and unless files alone are asked for `d` and `p`, are now links out, now FIFOs."""
    root = tmp_path / "tree"
    root.mkdir()
    target = str(outside) + "file".rjust(LENGTH - len(str(outside)), "/")
    pairs = []
    for number in range(NAMES):
        (root / f"f{number}").write_bytes(INSIDE)
        (root / f"g{number}").symlink_to(target)
        pairs.append(f"f{number} g{number}")
        if request.param == "files":
            continue
        put(root / f"d{number}" / "inner" / "file", INSIDE)
        (root / f"d{number}" / "file").write_bytes(INSIDE)
        (root / f"e{number}").symlink_to(outside)
        (root / f"p{number}").write_bytes(INSIDE)
        os.mkfifo(root / f"q{number}")
        pairs += [f"d{number} e{number}", f"p{number} q{number}"]
    argv = [sys.executable, "-c", ADVERSARY, str(root), ",".join(pairs)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as adversary:
        adversary.stdout.readline()
        yield root
        assert adversary.poll() is None
        adversary.kill()


Try = Callable[[Path, Path], Awaitable[int]]


async def try_reads(root: Path, scratch: Path) -> int:
    names = [f"{kind}{n}" for n in range(NAMES) for kind in ("f", "g", "p", "q")]
    names += [f"{kind}{n}/{file}" for n in range(NAMES) for kind in "de" for file in ("file", "inner/file")]
    for name in names:
        try:
            assert read_beneath(root, name, 1000) == INSIDE
        except OSError:
            continue
    return len(names)


async def try_scan(root: Path, scratch: Path) -> int:
    result = scan(root, PathPolicy(("**",), (), 1000))
    assert result.files <= 6 * NAMES
    assert result.directories <= 4 * NAMES
    return 2 * NAMES


async def try_copy(root: Path, scratch: Path) -> int:
    trees.copy_out(root, scratch / "copy")
    copied = [path for path in (scratch / "copy").rglob("*") if path.is_file() or path.is_symlink()]
    assert {path.read_bytes() for path in copied} <= {INSIDE, b""}
    assert trees.remove(scratch / "copy") == []
    return 2 * NAMES


def try_snapshot(path: str) -> Try:
    git = open_git(Settings.from_env({"PATH": path}))
    leaked = sha1(b"blob %d\0%s" % (len(CANARY), CANARY), usedforsecurity=False).hexdigest()

    async def snapshot(root: Path, scratch: Path) -> int:
        repository = scratch / "private"
        if not repository.exists():
            await git.create_empty(repository)
        with suppress(GitFailed, HostileTree):  # a tree that changes under it may be refused
            await git.snapshot(repository, root, None, SnapshotOptions("work", Author("A", "a@example.org", 0)))
        assert not (repository / "objects" / leaked[:2] / leaked[2:]).exists()
        return 2 * NAMES

    return snapshot


TRIES: dict[str, Try] = {
    "reads": try_reads,
    "scan": try_scan,
    "copy": try_copy,
    "snapshot with git": try_snapshot(os.environ["PATH"]),
    "snapshot without git": try_snapshot(""),
}


async def race(name: str, root: Path, scratch: Path, wanted: int) -> None:
    tries = 0
    while tries < wanted:
        tries += await TRIES[name](root, scratch)


sorts = pytest.mark.parametrize("swapped", ["files", "everything"], indirect=True)


@pytest.mark.scenario("WSM-15")
@sorts
@pytest.mark.parametrize("name", TRIES)
async def test_nothing_outside_is_read_or_written(name: str, swapped: Path, tmp_path: Path) -> None:
    await race(name, swapped, tmp_path, 1_000)


@pytest.mark.nightly
@sorts
@pytest.mark.parametrize("name", TRIES)
async def test_nothing_outside_is_read_or_written_in_many_tries(name: str, swapped: Path, tmp_path: Path) -> None:
    await race(name, swapped, tmp_path, 100_000)
