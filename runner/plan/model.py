"""Plans: what a run will do, complete and frozen. Equal inputs give equal bytes and so an equal digest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, cast

from runner.core.model import IsolationClass, Limits
from runner.plan.graph import Graph

FORMAT = "runner/plan/v1"  # minor additions keep it; a reader refuses any other

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None


BUILT_IN = "built-in"  # the origin of what nobody can choose
DEFAULTS = "defaults"  # the origin of what manifests/defaults decides


@dataclass(frozen=True, slots=True)
class PlannedMount:
    """A path that the commands of a step see; ``/workspace`` holds those that are relative."""

    path: str
    writable: bool
    origin: str


@dataclass(frozen=True, slots=True)
class SecretGrant:
    """A secret, by its name, that the commands of a step get: as a variable or, ``as_file``, as a file in memory."""

    name: str
    as_file: bool
    origin: str


@dataclass(frozen=True, slots=True)
class NoBody:
    """The body of a step kind that has no parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One node. ``body`` is the frozen value of the step's kind; ``origin`` the manifest line that asked for it.

    ``when``: ``success`` runs after needs that all succeeded, ``ended`` after needs that ran at all.
    ``repeated_on_fallback`` steps run again with each provider of the chain. ``post_agent`` steps follow an agent that
    has started, whatever becomes of it: when work ends before them, finalize begins with them.
    """

    id: str
    kind: str
    what: str
    phase: Literal["work", "finalize"]
    needs: tuple[str, ...]
    deadline_seconds: float
    origin: str
    body: object = NoBody()
    when: Literal["success", "ended"] = "success"
    network: str = "none"
    mounts: tuple[PlannedMount, ...] = ()
    secrets: tuple[SecretGrant, ...] = ()
    repeated_on_fallback: bool = False
    post_agent: bool = False


@dataclass(frozen=True)
class PlannedCluster:
    """The cluster that commands of a run can ask, and what for. ``plug_in`` is what is run for the credential."""

    context: str
    server: str
    namespace: str
    access: str
    plug_in: str = ""


@dataclass(frozen=True)
class RunPlan:
    """One run. ``notes`` are defaults that the chosen providers cannot enforce, in words for a person;
    ``values`` is what templates may name besides ``run``. ``needs`` are names of runs that come first,
    ``group`` is shared by the members of a matrix, of which ``max_parallel`` run at once; ``outputs`` maps
    names to files in the run's output directory. ``origins`` maps features, ``policy NAME`` and ``timeouts.STEP``
    to the manifest lines that decided them. ``image`` is the id of what ``base_image`` means.
    ``host_network`` are those of the providers that leave commands the network of this host. ``cost_usd`` is what its
    model may cost, ``None`` if nobody has said."""

    name: str
    group: str
    needs: tuple[str, ...]
    max_parallel: int | None
    outputs: Mapping[str, str]
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
    origins: Mapping[str, str] = field(default_factory=dict)
    base_image: str | None = None
    image: str | None = None
    cluster: PlannedCluster | None = None
    host_network: tuple[str, ...] = ()
    cost_usd: float | None = 0.0

    def phase(self, phase: str) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.phase == phase)

    def worst_case(self) -> tuple[tuple[str, ...], float]:
        """The steps that may take longest after each other, and the seconds after which the run is over for sure."""
        work, seconds = _longest(self.phase("work"), len(self.providers))
        finalize, more = _longest(self.phase("finalize"))
        return (*work, *finalize), min(seconds, self.deadline_seconds) + min(more, self.stop_budget_seconds)


@dataclass(frozen=True)
class Plan:
    """``open``: made without a look outside, so that commits are not pinned and providers not probed.

    ``max_cost_usd`` is the ceiling of all runs together, if one was asked for; the runs' own never add up to more.
    """

    digest: str
    runs: tuple[RunPlan, ...]
    open: bool = False
    max_cost_usd: float | None = None

    def document(self) -> dict[str, Json]:
        """The JSON face, with its format first for readers to check."""
        runs: list[Json] = [run_document(run) for run in self.runs]
        return {
            "format": FORMAT,
            "digest": self.digest,
            "open": self.open,
            "worst_seconds": self.worst_case()[1],
            "max_cost_usd": self.max_cost_usd,
            "runs": runs,
        }

    def worst_case(self) -> tuple[tuple[str, ...], float]:
        """The runs that may take longest after each other, and the seconds after which all are over for sure.

        Waiting for a place among all runs of this host is not counted.
        """
        needs = {run.name: list(run.needs) for run in self.runs}
        weights = {run.name: run.worst_case()[1] for run in self.runs}
        groups: dict[str, list[RunPlan]] = {}
        for run in self.runs:
            groups.setdefault(run.group, []).append(run)
        for members in groups.values():
            if (room := members[0].max_parallel) is not None:
                slowest = max(weights[run.name] for run in members)
                weights |= {run.name: slowest for run in members}
                for earlier, later in zip(members, members[room:], strict=False):
                    needs[later.name].append(earlier.name)
        return Graph(needs).longest(weights)


def run_document(run: RunPlan) -> dict[str, Json]:
    """One run as JSON: its fields, and what follows from them."""
    path, seconds = run.worst_case()
    return {**plain_fields(run), "critical_path": list(path), "worst_seconds": seconds}


def graph_of(steps: tuple[Step, ...]) -> Graph:
    """The graph of some steps; needs on steps outside are dropped, since those ended in an earlier phase."""
    inside = {step.id for step in steps}
    return Graph({step.id: [need for need in step.needs if need in inside] for step in steps})


def _longest(steps: tuple[Step, ...], providers: int = 1) -> tuple[tuple[str, ...], float]:
    times = {step.id: providers if step.repeated_on_fallback else 1 for step in steps}
    return graph_of(steps).longest({step.id: times[step.id] * step.deadline_seconds for step in steps})


_AS_IS = frozenset({str, int, float, bool, type(None)})


def plain(value: object) -> Json:
    """The JSON shape of a frozen value: dataclasses by field, tuples as lists, sets sorted, enums by their word.

    Raises ``TypeError`` for a value that has none. Plans of 100,000 steps pass through here: what to do with a type
    is decided once, and most leaves are seen without a call.
    """
    return _shape(type(value))(value)  # type: ignore[arg-type]  # a class is hashable


def plain_fields(value: object) -> dict[str, Json]:
    """A frozen dataclass as a JSON object. Raises ``TypeError`` for anything else."""
    names, read = _fields(type(value))  # type: ignore[arg-type]  # a class is hashable
    return {name: item if type(item) in _AS_IS else plain(item) for name, item in zip(names, read(value), strict=True)}


def _plain_items(value: Iterable[Any]) -> Json:
    return [item if type(item) in _AS_IS else plain(item) for item in value]


def _plain_mapping(value: Mapping[Any, Any]) -> Json:
    return {
        key if type(key) is str else str(plain(key)): item if type(item) in _AS_IS else plain(item)
        for key, item in value.items()
    }


@cache
def _shape(kind: type) -> Callable[[Any], Json]:
    """Return the function that turns values of a type into JSON."""
    shapes: tuple[tuple[type, Callable[[Any], Json]], ...] = (
        (IsolationClass, lambda value: str(value.word)),
        (Enum, lambda value: cast(Json, value.value)),
        (Mapping, _plain_mapping),
        (tuple, _plain_items),
        (list, _plain_items),
        (frozenset, lambda value: sorted((plain(item) for item in value), key=repr)),
        (Path, str),
    )
    if kind in _AS_IS:
        return lambda value: cast(Json, value)
    return next((shape for base, shape in shapes if issubclass(kind, base)), plain_fields)


@cache
def _fields(kind: type) -> tuple[tuple[str, ...], Callable[[object], tuple[Any, ...]]]:
    """The names of a dataclass's fields, and what reads all of them at once."""
    if not is_dataclass(kind):
        raise TypeError(f"{kind.__name__} has no JSON form")
    names = tuple(f.name for f in fields(kind))
    return names, _reader(names)


