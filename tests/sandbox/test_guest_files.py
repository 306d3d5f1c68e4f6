"""Files of a sandbox as the compiled guest lists and packs them, and what is made of them on this host."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from subprocess import PIPE
from typing import Any, cast

import pytest
import trio
import trio.testing

from runner.core.errors import ProviderFailed
from runner.core.model import Exit
from runner.guest import binary
from runner.guest.client import Guest
from runner.ports.provider import SandboxSpec, WorkspaceRequest
from runner.sandbox.guest_files import SILENCE, GuestFiles, fetch_files, list_files
from runner.sandbox.tar_trees import Packed, read_packed, remove_all_but
from runner.testing.place import GRACE
from tests.support.folder_contents import everything
from tests.support.needs import ROOT
from tests.support.providers import VOLUMES, make
from tests.support.situations import open_to_all

FILE, FOLDER, LINK, DEVICE = 0o100644, 0o040755, 0o120777, 0o060600


def guest(
    *words: str | Path, stdin: bytes = b"", user: int | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    argv = [binary.find().path, *words]
    return subprocess.run(argv, input=stdin, capture_output=True, check=False, user=user, cwd=cwd)


def listed(*words: str | Path) -> list[dict[bytes, bytes]]:
    """The stamps that each root's names have."""
    found: list[dict[bytes, bytes]] = [{}]
    done = guest("list", *words)
    assert done.returncode == 0
    for record in done.stdout.split(b"\0")[:-1]:
        stamp, _, name = record.partition(b" ")
        found[-1] |= {name: stamp} if record else {}
        found += [] if record else [{}]
    return found[:-1]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "b" / "text").write_text("text")
    (tree / "odd \n\udcff").write_bytes(os.urandom(100_000))
    (tree / "out").symlink_to("/etc")
    os.link(tree / "a" / "b" / "text", tree / "twin")
    os.mkfifo(tree / "pipe")
    return tree


