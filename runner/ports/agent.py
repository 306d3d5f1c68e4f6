"""The agent port: what the plug-in of an agent CLI implements, from its set-up to an outcome that can be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from msgspec import Struct

from runner.core.model import Command, Exit, Outcome, Usage
from runner.core.settings import Confidential
from runner.ports.gateway import Api


class AgentResult(Struct, frozen=True):
    """The end of an agent's command: its exit, and its output as files on the host."""

    exit: Exit
    stdout: Path
    stderr: Path


class Agent(Protocol):
    def outcome(self, result: AgentResult) -> Outcome:
        """Return the outcome of an agent step, judged by the agent's own transcript. Exit 0 proves nothing."""

    def display(self, line: str) -> str | None:
        """Return what a person who watches is shown of a line of standard output; ``None`` for nothing.

        ``line`` has no line break. A text without one at its end is continued by the next. Control characters are not
        removed.
        """


class McpAccess(Struct, frozen=True, kw_only=True):
    """An MCP server that a CLI may use, by streamable HTTP at ``url``; a call takes at most ``timeout_seconds``."""

    name: str
    url: str
    timeout_seconds: float
    tools: tuple[str, ...] = ()


class ModelAccess(Confidential, frozen=True, kw_only=True):
    """The model of a CLI and how to reach it. Without a ``base_url`` the CLI talks to the provider itself.

    ``base_url`` is that of its API, as in ``RUNNER_*_URL``; the gateway takes any ``key``. ``tools`` are the only
    ones that the CLI may use, ``None`` for its own choice. ``workspace`` and ``home`` are directories in the sandbox.
    """

    model: str
    key: str
    base_url: str | None = None
    max_turns: int | None = None
    tools: tuple[str, ...] | None = None
    skills: tuple[str, ...] = ()
    workspace: str = "/workspace"
    home: str = "/home/agent"
    mcp_servers: tuple[McpAccess, ...] = ()
    extra_directories: tuple[str, ...] = ()  # further ones that its file tools must be able to read


class AgentSetup(Struct, frozen=True, kw_only=True):
    """The preparation of a CLI inside its workspace, before it starts.

    ``files`` are written for its user only, by their paths in the home directory; ``login`` is a command that gets
    the key on standard input; ``env`` is added to the environment of both commands. ``context`` maps paths in the
    home directory, where the CLI looks for context, to the names of files in ``runners/context``; it looks for skills
    in ``skill_folders``.
    """

    env: Mapping[str, str]
    files: Mapping[str, str] = {}
    login: tuple[str, ...] = ()
    context: Mapping[str, str] = {}
    skill_folders: tuple[str, ...] = (".claude/skills", ".agents/skills")


@runtime_checkable
class ModelAgent(Agent, Protocol):
    """An agent that works with a model. ``program`` is the name of its CLI, and ``package`` the npm package.

    ``autorun_paths`` are those in a repository from which its CLI runs code, which no setting can prevent. ``tools``
    are the CLI's own tools by name, if it can be told which to have, and ``writers`` those that write files.
    ``native_names`` are its names for tools that triage calls otherwise. ``variables`` are prefixes of what the CLI
    reads from its environment; ``model_variable`` is the one that names the model of a triage. ``image_files`` maps
    places in the home directory of the agents' image to files in ``runners/context``.
    """

    @property
    def api(self) -> Api: ...

    @property
    def program(self) -> str: ...

    @property
    def package(self) -> str: ...

    @property
    def autorun_paths(self) -> tuple[str, ...]: ...

    @property
    def tools(self) -> tuple[str, ...]: ...

    @property
    def writers(self) -> tuple[str, ...]: ...

    @property
    def native_names(self) -> Mapping[str, str]: ...

    @property
    def variables(self) -> tuple[str, ...]: ...

    @property
    def model_variable(self) -> str | None: ...

    @property
    def image_files(self) -> Mapping[str, str]: ...

    def set_up(self, access: ModelAccess) -> AgentSetup: ...

    def usage(self, result: AgentResult) -> Usage | None:
        """Return the usage that the CLI reports, which is not checked; ``None`` when it reports none."""

    def commands(self, result: AgentResult) -> tuple[Command, ...]:
        """List the shell commands that its model asked for, in order, as far as its stream goes."""

    def last_message(self, result: AgentResult) -> str:
        """Return the last message of its model in one line, whatever errors the CLI printed afterwards."""

    def is_transcript(self, path: str) -> bool:
        """Tell whether a file, by its path in the home directory, belongs into the archive of the session.

        Never one with a key, an environment, or anything beside the conversation.
        """
