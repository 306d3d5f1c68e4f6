"""A plan as a reviewer reads it: one table a run, nothing hidden that decides anything."""

from __future__ import annotations

from collections.abc import Iterator

from runner.plan.model import Plan, RunPlan
from runner.report.words import duration, limits


def render_plan(plan: Plan) -> str:
    """All runs of a plan, and a closing line with counts; ends without a line break."""
    blocks = ["\n".join(_run(run, plan.digest)) for run in plan.runs]
    steps = sum(len(run.steps) for run in plan.runs)
    notes = sum(len(run.notes) for run in plan.runs)
    runs = f"{len(plan.runs)} run{'s' * (len(plan.runs) != 1)}"
    closing = f"{runs}, {steps} steps, {notes} note{'s' * (notes != 1)}. Nothing started."
    return "\n\n".join([*blocks, closing])


def _run(run: RunPlan, digest: str) -> Iterator[str]:
    pinned = f"     {run.commit[:12]}, pinned" if run.commit else ""
    yield f"plan {run.name}  {digest[:19]}..{pinned}"
    yield (
        f"deadline {duration(run.deadline_seconds)}   isolation >= {run.isolation.word}   "
        f"{limits(run.limits)}   policy {', '.join(run.policies)}"
    )
    what = max((min(len(step.what), 48) for step in run.steps), default=4)
    yield f"  {'step':<10} {'what':<{what}}  {'limit':>6}  {'network':<7}  from"
    for step in run.steps:
        text = step.what if len(step.what) <= 48 else step.what[:45] + "..."
        yield f"  {step.id:<10} {text:<{what}}  {duration(step.deadline_seconds):>6}  {step.network:<7}  {step.origin}"
        if step.id == "agent":
            yield f"  {'':<10} {', '.join(_mounts(step.body))}"
    for note in run.notes:
        yield f"note: {note}"


def _mounts(body: object) -> tuple[str, ...]:
    shape = getattr(body, "shape", None)
    words: tuple[str, ...] = shape.words() if shape is not None else ()
    return words
