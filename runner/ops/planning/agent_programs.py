"""Programs of agents on this host: where their user has them, and whether docker can be used instead."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

import runner.agents
import runner.providers
from runner.core import plugins
from runner.core.settings import Settings
from runner.ops.planning.facts import open_provider
from runner.ops.planning.programs import find_program, linked_directories, search_path

_OF_CLUSTERS = ("kubectl", "helm")


def find_agent(agent: str, settings: Settings, *, cluster: bool) -> tuple[str, ...] | None:
    """Return the directories that show an agent's program, and with ``cluster`` kubectl and helm, to a workspace.

    Empty where every workspace sees them; ``None`` where the user has no such agent. Raises ``UsageError`` for a
    program without its interpreter.
    """
    home, folders = _home(settings), search_path(settings.variables)
    names = (plugins.load(runner.agents, agent).agent.program, *(_OF_CLUSTERS if cluster else ()))
    first, *others = (find_program(name, folders, home) for name in names)
    if first is None:
        return None
    programs = [first, *(program for program in others if program is not None)]
    places = (place for program in programs for place in linked_directories(program, folders, home))
    return tuple(dict.fromkeys(places))


def has_cli(agent: str, settings: Settings) -> bool:
    """Tell whether the user has the program of an agent where a workspace can be shown it."""
    program = plugins.load(runner.agents, agent).agent.program
    return find_program(program, search_path(settings.variables), _home(settings)) is not None


def _home(settings: Settings) -> Path:
    return Path(settings.variables.get("HOME") or "/nonexistent")


def shows_host(provider: str) -> bool:
    """Tell whether commands of a provider see this host's own system, without importing a built-in one."""
    return bool(plugins.fact(runner.providers, provider, "SHOWS_HOST", False))


def is_open(places: Sequence[str]) -> bool:
    """Tell whether an unprivileged user, as in root's workspaces, can enter the directories."""
    folders = (folder for place in places for folder in (Path(place), *Path(place).parents))
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in folders)


async def docker_answers(settings: Settings) -> bool:
    """Tell whether this user can use docker."""
    socket = settings.docker_host.removeprefix("unix://")
    if socket.startswith("/") and not os.access(socket, os.R_OK | os.W_OK):
        return False  # without its client, which takes half a second to load
    return (await open_provider("docker", settings).probe()).available


def install_hint(agent: str) -> str:
    """Say how to install an agent's program where it is found."""
    found = plugins.load(runner.agents, agent).agent
    name = found.package.rpartition("/")[2]
    link = (
        f" && ln -s {name} $(npm prefix -g)/bin/{found.program}" if name.startswith(f"{found.program}-binary") else ""
    )
    return f"npm install -g {found.package}{link}, or --toolchain DIR, with the agent's CLI in DIR/bin"
