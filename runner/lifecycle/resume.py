"""Decide which steps of a run that ended early run again, and why. Pure.

A run saves its tree as ``scan`` found it; trees between two steps are not kept. So the steps before the scan are reused
together, or none of them; the steps after it work on that tree, and are reused one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import takewhile

from msgspec import Struct

from runner.core.model import Status
from runner.events.record import StepRecord
from runner.plan.keys import Keys, differences
from runner.plan.model import RunPlan, Step

SCAN = "scan"


class Earlier(Struct, frozen=True):
    """The run that is continued. ``lacking`` says why its work cannot be continued, if it cannot."""

    run: str
    keys: Keys
    steps: Mapping[str, StepRecord]
    lacking: str | None = None


class Decided(Struct, frozen=True):
    """The decision on one step: ``run`` performed it, if it is reused; ``None`` if it runs again."""

    step: str
    run: str | None
    reason: str


def decide(plan: RunPlan, keys: Keys, anew: Collection[str], earlier: Earlier) -> tuple[Decided, ...]:
    """Decide on each step of the work phase, in plan order; steps ``anew`` always run again, since their effects end
    with the workspace."""
    steps = plan.phase("work")
    changed = {step.id: words for step in steps if (words := _changed(step, keys, earlier))}
    again: dict[str, str] = {}  # why, of the steps that could be taken over

    def look(step: Step) -> None:
        if step.id not in anew and (why := _why(step, changed, again, earlier)):
            again[step.id] = why

    before = _before_scan(steps)
    for step in before:
        look(step)
    together = [step.id for step in before if step.id not in anew]
    if cause := next((step for step in together if step in again), None):
        again |= {step: f"{cause} runs again, and needs it" for step in together if step not in again}
    elif lacking := earlier.lacking or _gone(steps, earlier):
        again = dict.fromkeys(together, lacking)
    for step in steps:
        if step not in before:
            look(step)

    def decided(step: Step) -> Decided:
        if step.id in anew:
            return Decided(step.id, None, changed.get(step.id, "its workspace is gone"))
        if step.id in again:
            return Decided(step.id, None, again[step.id])
        run = earlier.steps[step.id].reused or earlier.run
        return Decided(step.id, run, f"as in run {run}")

    return tuple(map(decided, steps))


def _before_scan(steps: tuple[Step, ...]) -> list[Step]:
    """List all steps that the scan needs, in plan order."""
    wanted = {SCAN}
    for step in reversed(steps):
        if step.id in wanted:
            wanted.update(step.needs)
    return [step for step in steps if step.id in wanted and step.id != SCAN]


def _gone(steps: tuple[Step, ...], earlier: Earlier) -> str | None:
    """Return why the saved work does not fit this plan, if the earlier run had more steps before its scan."""
    known = {step.id for step in steps}
    gone = [step for step in takewhile(lambda step: step != SCAN, earlier.steps) if step not in known]
    return f"{gone[0]} is gone, and the saved work has what it did" if gone else None


def _changed(step: Step, keys: Keys, earlier: Earlier) -> str:
    if step.id not in keys:
        return ""
    if step.id not in earlier.keys or step.id not in earlier.steps:
        return "it is new"
    return "; ".join(differences(earlier.keys[step.id], keys[step.id]))


def _why(step: Step, changed: Mapping[str, str], again: Mapping[str, str], earlier: Earlier) -> str | None:
    """Return why a step runs again, because of itself or of its needs."""
    if step.id in changed:
        return changed[step.id]
    for need in step.needs:
        if need in again or need in changed:
            return f"its need {need} {'runs again' if need in again else 'is not the same'}"
    found = earlier.steps[step.id]
    if found.status is Status.SUCCEEDED:
        return None
    if found.outcome is None or found.status is Status.SKIPPED:
        return "it did not run"
    return f"it did not succeed: {found.outcome.message}"
