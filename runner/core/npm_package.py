"""npm packages that programs on this host belong to, and their versions, without running the program."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from runner.core.settings import shipped

_MAX_PARENTS = 3  # directories between a program and its package's own at most


def find_program(folders: Iterable[str], name: str) -> Path | None:
    """Return the first program of that name in the folders."""
    return next((Path(at) for folder in folders if os.access(at := f"{folder}/{name}", os.X_OK)), None)


def installed_version(program: Path, package: str) -> str:
    """Return the version of the npm package that a program belongs to; empty when it belongs to another, or none."""
    for folder in list(program.resolve().parents)[:_MAX_PARENTS]:
        found = _json_of(folder / "package.json")
        if found.get("name") == package:
            return str(found.get("version", ""))
    return ""


def pinned_version(package: str) -> str:
    """Return the version of a package that this runner is tested with; empty for a CLI of another distribution."""
    return str(_json_of(shipped("runners") / "image" / "package.json")["dependencies"].get(package, ""))


def installable(package: str) -> str:
    """Return the name to install a package by, in the tested version if there is one."""
    return f"{package}@{pin}" if (pin := pinned_version(package)) else package


def _json_of(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
