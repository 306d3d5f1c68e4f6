"""What is kept of an agent's output once the secrets of its run are taken out."""

from __future__ import annotations

import gzip
import io
import tarfile
from functools import partial
from pathlib import Path

import pytest
import trio

from runner.core.redact import Redactor
from runner.runtime.secrets import output_leaks, redact_files

KEY = b"s3cr3t-Tok3n-Value"
REDACTOR = Redactor({"KEY": KEY})


def packed(content: bytes) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        entry = tarfile.TarInfo("session.jsonl")
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    return whole.getvalue()


async def redacted(folder: Path) -> list[str]:
    return await trio.to_thread.run_sync(partial(redact_files, REDACTOR, folder))


async def test_names_that_are_equal_once_they_are_clean_are_all_kept(tmp_path: Path) -> None:
    forms = (KEY.decode(), KEY.hex(), KEY.hex().upper())
    for form in forms:
        (tmp_path / f"a-{form}").write_text(form)
    (tmp_path / "a-[redacted:KEY]").write_text("as it was")

    await redacted(tmp_path)

    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(found) == [f"a-[redacted:KEY]{tail}" for tail in ("", "~2", "~3", "~4")]
    assert sorted(found.values()) == ["[redacted:KEY]"] * 3 + ["as it was"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param(packed(b"x " + KEY), "that shows secret KEY", id="shows it"),
        pytest.param(packed(KEY.hex().encode()), "that shows secret KEY", id="in another form"),
        pytest.param(gzip.compress(KEY), "that shows secret KEY", id="no tar"),
        pytest.param(packed(b"x" * 5000)[:-30], "that cannot be read: ", id="cut"),
    ],
)
async def test_an_archive_is_searched_whatever_its_name(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "bad").write_bytes(content)
    (tmp_path / "good.tar.gz").write_bytes(good := packed(b"fine"))

    leaks = await output_leaks(REDACTOR, tmp_path)
    (said,) = await redacted(tmp_path)

    assert [str(leak) for leak in leaks] == (["/output/bad: secret:KEY"] if "KEY" in why else [])
    assert said.startswith(f"output bad is left out: an archive {why}")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"good.tar.gz": good}


def test_an_archive_is_searched_to_a_limit_however_small_it_is() -> None:
    with pytest.raises(ValueError, match=r"\Athat is too large to be searched\Z"):
        REDACTOR.names_packed(io.BytesIO(gzip.compress(bytes(3 << 20) + KEY)), lambda: None, 2 << 20)
