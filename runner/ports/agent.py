"""What an agent CLI's plug-in owes the engine: from a sub-runner's line to an outcome that can be trusted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from runner.model import Exit, Outcome


@dataclass(frozen=True)
class Ended:
    """What is left of an agent step to be judged: its exit, and its output as files on the host."""

    exit: Exit
    stdout: Path
    stderr: Path


class Agent(Protocol):
    def judge(self, ended: Ended) -> Outcome:
        """Rule on a finished agent step from its own transcript. Exit 0 proves nothing."""
