"""Find the compiled programs of this installation, and verify that each is what was built."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

from msgspec import Struct

from runner.core.errors import ProviderFailed

FOLDER = Path(__file__).parents[1] / "guest" / "bin"


class Program(Struct, frozen=True):
    path: Path
    sha256: str


def find(name: str, folder: Path = FOLDER) -> Program | None:
    """Return the program ``name`` for this machine; ``None`` when this installation has none.

    Raises ``ProviderFailed`` for one that differs from what was recorded when it was built.
    """
    path = folder / f"{name}-{platform.machine()}"
    if not path.exists():
        return None
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    record = folder / "SHA256SUMS"
    if not record.exists() or f"{sha256}  {path.name}" not in record.read_text().splitlines():
        raise ProviderFailed(
            f"the {name} program `{path}` is not the one that was built",
            hint="install runner again; in a checkout, `make -B .venv/product`",
        )
    return Program(path, sha256)
