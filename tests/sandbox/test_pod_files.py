"""The guest's words in a pod, run as they are there: files that are sent, the channel, its end, and the network."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from runner.guest import binary
from runner.sandbox.tar_trees import HEAD, Source, pack_trees
from tests.support.folder_contents import everything, put
from tests.support.needs import ROOT

UID = 1_600_000_000 + os.getpid()  # nobody else's: bridges signal all processes of their user


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The guest where another user can run it."""
    place = tmp_path / "guest"
    place.write_bytes(binary.find().path.read_bytes())
    place.chmod(0o755)
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(0o755)
    return place


def test_what_is_sent_is_there_as_it_was(program: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    put(tree / "a" / "b" / "odd \n\udcff", os.urandom(3_000_000), 0o640)
    (tree / "a" / "closed").mkdir(mode=0o500)
    (tree / "a" / "link").symlink_to("../../out")
    os.mkfifo(tree / "pipe")
    os.utime(tree / "a", (7, 7))
    to = tmp_path / "to"
    to.mkdir()
    put(to / "name" / "a" / "link", "in the way of a link")
    more = Source("system/passwd", tree, 0, content=b"root")

    done = subprocess.run(
        [program, "unpack", to], input=b"".join(pack_trees([Source("name", tree, 0), more])), check=False
    )

    assert done.returncode == 0
    assert everything(to / "name") == everything(tree)
    assert (to / "name" / "a").stat().st_mtime == 7
    assert (to / "system" / "passwd").read_bytes() == b"root"


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "link/out"])
def test_nothing_is_written_outside(program: Path, tmp_path: Path, name: str) -> None:
    to = tmp_path / "to"
    to.mkdir()
    (to / "link").symlink_to(tmp_path)
    record = HEAD.pack(4, 0, 0o100644, len(name), 0) + name.encode() + b"text" + HEAD.pack(0, 0, 0, 0, 0)

    done = subprocess.run([program, "unpack", to], input=record, check=False)

    assert done.returncode == 6
    assert not (tmp_path / "out").exists()


def test_a_host_that_goes_away_is_told_by_the_exit_code(program: Path, tmp_path: Path) -> None:
    assert (
        subprocess.run([program, "unpack", tmp_path], input=HEAD.pack(4, 0, 0o100644, 1, 0), check=False).returncode
        == 4
    )


@ROOT.mark
def test_what_its_user_has_closed_is_opened_but_no_stand_in(program: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    put(tree / "closed" / "file", "text", 0)
    (tree / "closed").chmod(0)
    put(tree / "stands-in", "", 0)
    os.utime(tree / "stands-in", (1, 1))
    for path in (tree, *tree.rglob("*")):
        os.chown(path, UID, UID)
    os.chown(tree / "closed" / "file", UID, UID)

    opened = subprocess.run([program, "open", tree], check=False, user=UID, capture_output=True)
    listed = subprocess.run([program, "list", tree], check=False, user=UID, capture_output=True)

    assert (opened.returncode, opened.stdout) == (0, b"")
    assert listed.returncode == 0
    assert [record.partition(b" ")[2] for record in listed.stdout.split(b"\0")[:2]] == [b"closed", b"closed/file"]
    assert (tree / "stands-in").stat().st_mode & 0o777 == 0


@contextmanager
def bridge(program: Path, place: Path) -> Iterator[subprocess.Popen[bytes]]:
    words = [program, "bridge", place]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, user=UID, bufsize=0) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    folder = tmp_path / "channel"
    folder.mkdir()
    os.chown(folder, UID, UID)
    return folder / "socket"


def dial(place: Path) -> socket.socket:
    deadline = time.monotonic() + 20
    while True:
        dialled = socket.socket(socket.AF_UNIX)
        try:
            dialled.connect(str(place))
        except FileNotFoundError:
            dialled.close()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        else:
            return dialled


@ROOT.mark
def test_a_bridge_carries_both_ways_and_leaves_no_place_to_dial(program: Path, channel: Path) -> None:
    with bridge(program, channel) as process, dial(channel) as guest:
        process.stdin.write(b"to the guest")
        assert guest.recv(100) == b"to the guest"
        guest.sendall(b"from it")
        guest.close()
        assert process.stdout.read() == b"from it"
        assert process.wait(10) == 0
    assert list(channel.parent.iterdir()) == []


@ROOT.mark
@pytest.mark.timeout(30)
def test_a_bridge_whose_readers_pause_carries_on(program: Path, channel: Path) -> None:
    sent = os.urandom(3 << 20)
    with ThreadPoolExecutor(2) as senders, bridge(program, channel) as process, dial(channel) as guest:
        both = [senders.submit(guest.sendall, sent), senders.submit(process.stdin.write, sent)]
        time.sleep(1)  # every buffer on the way is full
        assert not any(one.done() for one in both)
        for read in (partial(os.read, process.stdout.fileno()), guest.recv):
            found = b""
            while len(found) < len(sent) and (chunk := read(1 << 16)):
                found += chunk
            assert found == sent


@ROOT.mark
def test_a_new_bridge_takes_the_place_of_an_old_one(program: Path, channel: Path) -> None:
    with (
        bridge(program, channel) as old,
        dial(channel) as first,
        bridge(program, channel) as new,
        dial(channel) as second,
    ):
        assert first.recv(1) == b""
        old.wait(10)
        second.sendall(b"here")
        assert new.stdout.read(4) == b"here"
        new.stdin.close()
        assert second.recv(1) == b""


@ROOT.mark
def test_a_guest_that_is_not_wanted_any_more_ends(program: Path, channel: Path) -> None:
    with subprocess.Popen([program, channel], user=UID, stdin=subprocess.DEVNULL) as guest:
        with bridge(program, channel) as process:
            assert process.stdout.read(12)[4] == 1  # it says hello
            assert subprocess.run([program, "end", channel], check=False, user=UID).returncode == 0
            assert process.wait(10) != 0
        assert guest.wait(10) in (0, -9)


def test_what_answers_is_told(program: Path) -> None:
    def reach(port: int, **env: str) -> int:
        address = (socket.AF_INET.to_bytes(2, "little") + port.to_bytes(2) + bytes([127, 0, 0, 1]) + bytes(8)).hex()
        words = [address] if port else []
        return subprocess.run([program, "reach", *words], check=False, env=env).returncode

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        api = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port)}
        assert (reach(port), reach(0, **api)) == (1, 1)
    assert (reach(port), reach(0, **api), reach(0)) == (0, 0, 0)
