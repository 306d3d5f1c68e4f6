"""How a PostgreSQL server is reached: TLS that names it, files of passwords, and passwords that live for a minute."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.core.errors import StoreFailed
from runner.core.settings import Settings
from runner.events import events as ev
from runner.store import open_store
from tests.support.needs import OPENSSL, POSTGRES

if POSTGRES.missing is None:
    from runner.store import _password
    from tests.support import postgres

pytestmark = [POSTGRES.mark, OPENSSL.mark]
SHARED = pytest.mark.scenario("BEY-20", only="several hosts share one PostgreSQL store")
STARTED = ev.RunStarted(name="fix", plan="sha256:1", runner="0.1.0", steps={}, deadline_seconds=60.0)


def certificate(folder: Path, name: str) -> None:
    """An authority of its own, and a certificate for a host, in ``NAME.crt`` and ``NAME.key``."""
    made = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    words = (*made, "-keyout", f"{name}.key", "-out", f"{name}.crt", "-subj", f"/CN={name}")
    subprocess.run(
        ["openssl", *words, "-addext", f"subjectAltName=DNS:{name}"], cwd=folder, check=True, capture_output=True
    )


@pytest.fixture(scope="module")
def secured() -> Iterator[postgres.Server]:
    """A server that takes nothing over TCP but TLS with a password, of the role ``team``."""
    with postgres.running() as server:
        data = server.folder / "data"
        certificate(server.folder, "localhost")
        certificate(server.folder, "elsewhere")
        for name in ("localhost.crt", "localhost.key"):
            shutil.copy(server.folder / name, data)
            os.chmod(data / name, 0o600)
            if os.geteuid() == 0:
                shutil.chown(data / name, "postgres", "postgres")
        server.execute("CREATE ROLE team LOGIN PASSWORD 'first'")
        server.execute("CREATE DATABASE runner OWNER team")
        for setting in ("ssl = on", "ssl_cert_file = 'localhost.crt'", "ssl_key_file = 'localhost.key'"):
            server.execute(f"ALTER SYSTEM SET {setting}")
        rules = "host all postgres 127.0.0.1/32 trust\nhostssl all all 127.0.0.1/32 scram-sha-256\n"
        (data / "pg_hba.conf").write_text(rules)
        server.restart()
        yield server


def url(server: postgres.Server, **options: str) -> str:
    words = {"sslmode": "verify-full", "sslrootcert": str(server.folder / "localhost.crt"), **options}
    return f"postgresql://team@localhost:{server.port}/runner?" + "&".join(f"{k}={v}" for k, v in words.items())


async def write(url: str) -> None:
    async with open_store(url) as store:
        if not await store.events("a"):
            await store.append("a", [STARTED])


@pytest.mark.nightly
@SHARED
async def test_a_server_is_known_by_its_certificate_and_its_name(
    secured: postgres.Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The password is in a file that only its owner reads."""
    (tmp_path / "passwords").write_text("localhost:*:runner:team:first\n127.0.0.1:*:runner:team:first\n")
    (tmp_path / "passwords").chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(tmp_path / "passwords"))

    await write(url(secured))

    encrypted = secured.execute("SELECT count(*) FROM kb.runs", "runner")
    assert encrypted == [(1,)]
    for wrong, words in (
        (url(secured, sslrootcert=str(secured.folder / "elsewhere.crt")), "certificate verify failed"),
        (url(secured).replace("@localhost", "@127.0.0.1"), "does not match host name"),
        (url(secured, sslmode="disable"), "no pg_hba.conf entry"),
    ):
        with pytest.raises(StoreFailed, match=words) as refused:
            await write(wrong)
        assert "first" not in refused.value.message
    (tmp_path / "passwords").chmod(0o644)
    with pytest.raises(StoreFailed, match="no password supplied"):
        await write(url(secured))


@SHARED
@pytest.mark.parametrize("kept", [0.0, 3600.0], ids=["each connection asks", "kept until it is refused"])
async def test_a_password_is_printed_by_a_command_and_asked_for_anew_when_it_has_changed(
    secured: postgres.Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: float
) -> None:
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "count").touch()
    (tmp_path / "print").write_text(f"#!/bin/sh\necho >>{tmp_path}/count\ncat {tmp_path}/token\n")
    (tmp_path / "print").chmod(0o755)
    env = {"RUNNER_DATABASE_URL": url(secured), "RUNNER_DATABASE_PASSWORD_COMMAND": f"{tmp_path}/print 'a b'"}
    settings = Settings.from_env({"RUNNER_HOME": str(tmp_path), **env})
    run = f"kept-{kept}"
    monkeypatch.setattr(_password, "KEPT", kept)

    async with open_store(settings.store_url) as store:
        await store.append(run, [STARTED])
        secured.execute("ALTER ROLE team PASSWORD 'second'")
        (tmp_path / "token").write_text("second\n")
        secured.restart()
        await store.append(run, [ev.WarningIssued("x.y", "after it")])

        assert len(await store.events(run)) == 2
    assert len((tmp_path / "count").read_text()) >= 2
    shown = dict((name, value) for name, value, _ in settings.rows())
    assert shown["RUNNER_DATABASE_PASSWORD_COMMAND"] == f"{tmp_path}/print ..."
    secured.execute("ALTER ROLE team PASSWORD 'first'")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("false", "it ended with 1"),
        ("true", "did not print one line"),
        ("printf 'a\\nb'", "did not print one line"),
        ("/none/such", "cannot be started"),
        ("echo 'open", "No closing quotation"),
        ("  ", "it is empty"),
    ],
)
async def test_a_command_without_a_password_is_said_and_nothing_that_it_printed(
    secured: postgres.Server, tmp_path: Path, command: str, words: str
) -> None:
    env = {"RUNNER_DATABASE_URL": url(secured), "RUNNER_DATABASE_PASSWORD_COMMAND": command}
    settings = Settings.from_env({"RUNNER_HOME": str(tmp_path), **env})

    with pytest.raises(StoreFailed, match=words):
        await write(settings.store_url)
