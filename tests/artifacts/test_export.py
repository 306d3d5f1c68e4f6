"""An export holds no secret in any form, nothing that does not fit, and names that every system can write."""

from __future__ import annotations

import io
import json
import os
import tarfile
from base64 import encodebytes
from functools import partial
from pathlib import Path

import pytest
import trio

from runner.artifacts import export as exporting
from runner.artifacts.export import ExportResult, export
from runner.core.errors import UsageError
from runner.core.redact import Redactor, forms_of

KEY = b"sk-ant-api03-Zm9v+YmFy/0123456789 $\"'\\~!\nsecond line of it: 9876543210"
REDACTOR = Redactor({"KEY": KEY})


async def exported(directory: Path, to: Path, redactor: Redactor = REDACTOR) -> ExportResult:
    work = partial(export, directory, to, name="run-1", at=1, redactor=redactor, added={})
    return await trio.to_thread.run_sync(work)


def contents(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def packed(name: str, content: bytes) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    return whole.getvalue()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    made.mkdir()
    return made


async def test_no_form_of_a_key_is_in_an_archive(directory: Path, tmp_path: Path) -> None:
    forms = sorted(forms_of(KEY))
    for number, form in enumerate(forms):
        (directory / f"form-{number}").write_bytes(b"before " + form + b" after\n")
    (directory / "wrapped").write_bytes(b"x\n" + encodebytes(KEY))
    (directory / "utf-16").write_bytes(KEY.decode().encode("utf-16"))
    (directory / "coloured").write_bytes(b"\x1b[1m" + KEY[:9] + b"\x1b[0m" + KEY[9:])
    (directory / f"named-{KEY.hex()[:40]}{KEY.hex()[40:]}").write_bytes(b"x")
    (directory / "clean").write_bytes(b"before after\n")

    done = await exported(directory, tmp_path / "e.tar.gz")

    found = contents(tmp_path / "e.tar.gz")
    whole = b"\0".join(name.encode() + content for name, content in found.items())
    assert len(forms) > 30
    assert REDACTOR.names_in(whole) == frozenset()
    assert found["run-1/form-0"] == b"before [redacted:KEY] after\n"
    assert found["run-1/clean"] == b"before after\n"
    assert len(done.redacted) == len(forms) + 2
    assert [(one.name, one.why) for one in done.left_out] == [("utf-16", "not text, and shows KEY")]
    listed = json.loads(found["run-1/EXPORT.json"])
    assert {file["name"] for file in listed["files"] if file.get("redacted") == ["KEY"]} == set(done.redacted)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param(packed("session.jsonl", b"x " + KEY), "an archive that shows KEY", id="in a file"),
        pytest.param(packed(KEY.hex(), b"x"), "an archive that shows KEY", id="in a name"),
        pytest.param(b"no archive", "an archive that cannot be read: Not a gzipped file", id="no archive"),
        pytest.param(packed("a", b"x" * 5000)[:-30], "an archive that cannot be read", id="cut"),
    ],
)
async def test_an_archive_within_is_taken_as_it_is_or_not_at_all(
    directory: Path, tmp_path: Path, content: bytes, why: str
) -> None:
    (directory / "bad.tar.gz").write_bytes(content)
    (directory / "named_otherwise").write_bytes(packed("a", KEY))
    (directory / "good.tar.gz").write_bytes(good := packed("session.jsonl", b"fine"))

    done = await exported(directory, tmp_path / "e.tar.gz")

    assert [one.name for one in done.left_out] == ["bad.tar.gz", "named_otherwise"]
    assert done.left_out[0].why.startswith(why)
    assert contents(tmp_path / "e.tar.gz")["run-1/good.tar.gz"] == good


@pytest.mark.parametrize("name", ["e.tgz", "E.TAR.GZ"])
async def test_an_archive_may_have_its_short_name(directory: Path, tmp_path: Path, name: str) -> None:
    (directory / "a").write_text("a")

    await exported(directory, tmp_path / name)

    assert contents(tmp_path / name)["run-1/a"] == b"a"


@pytest.mark.parametrize("name", ["e.zip", "e.ZIP", "e.tar", "e.tar.xz"])
async def test_a_name_of_another_archive_is_refused(directory: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=name):
        await exported(directory, tmp_path / name)

    assert not (tmp_path / name).exists()


async def test_what_is_too_large_is_left_out_and_named(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "MAX_FILE_BYTES", 1_000)
    monkeypatch.setattr(exporting, "MAX_BYTES", 1_599)
    for name, size in {"a": 900, "b": 1_001, "c": 700, "d": 600}.items():
        (directory / name).write_bytes(b"x" * size)
    (directory / "e.tar.gz").write_bytes(packed("x", b"x" * 5_000))

    done = await exported(directory, tmp_path / "e.tar.gz")

    assert [(one.name, one.why) for one in done.left_out] == [
        ("b", "1001 bytes are too many"),
        ("c", "700 bytes are too many"),
        ("e.tar.gz", "an archive that is too large to be searched"),
    ]


async def test_names_are_such_that_every_system_can_write_them(directory: Path, tmp_path: Path) -> None:
    (directory / "d\x1b[31m").mkdir()
    for name in ("a:b", "a?b", "A_B", "-rf", "dot.", "e\u202eexe", "x" * 255, "EXPORT.json", "d\x1b[31m/f\n"):
        (directory / name).write_text(name)
    Path(os.fsdecode(bytes(directory) + b"/\xff")).write_text("raw")

    await exported(directory, tmp_path / "e.tar.gz")

    found = contents(tmp_path / "e.tar.gz")
    names = {name.removeprefix("run-1/") for name in found}
    assert names == {
        "-rf",
        "A_B",
        "EXPORT.json",
        "EXPORT.json~2",
        "SHA256SUMS",
        "_",
        "a_b~2",
        "a_b~3",
        "d_[31m/f_",
        "dot",
        "e_exe",
        "x" * 200,
    }
    was = {file["name"]: file.get("was") for file in json.loads(found["run-1/EXPORT.json"])["files"]}
    assert (was["_"], was["a_b~2"], was["-rf"]) == ("\\udcff", "a:b", None)


async def test_equal_files_make_an_equal_archive_with_secrets_taken_out(directory: Path, tmp_path: Path) -> None:
    (directory / "b").write_bytes(KEY * 3)
    (directory / "a").write_bytes(os.urandom(100_000))

    for name in ("one.tgz", "two.tgz"):
        await exported(directory, tmp_path / name)
        os.utime(directory / "a", (1, 1))

    assert (tmp_path / "one.tgz").read_bytes() == (tmp_path / "two.tgz").read_bytes()


async def test_a_pack_of_git_is_not_taken_since_nobody_can_look_into_it(directory: Path, tmp_path: Path) -> None:
    (directory / "commits.bundle").write_bytes(b"# v2 git bundle\n")

    done = await exported(directory, tmp_path / "out")

    assert "runner runs branch --commits" in done.left_out[0].why
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["EXPORT.json", "SHA256SUMS"]
