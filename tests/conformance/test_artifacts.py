"""One suite for every store of artifacts, and for the copies of runs on them. S3 is moto's, over a socket."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.artifacts import run_copy
from runner.artifacts.run_copy import (
    CONTENTS,
    Contents,
    GrowingCopy,
    GrowingFiles,
    Interrupted,
    SentCopy,
    fetch_files,
    folder_of,
    read_contents,
    remove_run,
    send_run,
)
from runner.artifacts.stores import open_artifacts, s3
from runner.core.errors import (
    ArtifactsDamaged,
    ArtifactsMissing,
    ArtifactsRefused,
    ArtifactsUnreachable,
    BadArtifactsUrl,
)
from runner.ports.artifacts import MAX_OBJECT, ArtifactStore
from tests.support.artifact_stores import KEYS, Between, answering, bucket, client, moto, s3_url
from tests.support.needs import ROOT

RUN = "k3q9v2m8x7h1"
EVERYWHERE = pytest.mark.scenario("BEY-20", only="artifacts in S3 or a folder that hosts share")
NEVER = lambda: False  # noqa: E731


def rows(columns: str, **table: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(columns, list(table.values()), ids=list(table))


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactStore:
    if request.param == "s3":
        return open_artifacts(s3_url(bucket()))
    (tmp_path / "share").mkdir()
    return open_artifacts(f"file://{tmp_path}/share")


def names(store: ArtifactStore, prefix: str, after: str = "") -> list[str]:
    return [one.name for one in store.list(prefix, after)]


@pytest.mark.parametrize("content", [b"", b"text\n", bytes(range(256)) * 4096], ids=["empty", "short", "long"])
def test_what_is_put_comes_back_and_is_listed_with_its_size(store: ArtifactStore, content: bytes) -> None:
    store.put("runs/a/x-1", content)

    assert store.get("runs/a/x-1") == content
    assert list(store.list("runs/a/")) == [("runs/a/x-1", len(content))]


def test_a_second_put_replaces_the_first(store: ArtifactStore) -> None:
    store.put("a", b"first")
    store.put("a", b"second")

    assert store.get("a") == b"second"


def test_listings_of_many_pages_are_whole_ordered_and_begin_behind_a_name(store: ArtifactStore) -> None:
    wanted = sorted(f"p/{number:02}" for number in range(8))
    for name in [*wanted, "p.x/0", "q/0"]:
        store.put(name, b"1")

    assert names(store, "p/") == wanted
    assert names(store, "p/", after="p/04") == wanted[5:]
    assert names(store, "none/") == []
    assert sorted(store.folders("")) == ["p", "p.x", "q"]


def test_what_is_missing_is_said_and_its_removal_is_none(store: ArtifactStore) -> None:
    with pytest.raises(ArtifactsMissing, match="`runs/none` is not in"):
        store.get("runs/none")

    store.put("a/b/c", b"1")
    store.remove(["a/b/c", "a/b/none"])
    assert names(store, "a/") == []
    store.check()
    assert names(store, "check/") == []


# Copies of runs


def run_directory(place: Path) -> Path:
    files = {"plan.json": b"{}", "logs/agent.stdout": b"one\ntwo\n", "logs/agent.stderr": b"", "run.json": b"{}\n"}
    files |= {"output/report.md": b"# found\n", os.fsdecode(b"output/a\xff\n b"): b"odd", "output/..x": b"dots"}
    for name, content in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    (place / "output" / "link").symlink_to("/etc/passwd")
    return place


def contents_of(place: Path) -> dict[str, bytes]:
    return {str(p.relative_to(place)): p.read_bytes() for p in place.rglob("*") if p.is_file() and not p.is_symlink()}


def send(store: ArtifactStore, directory: Path, **added: Path) -> SentCopy:
    return send_run(store, RUN, directory, added, moved=lambda: None, stopped=NEVER)


def everything(_: str) -> bool:
    return True


@EVERYWHERE
def test_a_run_comes_back_on_another_host_byte_for_byte(store: ArtifactStore, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(MAX_OBJECT + 7))
    sent = send(store, run_directory(tmp_path / "run"), bundle=tmp_path / "big")

    found = read_contents(store, RUN, sent.sha256)
    fetch_files(store, found, tmp_path / "there", everything, stopped=NEVER)

    wanted = contents_of(tmp_path / "run") | {"bundle": (tmp_path / "big").read_bytes()}
    assert contents_of(tmp_path / "there") == wanted
    assert all(re.fullmatch(r"[ -~]+", name) for name in names(store, "runs/"))


def test_what_was_sent_is_not_sent_again_and_a_change_is(store: ArtifactStore, tmp_path: Path) -> None:
    directory = run_directory(tmp_path / "run")
    send(store, directory)
    (directory / "run.json").write_bytes(b"{2}\n")
    moves: list[int] = []
    sent = send_run(store, RUN, directory, {}, moved=lambda: moves.append(1), stopped=NEVER)

    assert len(moves) == 2, "the file that changed, and the list"
    fetch_files(store, read_contents(store, RUN, sent.sha256), tmp_path / "there", everything, stopped=NEVER)
    assert contents_of(tmp_path / "there") == contents_of(directory)


@EVERYWHERE
def test_a_log_is_followed_in_parts_while_it_grows(store: ArtifactStore, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    (directory / "logs").mkdir(parents=True)
    (directory / "plan.json").write_text("{}")
    growing, there = GrowingFiles(store, RUN, directory), GrowingCopy(store, RUN, tmp_path / "there")
    log, seen = directory / "logs" / "agent.stdout", tmp_path / "there" / "logs" / "agent.stdout"
    for piece in ("one\n", "two\n", "", "three\n"):
        with log.open("a") as file:
            file.write(piece)
        assert growing.send([]) is bool(piece)
        there.fetch()
        assert seen.read_text() == log.read_text()
    growing.send(["agent"])

    assert there.ended() == {"agent"}
    sent = send(store, directory)
    (file,) = [file for file in sent.contents.files if file.name == "logs/agent.stdout"]
    assert len(file.parts) == 3, "the parts that were there are those of the copy"
    fetch_files(store, sent.contents, tmp_path / "whole", everything, stopped=NEVER)
    assert contents_of(tmp_path / "whole") == contents_of(directory)


def test_inputs_that_were_sent_at_the_start_are_part_of_the_copy(store: ArtifactStore, tmp_path: Path) -> None:
    directory = run_directory(tmp_path / "run")
    GrowingFiles(store, RUN, directory).send_text("incident/incident.json", b'{"title": "it burns"}')

    sent = send(store, directory)

    fetch_files(store, sent.contents, tmp_path / "there", everything, stopped=NEVER)
    assert (tmp_path / "there/incident/incident.json").read_bytes() == b'{"title": "it burns"}'


def spoil(store: ArtifactStore, word: str) -> None:
    part = next(name for name in names(store, folder_of(RUN)) if word in name)
    content = store.get(part)
    store.put(part, content[:-1] + bytes([content[-1] ^ 1]))


@EVERYWHERE
@pytest.mark.parametrize("what", ["parts/logs/agent.stdout/", "parts/run.json/", CONTENTS])
def test_a_file_that_was_changed_in_the_store_is_refused(store: ArtifactStore, tmp_path: Path, what: str) -> None:
    sent = send(store, run_directory(tmp_path / "run"))
    spoil(store, what)

    with pytest.raises(ArtifactsDamaged):
        fetch_files(store, read_contents(store, RUN, sent.sha256), tmp_path / "there", everything, stopped=NEVER)
    assert not any(path.suffix == ".part" for path in (tmp_path / "there").rglob("*"))


@rows(
    ("name"),
    above="../../etc/cron.d/x",
    absolute="/etc/cron.d/x",
    empty="a//b",
    nul="a\0b",
    here="./a",
)
def test_a_list_cannot_write_elsewhere(store: ArtifactStore, tmp_path: Path, name: str) -> None:
    sent = send(store, run_directory(tmp_path / "run"))
    bad = Contents(RUN, tuple(run_copy.StoredFile(name, file.parts) for file in sent.contents.files[:1]))

    with pytest.raises(ArtifactsDamaged, match="no name of a file"):
        fetch_files(store, bad, tmp_path / "there", everything, stopped=NEVER)


def test_a_copy_that_was_stopped_is_no_copy_and_goes_on_the_next_time(store: ArtifactStore, tmp_path: Path) -> None:
    directory, moves = run_directory(tmp_path / "run"), list[int]()
    with pytest.raises(Interrupted):
        send_run(store, RUN, directory, {}, moved=lambda: moves.append(1), stopped=lambda: len(moves) >= 2)
    with pytest.raises(ArtifactsMissing):
        read_contents(store, RUN, None)

    sent = send(store, directory)
    assert read_contents(store, RUN, sent.sha256) == sent.contents


def test_a_run_is_removed_whole_and_others_stay(store: ArtifactStore, tmp_path: Path) -> None:
    send(store, run_directory(tmp_path / "run"))
    store.put("runs/other/contents.json", b"{}")

    assert remove_run(store, RUN) > 0
    assert names(store, "runs/") == ["runs/other/contents.json"]
    assert list(store.folders("runs/")) == ["other"]


# What a URL may say


@rows(
    ("url", "words"),
    scheme=("https://bucket", "unknown scheme"),
    relative=("file:share", "does not name a folder"),
    root=("file:///", "does not name a folder"),
    other_host=("file://host/share", "does not name a folder"),
    keys=("s3://key:secret@bucket/x", "has a user"),
    no_bucket=("s3:///x", "does not name a bucket"),
    prefix=("s3://bucket/a b", "other characters"),
    option=("s3://bucket/x?regoin=eu", "unknown option `regoin`"),
    choice=("s3://bucket/x?encryption=rot13", "option `encryption`"),
    endpoint=("s3://bucket/x?endpoint=ftp://h", "endpoint"),
    half_a_lock=("s3://bucket/x?lock=governance", "belong together"),
    retain=("s3://bucket/x?lock=governance&retain=soon", "`retain`"),
    key_alone=("s3://bucket/x?kms_key=k", "is for KMS"),
    profile=("s3://bucket/x?profile=none-such", "profile"),
    folder_option=("file:///share?lock=governance", "unknown option"),
)
def test_a_url_that_cannot_be_used_is_refused_without_its_secrets(url: str, words: str) -> None:
    with pytest.raises(BadArtifactsUrl, match=re.escape(words)) as refused:
        open_artifacts(url)
    assert "secret" not in f"{refused.value.message} {refused.value.hint}"


def test_encryption_and_retention_are_asked_of_s3() -> None:
    name = bucket(locked=True)
    store = open_artifacts(s3_url(name, encryption="aws:kms", kms_key="key-1", lock="governance", retain="2d"))

    store.put("runs/a/x", b"1")

    head = client().head_object(Bucket=name, Key="team/a/runs/a/x")  # type: ignore[attr-defined]
    assert (head["ServerSideEncryption"], head["SSEKMSKeyId"]) == ("aws:kms", "key-1")
    assert head["ObjectLockMode"] == "GOVERNANCE"
    assert 1.9 * 86_400 < head["ObjectLockRetainUntilDate"].timestamp() - time.time() < 2.1 * 86_400


# Faults of a server and of the way to it


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(s3, "ATTEMPTS", 2)


def losing(direction: str, begins: bytes, times: int, after: int) -> Between:
    """Lose a connection after some bytes of a request or answer that begins so, a few times."""
    passed = 0

    def spoiling(between: Between, kind: str, content: bytes) -> bytes | None:
        nonlocal passed
        if (
            between.requests
            and between.requests[-1].startswith(begins)
            and kind == direction
            and between.spoilt < times
        ):
            passed += len(content)
            if passed > after:
                passed = 0
                return None
        return content

    return Between(spoiling)


@pytest.mark.parametrize("direction", ["request", "answer"])
def test_a_connection_lost_in_a_put_is_tried_again(direction: str) -> None:
    name = bucket()
    with losing(direction, b"PUT", 1, 1000 if direction == "request" else 0) as between:
        store = open_artifacts(s3_url(name, between.port))
        store.put("a", b"x" * (1 << 20))

        assert between.spoilt == 1
    assert open_artifacts(s3_url(name)).get("a") == b"x" * (1 << 20)


@EVERYWHERE
def test_a_connection_that_is_lost_in_every_put_ends_bounded(impatient: None, tmp_path: Path) -> None:
    with losing("request", b"PUT", 99, 1000) as between:
        store, began = open_artifacts(s3_url(bucket(), between.port)), time.monotonic()
        with pytest.raises(ArtifactsUnreachable):
            store.put("a", b"x" * (1 << 20))

    assert time.monotonic() - began < 30
    assert between.spoilt == 2


@pytest.mark.parametrize("what", ["get", "list"])
def test_an_answer_that_is_cut_is_no_answer(impatient: None, what: str) -> None:
    name = bucket()
    direct = open_artifacts(s3_url(name))
    for number in range(5):
        direct.put(f"p/{number}", b"x" * 5000)

    def cut(between: Between, kind: str, content: bytes) -> bytes | None:
        if kind == "answer" and between.requests[-1].startswith(b"GET"):
            between.spoilt += 1
            raise_after = content[: len(content) // 2]
            return raise_after if between.spoilt % 2 else None
        return content

    with Between(cut) as between:
        store = open_artifacts(s3_url(name, between.port))
        with pytest.raises(ArtifactsUnreachable):
            _ = store.get("p/1") if what == "get" else list(store.list("p/"))


@rows(
    ("status", "code", "error", "hint"),
    no_rights=(403, "AccessDenied", ArtifactsRefused, "s3:PutObject"),
    no_bucket=(404, "NoSuchBucket", ArtifactsRefused, "make the bucket"),
    expired=(400, "ExpiredToken", ArtifactsRefused, "renew"),
    slow_down=(503, "SlowDown", ArtifactsUnreachable, ""),
    broken=(500, "InternalError", ArtifactsUnreachable, ""),
    spoilt_on_the_way=(400, "BadDigest", ArtifactsDamaged, ""),
)
def test_each_refusal_of_a_server_is_told_apart(
    impatient: None, status: int, code: str, error: type[Exception], hint: str
) -> None:
    with answering(status, code) as port:
        store = open_artifacts(s3_url("bucket", port))
        for act in (lambda: store.put("a", b"1"), lambda: list(store.list("a/"))):
            with pytest.raises(error) as said:
                act()
            assert code in said.value.message  # type: ignore[attr-defined]
            assert hint in (said.value.hint or "")  # type: ignore[attr-defined]


def test_a_missing_bucket_and_a_server_that_is_away_are_told_apart(impatient: None) -> None:
    with pytest.raises(ArtifactsRefused, match="NoSuchBucket"):
        open_artifacts(s3_url("no-such-bucket")).get("a")
    with pytest.raises(ArtifactsUnreachable, match="cannot be reached"):
        open_artifacts(s3_url("bucket", 1)).get("a")


def test_a_server_that_does_not_answer_is_not_waited_for_without_end(impatient: None) -> None:
    with answering(200, "Slow", delay=3) as port:
        began = time.monotonic()
        with pytest.raises(ArtifactsUnreachable):
            open_artifacts(s3_url("bucket", port)).get("a")
    assert time.monotonic() - began < 20


def test_without_credentials_nothing_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ArtifactsRefused, match="no credentials"):
        open_artifacts(s3_url("bucket", moto())).put("a", b"1")


def test_a_folder_that_is_not_mounted_is_refused_and_not_made(tmp_path: Path) -> None:
    store = open_artifacts(f"file://{tmp_path}/share")
    for act in (lambda: store.put("a", b"1"), lambda: store.get("a"), lambda: list(store.list("a/"))):
        with pytest.raises(ArtifactsRefused, match="is not there"):
            act()
    assert not (tmp_path / "share").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


@ROOT.mark
def test_a_full_folder_is_refused_and_keeps_nothing_half(small_disk: Path, tmp_path: Path) -> None:
    store = open_artifacts(f"file://{small_disk}")
    store.put("a", b"1")
    with pytest.raises(ArtifactsRefused, match="No space left") as full:
        store.put("b", b"x" * (1 << 20))

    assert full.value.hint == "make room there"
    assert [path.name for path in small_disk.iterdir()] == ["a"]
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(ArtifactsRefused, match="Read-only"):
        store.put("c", b"1")


@rows(("make"), link=lambda path: path.symlink_to("/etc/passwd"), folder=lambda path: path.mkdir(), pipe=os.mkfifo)
def test_what_is_no_object_of_a_folder_is_not_read(tmp_path: Path, make: object) -> None:
    make(tmp_path / "a")  # type: ignore[operator]
    store = open_artifacts(f"file://{tmp_path}")

    with pytest.raises(ArtifactsDamaged, match="is no object"):
        store.get("a")
    assert list(store.list("")) == []
