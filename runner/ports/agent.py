"""What an agent CLI's plug-in owes the engine: from a sub-runner's line to an outcome that can be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from runner.core.model import Command, Exit, Outcome, Usage
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

    def say(self, line: str) -> str | None:
        """What a line of its standard output, without its end, says to a person who watches; ``None`` for nothing.

        What does not end with a line break goes on in what the next line says. Whatever a terminal could obey is in it.
        """


@dataclass(frozen=True)
class Access:
    """How a CLI reaches its model. Without an ``address`` it goes to the provider itself.

    ``address`` is the base URL of its API, as ``RUNNER_*_URL`` have it; that of the gateway takes anything as ``key``.
    ``tools`` are the only ones that it may have, ``None`` for its own choice. ``workspace`` and ``home`` are
    directories inside.
    """

    model: str
    key: str = field(repr=False)
    address: str | None = None
    turns: int | None = None
    tools: tuple[str, ...] | None = None
    skills: tuple[str, ...] = ()
    workspace: str = "/workspace"
    home: str = "/home/agent"
    others: tuple[str, ...] = ()  # places beside these that its tools for files have to reach


@dataclass(frozen=True)
class Preparation:
    """What a CLI wants before it starts, inside its workspace.

    ``files`` are written for its user only, by their paths in the home directory; ``login`` is a command that gets
    the key by its standard input; ``env`` is added to the environment of both commands. ``context`` are the places
    in the home directory where it looks for what it is to know, each with the name of the file in ``runners/context``.
    """

    env: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)
    login: tuple[str, ...] = ()
    context: Mapping[str, str] = field(default_factory=dict)


@runtime_checkable
class ModelAgent(Agent, Protocol):
    """An agent that works with a model. ``program`` is the name of its CLI, and ``package`` npm's name of that.

    ``obeys`` are places in a repository with what its CLI would run by itself and cannot be told to leave.
    """

    @property
    def api(self) -> Api: ...

    @property
    def program(self) -> str: ...

    @property
    def package(self) -> str: ...

    @property
    def obeys(self) -> tuple[str, ...]: ...

    def prepare(self, access: Access) -> Preparation: ...

    def usage(self, ended: Ended) -> Usage | None:
        """What the CLI itself says that it used; ``None`` when it says nothing. Nobody has checked it."""

    def commands(self, ended: Ended) -> tuple[Command, ...]:
        """The shell commands that its model asked for, in order, as its stream has them; it may have been cut off."""

    def words(self, ended: Ended) -> str:
        """What its model said last, in one line, whatever the CLI itself complained of afterwards."""

    def keeps(self, path: str) -> bool:
        """Whether a file in the home directory, by its path there, is a transcript that the session's archive holds.

        Never one with a key, an environment, or what is no part of the conversation.
        """
