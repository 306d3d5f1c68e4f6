"""Distributions of others, as an installer leaves them: modules, and a ``dist-info`` directory with entry points."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install(
    site: Path, name: str, entry_points: Mapping[str, Mapping[str, str]], *, version: str = "1.0", **modules: str
) -> None:
    """``entry_points`` maps groups to names, and those to modules; ``modules`` maps names to their text."""
    for module, text in modules.items():
        (site / f"{module}.py").write_text(text)
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = (
        f"[{group}]\n" + "".join(f"{entry} = {module}\n" for entry, module in found.items())
        for group, found in entry_points.items()
    )
    (info / "entry_points.txt").write_text("".join(lines))
