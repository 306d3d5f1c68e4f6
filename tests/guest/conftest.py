"""The guest program as compiled from this tree, and a host that talks to it."""

from __future__ import annotations

import platform
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from runner.guest import build
from runner.testing.outside import eventually, marked
from tests.support.guest_driver import Host, inherited
from tests.support.needs import COMPILER

SOURCE = Path(build.__file__).parent


@pytest.fixture(scope="session")
def reachable() -> Iterator[Path]:
    """A folder that other users can reach: some tests start the guest as one."""
    with TemporaryDirectory(prefix="guest-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(scope="session")
def sanitized(reachable: Path) -> Path:
    """An ordinary program that ends with an error when it does what C does not allow."""
    COMPILER.require()
    checks = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    words = ("cc", "-std=gnu11", "-DHOSTED", "-g", "-O1", *checks, SOURCE / "guest.c", "-o", reachable / "sanitized")
    subprocess.run(words, check=True)
    return reachable / "sanitized"


@pytest.fixture(scope="session", params=["as installed", pytest.param("sanitized", marks=pytest.mark.nightly)])
def program(request: pytest.FixtureRequest, reachable: Path) -> Path:
    if request.param == "sanitized":
        found: Path = request.getfixturevalue("sanitized")
        return found
    compiler = build.system_compiler() or build.pinned_compiler(platform.machine(), reachable / "cache")
    build.compile_program(compiler, SOURCE, "guest", reachable / "guest")
    return reachable / "guest"


@pytest.fixture
def mark() -> Iterator[str]:
    """For ``MARK`` in the environment of commands: no process that has it outlives the test."""
    mark = secrets.token_hex(8)
    yield mark
    eventually(lambda: not marked(mark))


@pytest.fixture
def guest(program: Path, mark: str) -> Iterator[Host]:
    """A guest that was started by us; commands carry the mark."""
    with inherited(program) as host:
        host.mark = mark
        yield host
