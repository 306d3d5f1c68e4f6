"""Trees to and from a place that shares no file with this host, hostile archives among them."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.core.errors import ProviderFailed
from runner.sandbox.tar_trees import Source, read_tar, stamps, tar_trees
from tests.support.folder_contents import everything

Member = tuple[str, bytes, str]  # its name, its type in an archive, its content or target


def archive(*members: Member, top: str = "top") -> io.BytesIO:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, kind, text in ((top, tarfile.DIRTYPE, ""), *members):
            entry = tarfile.TarInfo(f"{top}/{name}" if name != top else top)
            entry.type, entry.mode = kind, 0o755 if kind == tarfile.DIRTYPE else 0o644
            if kind == tarfile.REGTYPE:
                entry.size = len(text)
            else:
                entry.linkname = text
            tar.addfile(entry, io.BytesIO(text.encode()))
    out.seek(0)
    return out


def receive(members: io.BytesIO, to: Path, *, most: int = 1 << 20, without: frozenset[str] = frozenset()) -> None:
    to.mkdir(exist_ok=True)
    read_tar(members, to, most=most, without=without, check=lambda: None)


def file(name: str, text: str = "text") -> Member:
    return name, tarfile.REGTYPE, text


def link(name: str, target: str) -> Member:
    return name, tarfile.SYMTYPE, target


def hard(name: str, target: str) -> Member:
    return name, tarfile.LNKTYPE, target


def folder(name: str) -> Member:
    return name, tarfile.DIRTYPE, ""


def test_a_tree_comes_back_as_it_went(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "b" / "text").write_text("text")
    (tree / "run").write_text("#!/bin/sh\n")
    (tree / "run").chmod(0o750)
    (tree / "odd \n\udcff").write_bytes(b"\0")
    (tree / "out").symlink_to("/etc/passwd")
    (tree / "up").symlink_to("../..")
    os.mkfifo(tree / "pipe", 0o600)
    out = io.BytesIO(b"".join(tar_trees([Source("top", tree, 1000)])))
    blocks = out.getvalue()[-3 * tarfile.BLOCKSIZE :].strip(b"\0")
    assert len(blocks) in range(1, tarfile.BLOCKSIZE + 1)  # the end of an entry, and just two blocks that end all
    back = tmp_path / "back"
    receive(out, back)
    assert everything(back) == everything(tree)
    assert stat.S_IMODE((back / "run").lstat().st_mode) == 0o750


def test_what_is_the_same_already_is_not_written_again_and_what_is_gone_is_removed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    receive(archive(file("same"), file("other"), folder("d"), file("d/gone"), link("l", "x"), file("becomes")), tree)
    before = {name: (tree / name).lstat().st_ino for name in ("same", "l")}
    first = stamps(tree)
    receive(archive(file("same"), file("other", "new"), link("l", "x"), folder("becomes"), file("becomes/dir")), tree)
    assert {name: (tree / name).lstat().st_ino for name in ("same", "l")} == before
    assert (tree / "other").read_text() == "new"
    assert (tree / "becomes" / "dir").read_text() == "text"
    assert not (tree / "d").exists()
    now = stamps(tree)
    assert {name for name in first.keys() | now.keys() if first.get(name) != now.get(name)} == {
        *("/other", "/d", "/d/gone", "/becomes", "/becomes/dir"),
    }


def test_only_what_is_named_is_sent(tmp_path: Path) -> None:
    receive(archive(folder("d"), file("d/x"), file("d/y"), file("z")), tmp_path / "tree")
    out = io.BytesIO(b"".join(tar_trees([Source("top", tmp_path / "tree", 1000, only=frozenset({"/d/x"}))])))
    with tarfile.open(fileobj=out) as sent:
        assert sent.getnames() == ["top/d/x"]


def test_the_empty_place_of_a_mount_is_left_out_and_a_full_one_is_not(tmp_path: Path) -> None:
    members = archive(folder("empty"), folder("full"), file("full/x"))
    receive(members, tmp_path / "tree", without=frozenset({"empty", "full"}))
    assert sorted(os.listdir(tmp_path / "tree")) == ["full"]


@pytest.mark.parametrize(
    "members",
    [
        pytest.param(lambda: archive(file("../out")), id="up"),
        pytest.param(lambda: archive(folder("d"), file("d/..")), id="dots"),
        pytest.param(lambda: archive(file("d/x")), id="no parent"),
        pytest.param(lambda: archive(link("l", "/tmp"), file("l/x")), id="through a link"),
        pytest.param(lambda: archive(file("x"), file("x")), id="twice"),
        pytest.param(lambda: archive(file("x"), file("x/y")), id="below a file"),
        pytest.param(lambda: archive(hard("x", "/etc/passwd")), id="hard link out"),
        pytest.param(lambda: archive(link("l", "")), id="link to nothing"),
        pytest.param(lambda: with_a_zero_byte(archive(link("l", "a" * 150))), id="link with a zero byte"),
        pytest.param(lambda: archive(link("l", "/etc/passwd"), hard("x", "top/l")), id="hard link to a link"),
        pytest.param(lambda: archive(("x", tarfile.CHRTYPE, "")), id="device"),
        pytest.param(lambda: archive(file("x", "x" * (1 << 21))), id="too large"),
        pytest.param(lambda: archive(*(folder("/".join(["d" * 200] * n)) for n in range(1, 30))), id="too deep"),
        pytest.param(lambda: io.BytesIO(archive(file("x", "y" * 9000)).getvalue()[:4096]), id="cut off"),
        pytest.param(lambda: io.BytesIO(b"nothing of the kind" * 100), id="no archive"),
        pytest.param(lambda: io.BytesIO(b"\0" * 10240), id="empty"),
    ],
)
def test_an_archive_that_lies_writes_nothing_outside_and_is_refused(
    members: Callable[[], io.BytesIO], tmp_path: Path
) -> None:
    with pytest.raises(ProviderFailed):
        receive(members(), tmp_path / "tree")
    assert os.listdir(tmp_path) == ["tree"]


def with_a_zero_byte(whole: io.BytesIO) -> io.BytesIO:
    """In the long target of a link, which no kernel would give it."""
    return io.BytesIO(whole.getvalue().replace(b"linkpath=" + b"a" * 150, b"linkpath=a\0" + b"a" * 148))


@pytest.mark.parametrize("time", ["nan", "inf", "-inf", "1e300"])
def test_a_time_that_no_clock_has_is_left_out(tmp_path: Path, time: str) -> None:
    top = tarfile.TarInfo("top")
    top.type = tarfile.DIRTYPE
    dated = tarfile.TarInfo("top/x")
    dated.pax_headers = {"mtime": time}
    with tarfile.open(fileobj=(out := io.BytesIO()), mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(top)
        tar.addfile(dated)
    out.seek(0)

    receive(out, tmp_path / "tree")

    assert (tmp_path / "tree" / "x").stat().st_mtime == 0


def test_more_entries_than_anybody_has_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.sandbox.tar_trees.MAX_ENTRIES", 3)
    with pytest.raises(ProviderFailed, match="more than 3 files"):
        receive(archive(*(file(str(n)) for n in range(4))), tmp_path / "tree")
