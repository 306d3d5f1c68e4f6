"""The guest program of this machine."""

from __future__ import annotations

from pathlib import Path

from runner import programs
from runner.programs import Program as Program


def find(folder: Path = programs.FOLDER) -> Program | None:
    """As ``programs.find``."""
    return programs.find("guest", folder)