@cache
def _form(kind: type) -> tuple[str, Callable[[object], tuple[Any, ...]]]:
    """A dataclass as JSON with sorted keys and a ``%s`` for each field, and what reads the fields in that order."""
    names = tuple(sorted(_fields(kind)[0]))
    return "{" + ",".join(f'"{name}":%s' for name in names) + "}", _reader(names)


def _reader(names: tuple[str, ...]) -> Callable[[object], tuple[Any, ...]]:
    if len(names) < 2:
        return lambda value: tuple(getattr(value, name) for name in names)
    return attrgetter(*names)


_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode


def canonical(value: object) -> bytes:
    """One spelling for one value: ``plain`` as JSON with sorted keys, no white space, UTF-8.

    Written without making the plain form of dataclasses and lists, and what many of them share only once.
    """
    return _text(value, {}).encode()


def _text(value: Any, known: dict[int, str]) -> str:
    """``known`` has texts by identity, which is safe while the value that is written holds all that is in it."""
    kind: Any = type(value)
    shape = _shape(kind)
    if shape is plain_fields:
        form, read = _form(kind)
        made = form % tuple([known.get(id(item)) or _text(item, known) for item in read(value)])
    elif shape is _plain_items:
        made = "[" + ",".join([known.get(id(item)) or _text(item, known) for item in value]) + "]"
    else:
        made = _encode(shape(value))
    known[id(value)] = made
    return made


def digest(value: object) -> str:
    return "sha256:" + sha256(canonical(value)).hexdigest()
