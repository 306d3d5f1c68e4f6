"""The agent that a check judges."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runner.core import plugins
from runner.ports.agent import Agent

ROOM = "runner.agents"


@dataclass(frozen=True, kw_only=True)
class AgentCandidate:
    """An agent that the suite judges, by its registered name.

    ``finished`` is the output of its CLI for a turn that was completed; without it less can be checked. For an agent
    of another distribution it is ``NAME-finished.jsonl`` beside the module.
    """

    name: str
    finished: Path | None = None

    def load(self) -> Agent:
        found: Agent = plugins.load(ROOM, self.name).agent
        return found


def registered_agents() -> list[AgentCandidate]:
    return [_candidate(name) for name in plugins.registered(ROOM)]


def _candidate(name: str) -> AgentCandidate:
    folder = None if plugins.problem_of(ROOM, name) else plugins.beside(ROOM, name)
    place = folder / f"{name}-finished.jsonl" if folder else None
    return AgentCandidate(name=name, finished=place if place and place.exists() else None)
