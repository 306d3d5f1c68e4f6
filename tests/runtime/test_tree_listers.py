"""A tree is scanned with the same result whoever lists it, and a lister that dies is no clean tree."""

from __future__ import annotations

import os
import random
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from runner.guest import build
from runner.policy.paths import PathPolicy
from runner.runtime.tree_scan import OpenLister, scan
from runner.safefs import listing, trees
from runner.safefs.listing import Lister
from tests.support.needs import COMPILER
from tests.support.params import nightly

DEPTH = 3
POLICY = PathPolicy(("**",), ("**/.env", "**/secrets/**", "**/*.pem", "top/*/low"), 4096)
NAMES = (
    *(b"plain", b".env", b".ENV", b"secrets", b"x.pem", b"top", b"low", b".git", b".GIT", b".g\xe2\x80\x8bit", b"git"),
    *(
        b"a\nb",
        b"\xff\xfe",
        b"a\xcc\x81",
        b"\xc3\xa1",
        b"-rf",
        b" ",
        b"\x1b[31m",
        b"n" * 255,
        b"\xf0\x9f\x92\xa9",
        b"~",
        b"\\",
    ),
)


def fill(folder: bytes, source: random.Random, depth: int) -> None:
    """Entries of every kind, in numbers that take one packet and several."""
    for name in source.sample(NAMES, source.randrange(len(NAMES)) if depth < DEPTH else len(NAMES)):
        path = os.path.join(folder, name)
        match source.randrange(12):
            case 0:
                os.symlink(source.choice([b"low", b"../low", b"../../../../out", b"/etc/passwd", b"l" * 4000]), path)
            case 1:
                os.mkfifo(path)
            case 2:
                with open(path, "wb") as file:
                    file.truncate(source.choice([4095, 4096, 4097, 1 << 40]))
            case 3:
                os.close(os.open(path, os.O_CREAT))
                os.chmod(path, source.choice([0, 0o4755, 0o2755, 0o1755]))
            case 4 | 5 | 6 | 7 | 8 if depth and len(path) < 3000:
                os.mkdir(path)
                fill(path, source, depth - 1)
                os.chmod(path, source.choice([0o755, 0o755, 0o500, 0]))
            case _:
                with open(path, "wb") as file:
                    file.write(b"x" * source.randrange(100))


@pytest.fixture
def hostile_tree(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    root = tmp_path / "tree"
    root.mkdir()
    fill(os.fsencode(root), random.Random(request.param), DEPTH)
    for number in range(1_500):  # more than one packet, names and odd ones
        name = root / f"wide-{number}-{'é' * (number % 60)}"
        os.symlink("x" * (number % 300 + 1), name) if number % 7 == 0 else name.touch()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(root / "socket"))
    yield root
    assert trees.remove(root) == []


@pytest.mark.parametrize("hostile_tree", [0, nightly(1)], indirect=True)
def test_every_lister_finds_the_same_in_a_hostile_tree(hostile_tree: Path, openers: dict[str, OpenLister]) -> None:
    found = [
        scan(hostile_tree, POLICY, skip_top=(".git", "wide-1"), limit_violations=1_000_000, open_lister=opener)
        for opener in openers.values()
    ]

    assert found[0].files > 1_000
    assert len({violation.rule for violation in found[0].violations}) > 6
    assert found[1:] == found[:1] * 2


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lister that ends with an error when it does what C does not allow."""
    COMPILER.require()
    program = tmp_path_factory.mktemp("sanitized") / "lister"
    source = Path(build.__file__).with_name("lister.c")
    checks = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    subprocess.run(("cc", "-std=gnu11", "-DHOSTED", "-g", "-O1", *checks, source, "-o", program), check=True)
    return program


@pytest.mark.nightly
@pytest.mark.parametrize("hostile_tree", range(100, 110), indirect=True)
def test_the_program_does_nothing_that_c_does_not_allow(hostile_tree: Path, sanitized: Path) -> None:
    def checked(top: int, most: int, skipped: Sequence[str]) -> AbstractContextManager[Lister[object]]:
        return listing.open_worker_lister(sanitized, top, most, skipped)

    openers = (checked, listing.open_in_process_lister)
    both = [scan(hostile_tree, POLICY, limit_violations=1_000_000, open_lister=opener) for opener in openers]

    assert both[0] == both[1]


@pytest.mark.parametrize("hostile_tree", [0], indirect=True)
def test_every_lister_stops_at_the_limits(hostile_tree: Path, openers: dict[str, OpenLister]) -> None:
    for opener in openers.values():
        assert scan(hostile_tree, POLICY, limit_entries=1_000, open_lister=opener).truncated
        assert len(scan(hostile_tree, POLICY, limit_violations=5, open_lister=opener).violations) == 6


def test_a_program_that_ends_before_its_time_is_an_error(tmp_path: Path) -> None:
    def ended(top: int, most: int, skipped: Sequence[str]) -> AbstractContextManager[Lister[object]]:
        return listing.open_worker_lister(Path("/bin/true"), top, most, skipped)

    with pytest.raises(OSError, match=r"ended|Broken pipe|reset"):
        scan(tmp_path, POLICY, open_lister=ended)


class Stop(Exception):
    pass


def test_a_scan_that_is_stopped_leaves_no_program(tmp_path: Path, openers: dict[str, OpenLister]) -> None:
    before = children()
    for number in range(20):
        (tmp_path / str(number)).mkdir()

    def stop() -> bool:
        assert len(children()) > len(before)
        raise Stop

    with pytest.raises(Stop):
        scan(tmp_path, POLICY, should_stop=stop, open_lister=openers["compiled"])

    assert children() == before


def children() -> set[str]:
    return {pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()}
