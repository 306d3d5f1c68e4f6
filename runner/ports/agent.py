"""What an agent CLI's plug-in owes the engine: from a sub-runner's line to an outcome that can be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from runner.model import Exit, Outcome, Usage
from runner.ports.gateway import Api


@dataclass(frozen=True)
class Ended:
    """What is left of an agent step to be judged: its exit, and its output as files on the host."""

    exit: Exit
    stdout: Path
    stderr: Path


class Agent(Protocol):
    def judge(self, ended: Ended) -> Outcome:
        """Rule on a finished agent step from its own transcript. Exit 0 proves nothing."""


@dataclass(frozen=True)
class Access:
    """How a CLI reaches its model. Without an ``address`` it goes to the provider itself.

    ``address`` is ``http://HOST:PORT``, and ``key`` then no more than what stands where a key is wanted.
    """

    model: str
    key: str = field(repr=False)
    address: str | None = None
    turns: int | None = None


@dataclass(frozen=True)
class Preparation:
    """What a CLI wants before it starts, inside its workspace.

    ``files`` are written for its user only, by their paths in the home directory; ``login`` is a command that gets
    the key by its standard input; ``env`` is added to the environment of both commands.
    """

    env: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)
    login: tuple[str, ...] = ()


@runtime_checkable
class ModelAgent(Agent, Protocol):
    """An agent that works with a model. ``program`` is the name of its CLI."""

    @property
    def api(self) -> Api: ...

    @property
    def program(self) -> str: ...

    def prepare(self, access: Access) -> Preparation: ...

    def usage(self, ended: Ended) -> Usage | None:
        """What the CLI itself says that it used; ``None`` when it says nothing. Nobody has checked it."""
