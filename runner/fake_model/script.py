"""Read the script of a rehearsal; ``runner.manifest.model_script`` has its form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.core.errors import Rejected
from runner.manifest import text
from runner.manifest.load import load_value
from runner.manifest.model_script import Call, Fail, Script, Turn, Used, Write

__all__ = ["Call", "Fail", "Script", "Turn", "Used", "Write", "read_turns"]


def read_turns(path: Path) -> Sequence[Turn]:
    """Read the turns of a file. Raises ``Rejected`` with every finding, and the errors of reading a file."""
    script, findings = load_value(Script, str(path), text.read(path, str(path)))
    if script is None:
        raise Rejected(findings)
    return script.turns
