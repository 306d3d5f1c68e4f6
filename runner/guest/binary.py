"""The guest program of this machine."""

from __future__ import annotations

from pathlib import Path

from runner.core import compiled_programs
from runner.core.compiled_programs import Program as Program


def find(folder: Path = compiled_programs.FOLDER) -> Program | None:
    return compiled_programs.find("guest", folder)
