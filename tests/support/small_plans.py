"""Plans that nobody compiled: a run of a few steps, and what a test does not speak of left empty."""

from __future__ import annotations

from typing import Any

from runner.core.model import IsolationClass, Limits
from runner.plan.model import RunPlan, Step


def small_step(id: str, *needs: str, **more: Any) -> Step:
    """A step of a second's work; its kind is its id."""
    given = {"kind": id, "what": "", "phase": "work", "deadline_seconds": 1.0, "origin": "", **more}
    return Step(id=id, needs=needs, **given)


def small_run(name: str, *steps: Step, **more: Any) -> RunPlan:
    """A run that is alone in its group, with ``local`` as its provider and a second for everything."""
    times = {"deadline_seconds": 1.0, "stop_budget_seconds": 1.0}
    places = {"providers": ("local",), "isolation": IsolationClass.NONE, "limits": Limits(), "commit": None}
    empty = {"needs": (), "max_parallel": None, "outputs": {}, "origin": "", "policies": (), "notes": (), "values": {}}
    return RunPlan(**{"name": name, "group": name, "steps": steps, **times, **places, **empty, **more})
