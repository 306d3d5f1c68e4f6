"""The guest program of this machine."""

from __future__ import annotations

from pathlib import Path

from runner.core import compiled_programs
from runner.core.compiled_programs import Program as Program
from runner.core.errors import ProviderFailed


def find(folder: Path = compiled_programs.FOLDER) -> Program:
    """Return the guest of this machine. Raises ``ProviderFailed`` if it is missing or not the one that was built."""
    program = compiled_programs.find("guest", folder)
    if program is None:
        hint = "install the wheel; in a checkout install gcc, then run `make -B .venv/product`"
        raise ProviderFailed("the guest program is missing: runner was installed without a C compiler", hint=hint)
    return program
