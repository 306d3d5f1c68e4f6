"""The wheel of this checkout, as users have it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def built_wheel(folder: Path) -> Path:
    """Build this machine's into a directory, and unpack it there; where its packages are."""
    return unpack(make_wheel(folder, platform.machine()), folder / "site")


def make_wheel(folder: Path, machine: str) -> Path:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, env={**os.environ, "WHEEL_MACHINE": machine}, check=True, capture_output=True)
    [wheel] = folder.glob(f"*{machine}.whl")
    return wheel


def unpack(wheel: Path, site: Path) -> Path:
    """Put the files of a wheel where an installer would, with their modes."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            path = Path(archive.extract(member, site))
            path.chmod((member.external_attr >> 16) & 0o777 or 0o644)
    return site
