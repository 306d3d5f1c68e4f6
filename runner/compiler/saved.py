"""Read the runs of a plan document back as they were compiled."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib import import_module

from msgspec.structs import replace

import runner.steps
from runner.compiler.passes import in_phases, needs_of, step_kinds
from runner.core import plugins
from runner.core.codec import typed
from runner.core.ids import is_name
from runner.core.sanitize import excerpt
from runner.plan.graph import Graph
from runner.plan.model import NoBody, RunPlan, Step

_MEMBER = re.compile(r"[a-z0-9][a-z0-9-]*(\.[a-z0-9-]+)*")  # a run's name, or that of a member of a matrix
_ALWAYS = frozenset({"lease", "provision", "agent", "scan", "save", "teardown", "release"})  # in every run


def read_runs(document: object, *, place: Callable[[str], str] = str) -> tuple[RunPlan, ...]:
    """Return the runs in the JSON form of ``run_document``; ``place`` may give a path another place.

    Raises ``ValueError`` for those of another version.
    """
    runs = typed(document, tuple[RunPlan, ...], place=place)
    return tuple(replace(run, steps=tuple(_step(step, place) for step in run.steps)) for run in runs)


def _step(step: Step, place: Callable[[str], str]) -> Step:
    if step.kind not in plugins.names(runner.steps):
        raise ValueError(f"`{excerpt(step.kind)}` is not a kind of step")
    module = import_module(f"runner.steps.{step.kind}.plan")
    return replace(step, body=typed(step.body, getattr(module, "BODY", NoBody), place=place))


def run_faults(runs: tuple[RunPlan, ...]) -> Iterator[str]:
    """Yield what compiling would not have given, in words: names, steps and their order. Raises ``Cycle``."""
    names = {run.name for run in runs}
    if len(names) < len(runs) or any(need not in names for run in runs for need in run.needs):
        yield "its runs need each other by other names than theirs"
        return
    Graph({run.name: run.needs for run in runs}).order()
    for run in runs:
        if not is_name(run.group) or not _MEMBER.fullmatch(run.name):
            yield f"`{excerpt(run.name)}` is not the name of a run"
        if not _compiled(run):
            yield f"run `{excerpt(run.name)}` does not have the steps of a run in their order"


def _compiled(run: RunPlan) -> bool:
    """Tell whether steps and needs are those that compiling gives."""
    steps = {step.kind: step for step in run.steps}
    present: list[str] = []
    for kind in step_kinds():
        if kind in steps:
            if steps[kind].id != kind or steps[kind].needs != needs_of(kind, *present):
                return False
            present.append(kind)
    return steps.keys() >= _ALWAYS and run.steps == in_phases(steps[kind] for kind in present)
