"""Plans: what a run will do, complete and frozen. Equal inputs give equal bytes and so an equal digest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from hashlib import sha256
from pathlib import Path
from typing import Literal

from runner.model import IsolationClass, Limits
from runner.plan.graph import Graph

FORMAT = "runner/plan/v1"  # minor additions keep it; a reader refuses any other

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None


@dataclass(frozen=True)
class Step:
    """One node. ``body`` is the frozen value of the step's kind; ``origin`` the manifest line that asked for it.

    ``when``: ``success`` runs after needs that all succeeded, ``ended`` after needs that ran at all.
    """

    id: str
    kind: str
    what: str
    phase: Literal["work", "settle"]
    needs: tuple[str, ...]
    deadline_seconds: float
    origin: str
    body: object
    when: Literal["success", "ended"] = "success"
    network: str = "none"


@dataclass(frozen=True)
class RunPlan:
    """One run. ``notes`` are defaults that the chosen providers cannot enforce, in words for a person;
    ``values`` is what templates may name besides ``run``."""

    name: str
    origin: str
    providers: tuple[str, ...]
    isolation: IsolationClass
    limits: Limits
    commit: str | None
    deadline_seconds: float
    stop_budget_seconds: float
    policies: tuple[str, ...]
    notes: tuple[str, ...]
    values: Mapping[str, object]
    steps: tuple[Step, ...]

    def phase(self, phase: str) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.phase == phase)


@dataclass(frozen=True)
class Plan:
    digest: str
    runs: tuple[RunPlan, ...]

    def document(self) -> Json:
        """The JSON face, with its format first for readers to check."""
        return {"format": FORMAT, "digest": self.digest, "runs": plain(self.runs)}


def graph_of(steps: tuple[Step, ...]) -> Graph:
    """The graph of some steps; needs on steps outside are dropped, since those ended in an earlier phase."""
    inside = {step.id for step in steps}
    return Graph({step.id: [need for need in step.needs if need in inside] for step in steps})


def plain(value: object) -> Json:  # one return a shape
    """The JSON shape of a frozen value: dataclasses by field, tuples as lists, sets sorted, enums by their word."""
    if isinstance(value, IsolationClass):
        return value.word
    if value is None or isinstance(value, str | int | float | bool):
        return value.value if isinstance(value, Enum) else value
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, frozenset | set):
        return sorted((plain(item) for item in value), key=repr)
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def canonical(value: object) -> bytes:
    """One spelling for one value: sorted keys, no white space, UTF-8."""
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest(value: object) -> str:
    return "sha256:" + sha256(canonical(value)).hexdigest()
