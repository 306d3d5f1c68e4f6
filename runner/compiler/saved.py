"""Read the runs of a plan document back as they were compiled."""

from __future__ import annotations

from importlib import import_module

from msgspec.structs import replace

import runner.steps
from runner.core import plugins
from runner.core.codec import typed
from runner.plan.model import NoBody, RunPlan, Step


def read_runs(document: object) -> tuple[RunPlan, ...]:
    """Return the runs in the JSON form of ``run_document``. Raises ``ValueError`` for those of another version."""
    runs = typed(document, tuple[RunPlan, ...])
    return tuple(replace(run, steps=tuple(map(_step, run.steps))) for run in runs)


def _step(step: Step) -> Step:
    if step.kind not in plugins.names(runner.steps):
        raise ValueError(f"`{step.kind}` is not a kind of step")
    module = import_module(f"runner.steps.{step.kind}.plan")
    return replace(step, body=typed(step.body, getattr(module, "BODY", NoBody)))
