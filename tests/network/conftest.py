"""What tests of the egress proxy share."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="package")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a certificate of `a.test`, `b.test` and this host, with its key beside it."""
    file = tmp_path_factory.mktemp("tls") / "server.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=a.test", "-addext", "subjectAltName=DNS:a.test,DNS:b.test,IP:127.0.0.1",
         "-keyout", str(file.with_suffix(".key")), "-out", str(file)],
        check=True, capture_output=True,
    )  # fmt: skip
    return file
