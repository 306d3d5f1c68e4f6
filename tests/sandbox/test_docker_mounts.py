"""Sources are put where the docker daemon looks them up, be that among our own mounts or among others."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.core.errors import ProviderFailed
from runner.safefs.safe_open import open_linkless
from runner.sandbox.docker_api import Engine
from runner.sandbox.docker_mounts import open_daemon_stage
from tests.support.needs import USERS

LISTEN = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print(flush=True)
sys.stdin.read()
"""
PATHS = "/usr/local/bin:/usr/bin:/bin"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Callable[..., tuple[Path, int]]]:
    """Start what listens on a socket as a daemon does, behind the words of a prefix; its socket and its pid."""
    started: list[subprocess.Popen[str]] = []

    def start(*prefix: str) -> tuple[Path, int]:
        path = tmp_path / "socket"
        words = [*prefix, "python3", "-c", LISTEN, str(path)]
        process = subprocess.Popen(words, env={"PATH": PATHS}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "\n"
        return path, process.pid

    yield start
    for process in started:
        process.communicate()


@USERS.mark
@pytest.mark.parametrize("prefix", [(), ("unshare", "--mount", "--propagation=private")], ids=["ours", "its own"])
def test_a_source_is_seen_where_the_daemon_looks(
    tmp_path: Path, daemon: Callable[..., tuple[Path, int]], prefix: tuple[str, ...]
) -> None:
    socket, pid = daemon(*prefix)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_text("shown")
    name = f"handed-{os.getpid()}"
    with open_daemon_stage(Engine(f"unix://{socket}"), name, os.getuid()) as places:
        place = places.add(open_linkless(tmp_path / "source"))
        theirs = Path(f"/proc/{pid}/root{place.path}/file")
        assert theirs.read_text() == "shown"
        assert Path(place.path, "file").exists() == (not prefix)
        places.seal([place])
        with pytest.raises(OSError, match="Read-only"):
            theirs.write_text("changed")
    assert not Path(f"/proc/{pid}/root{place.path}").exists()


@USERS.mark
def test_a_daemon_that_is_down_is_told_as_everywhere_else(tmp_path: Path) -> None:
    """It was `cannot be shown directories of this host`, without a word of what to start."""
    engine = Engine(f"unix://{tmp_path / 'docker.sock'}")
    with (
        pytest.raises(ProviderFailed, match=f"`{engine.host}` cannot be reached: No such file") as caught,
        open_daemon_stage(engine, f"handed-{os.getpid()}", os.getuid()),
    ):
        pass
    assert (caught.value.hint or "").startswith("start the daemon that listens there")
