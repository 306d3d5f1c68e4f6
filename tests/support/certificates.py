"""Certificates that vouch for themselves."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificate(file: Path, names: str) -> Path:
    """Write a certificate of ``names``, such as ``DNS:a.test,IP:127.0.0.1``, and its key beside it as ``.key``."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", f"/CN={names.partition(',')[0].partition(':')[2]}", "-addext", f"subjectAltName={names}",
         "-keyout", file.with_suffix(".key"), "-out", file],
        check=True, capture_output=True,
    )  # fmt: skip
    return file
