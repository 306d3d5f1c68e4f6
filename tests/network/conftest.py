"""What tests of the egress proxy share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.certificates import make_certificate


@pytest.fixture(scope="package")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a certificate of `a.test`, `b.test` and this host, with its key beside it."""
    names = "DNS:a.test,DNS:b.test,IP:127.0.0.1"
    return make_certificate(tmp_path_factory.mktemp("tls") / "server.pem", names)