def test_everything_is_listed_but_what_is_skipped_and_behind_links(tree: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()

    whole, nothing = listed("-gone", tree, other)
    part, _ = listed("-a/b", tree, other)

    assert {*whole} == {b"a", b"a/b", b"a/b/text", b"odd \n\xff", b"out", b"twin", b"pipe"}
    assert whole[b"twin"] == whole[b"a/b/text"] != whole[b"pipe"]
    assert nothing == {}
    assert {*whole} - {*part} == {b"a/b", b"a/b/text"}


def test_a_file_that_was_changed_has_another_stamp(tree: Path) -> None:
    (before,) = listed(tree)
    (tree / "twin").write_text("TEXT")
    (tree / "out").unlink()
    (tree / "out").symlink_to("/bin")
    (after,) = listed(tree)

    assert {name for name in before if before[name] != after[name]} == {b"a/b/text", b"twin", b"out"}


def test_a_file_is_shown_to_a_limit_if_it_is_below_the_directory_wherever_links_lead(tree: Path) -> None:
    (tree / "near").symlink_to(tree / "a")
    (tree / "loop").symlink_to("loop")
    (tree.parent / "tree-2").write_text("outside")
    paths = {
        "a/b/text": (0, b"f\ntext"),
        "./near/b/../../twin": (0, b"f\ntext"),
        "none": (71, b""),
        "a/b/text/more": (71, b""),
        "loop": (71, b""),
        "x" * 5000: (71, b""),
        "out/passwd": (72, b""),
        "../tree-2": (72, b""),
        ".": (72, b""),
        "a": (73, b""),
        "pipe": (73, b""),
    }

    found = {path: guest("show", path, "100", cwd=tree) for path in paths}

    assert {path: (done.returncode, done.stdout) for path, done in found.items()} == paths
    content = (tree / "odd \n\udcff").read_bytes()
    for most in (0, 1, 65_533, 65_534, 65_535, 99_999, 100_000, 1 << 20):
        assert guest("show", "odd \n\udcff", str(most), cwd=tree).stdout == b"f\n" * bool(most) + content[:most]


def test_what_is_packed_comes_back_as_it_was_and_what_is_gone_is_left_out(tree: Path, tmp_path: Path) -> None:
    names = sorted(os.fsencode(path.relative_to(tree)) for path in tree.rglob("*"))
    names.remove(b"twin")

    done = guest("pack", tree, stdin=b"".join(name + b"\0" for name in (*names, b"gone", b"out/passwd")))

    to = tmp_path / "to"
    to.mkdir()
    read_packed(entries(done.stdout), to, most=1 << 20, links={"twin": "a/b/text"})
    assert done.returncode == 0
    assert guest("pack", tree, stdin=b"../tree\0").returncode == 1
    assert everything(to) == everything(tree)
    assert (to / "twin").samefile(to / "a" / "b" / "text")


def test_what_is_removed_is_gone_and_nothing_behind_links_or_in_directories_that_have_more(
    tree: Path, tmp_path: Path
) -> None:
    (tmp_path / "kept").touch()
    (tree / "away").symlink_to(tmp_path)
    (tree / "a" / "more").touch()

    done = guest("remove", tree, stdin=b"away/kept\0a/b/text\0a/b\0a\0a/gone/x\0twin/x\0odd \n\xff\0out\0")

    assert done.returncode == 0
    assert {path.name for path in tree.rglob("*")} == {"a", "more", "away", "twin", "pipe"}
    assert (tmp_path / "kept").exists()
    assert guest("remove", tree, stdin=b"../kept\0").returncode == 1


def entries(packed: bytes) -> Iterator[Packed]:
    stream, head = BytesIO(packed), struct.Struct("=QqIHH")
    while words := stream.read(head.size):
        size, seconds, mode, name, target = head.unpack(words)
        yield Packed(
            name=os.fsdecode(stream.read(name)),
            target=os.fsdecode(stream.read(target)),
            mode=mode,
            seconds=seconds,
            size=size,
            read=stream.read,
        )


@ROOT.mark
@pytest.mark.parametrize("words", ["list", "pack"])
def test_what_its_user_cannot_read_is_told_by_the_exit_code(tmp_path: Path, words: str) -> None:
    program = tmp_path / "guest"
    program.write_bytes(binary.find().path.read_bytes())
    program.chmod(0o755)
    tree = tmp_path / "tree"
    (tree / "closed").mkdir(parents=True)
    (tree / "closed").chmod(0)
    (tree / "file").touch(mode=0)
    open_to_all(tmp_path)

    done = subprocess.run([program, words, tree], input=b"file\0", capture_output=True, check=False, user=65534)

    assert done.returncode == 1


def entry(name: str, mode: int = FILE, text: str = "text", target: str = "", size: int | None = None) -> Packed:
    return Packed(
        name=name,
        target=target,
        mode=mode,
        seconds=0,
        size=len(text) if size is None else size,
        read=BytesIO(text.encode()).read,
    )


@pytest.mark.parametrize(
    ("packed", "links", "words"),
    [
        pytest.param([entry("../out")], {}, "impossible name", id="above"),
        pytest.param([entry("/etc/passwd")], {}, "impossible name", id="absolute"),
        pytest.param([entry("link/out")], {}, "impossible name", id="through a link that is here"),
        pytest.param([entry("l", LINK, "", ".."), entry("l/out")], {}, "impossible name", id="through one that came"),
        pytest.param([entry("a"), entry("a")], {}, "impossible name", id="twice"),
        pytest.param([entry("a\0b")], {}, "impossible name", id="zero byte"),
        pytest.param([entry("a", DEVICE)], {}, "a device", id="device"),
        pytest.param([entry("a", size=1 << 30)], {}, "more than 1 MiB", id="too much"),
        pytest.param([entry("a", size=5)], {}, "too early", id="cut"),
        pytest.param([], {"a": "../out"}, "does not have", id="link to elsewhere"),
    ],
)
def test_what_nobody_should_write_is_refused(
    tmp_path: Path, packed: list[Packed], links: dict[str, str], words: str
) -> None:
    to, out = tmp_path / "to", tmp_path / "out"
    to.mkdir()
    out.write_text("mine")
    (to / "link").symlink_to("..")

    with pytest.raises(ProviderFailed, match=words):
        read_packed(iter(packed), to, most=1 << 20, links=links)

    assert out.read_text() == "mine"


def test_a_directory_takes_the_place_of_a_link(tmp_path: Path) -> None:
    to = tmp_path / "to"
    to.mkdir()
    (to / "link").symlink_to(tmp_path)

    read_packed(iter([entry("link", FOLDER, ""), entry("link/out")]), to, most=1 << 20, links={})
    remove_all_but(to, {"link", "link/out"})

    assert everything(to).keys() == {"link", "link/out"}
    assert not (tmp_path / "out").exists()


class Silent:
    """A guest that is never heard of again, and the command that it does not run."""

    @asynccontextmanager
    async def exec(self, *_: object, **__: object) -> AsyncIterator[Silent]:
        yield self

    @property
    def stdin(self) -> trio.abc.SendStream:
        return self.stdout

    @property
    def stdout(self) -> trio.StapledStream[trio.abc.SendStream, trio.abc.ReceiveStream]:
        return trio.testing.memory_stream_pair()[0]


async def test_a_guest_that_is_silent_is_given_up_in_time(tmp_path: Path, autojump_clock: object) -> None:
    files = GuestFiles({"/workspace": tmp_path}, [], 1 << 20)
    begun = trio.current_time()

    await files.begin(cast("Guest", Silent()))

    assert not await files.fetch(["/workspace"])
    assert trio.current_time() - begun == 2 * SILENCE


class Telling(Silent):
    """A guest whose command says this, and ends well."""

    def __init__(self, said: bytes, times: int = 1) -> None:
        self._said = [said] * times

    @property
    def stdout(self) -> Any:
        return self

    async def receive_some(self, _: int) -> bytes:
        await trio.lowlevel.checkpoint()
        return self._said.pop() if self._said else b""

    async def send_all(self, _: bytes) -> None: ...

    async def aclose(self) -> None: ...

    async def wait(self) -> Exit:
        return Exit(code=0)


@pytest.mark.parametrize(
    ("said", "times", "words"),
    [
        pytest.param(b"81a4,1,0,0,0, x\0" * 10_001, 100, "more than 1,000,000", id="too many"),
        pytest.param(b"x" * (1 << 20), 257, "too many files and directories", id="too long"),
        pytest.param(b"81a4,1,0,0,0, x\0", 1, "are missing", id="cut"),
        pytest.param(b"\0\0", 1, "are missing", id="one root too many"),
    ],
)
async def test_a_listing_that_no_tree_has_is_refused(said: bytes, times: int, words: str) -> None:
    with pytest.raises(ProviderFailed, match=words):
        await list_files(cast("Guest", Telling(said, times)), ["/workspace"])


async def test_sizes_that_are_no_numbers_are_no_measure(tmp_path: Path) -> None:
    files = GuestFiles({"/workspace": tmp_path}, [], 1 << 20)
    files.guest = cast("Guest", Telling(b"81a4,1,many,0,0, x\0\0"))

    with pytest.raises(ProviderFailed, match="cannot be measured"):
        await files.measure(["/workspace"])


async def test_names_that_lead_out_are_asked_for_and_never_written(tmp_path: Path) -> None:
    to = tmp_path / "to"
    to.mkdir()
    files = GuestFiles({"/workspace": to}, [], 1 << 20)
    head = struct.pack("=QqIHH", 4, 0, FILE, 6, 0)
    files.guest = cast("Guest", Telling(head + b"../out" + b"evil"))
    listed = {"../out": "81a4,1,4,0,0,"}

    with pytest.raises(ProviderFailed, match="impossible name"):
        await fetch_files(files.guest, "/workspace", [*listed], listed, to=to, most=1 << 20)

    assert os.listdir(tmp_path) == ["to"]


@pytest.mark.parametrize("grows", [True, False])
def test_a_file_that_grows_or_shrinks_while_it_is_packed_comes_with_the_size_that_was_said(
    tmp_path: Path, grows: bool
) -> None:
    size = 8 << 20
    (tmp_path / "file").write_bytes(b"x" * size)
    with subprocess.Popen([binary.find().path, "pack", tmp_path], stdin=PIPE, stdout=PIPE) as packing:
        assert packing.stdin is not None
        assert packing.stdout is not None
        packing.stdin.write(b"file\0")
        packing.stdin.close()
        begun = packing.stdout.read(1 << 16)
        os.truncate(tmp_path / "file", 2 * size if grows else 1 << 20)
        packed = begun + packing.stdout.read()

    (found,) = [(entry.size, entry.read(-1)) for entry in entries(packed)]

    assert packing.returncode == 0
    assert found[0] == len(found[1]) == size
    assert grows or found[1].endswith(b"\0" * (1 << 20))


@ROOT.mark
async def test_only_what_has_changed_is_fetched(tmp_path: Path) -> None:
    provider = make(VOLUMES, tmp_path, GRACE)
    handle = await provider.create(WorkspaceRequest(id="changes", run="run-1", nonce="nonce"))
    for name in ("same", "changed", "gone"):
        (handle.tree / name).write_text(name)
    async with provider.open(handle, SandboxSpec()) as workspace:
        (handle.tree / "same").write_text("it was not fetched")
        await workspace.run(["sh", "-c", "echo more >> changed; rm gone; mkdir d; echo new > d/new"])
        await workspace.refresh()
        refreshed = everything(handle.tree)
        await workspace.run(["sh", "-c", "echo last > d/new; echo home > ~/mine"])

    assert refreshed.keys() == {"same", "changed", "d", "d/new"}
    assert (handle.tree / "same").read_text() == "it was not fetched"
    assert (handle.tree / "changed").read_text() == "changedmore\n"
    assert (handle.tree / "d" / "new").read_text() == "last\n"
    assert (handle.private / "home" / "mine").read_text() == "home\n"
    async with provider.open(handle, SandboxSpec()) as workspace:
        await workspace.run(["sh", "-c", "echo closed > d/new; chmod 0 d"])
    assert (handle.tree / "d" / "new").read_text() == "closed\n", "its daemon reads what its user cannot"
    await provider.destroy(handle)
