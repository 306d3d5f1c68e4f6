"""The page of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from runner.core.errors import RunnerError
from runner.plan.model import Plan
from runner.report import plan as words
from runner.report.diagnostics import render as diagnostics
from runner.report.html.graph import MOST, runs_graph, steps_graph
from runner.report.html.render import render
from runner.report.plan import PlanComparison


def render_plan(plan: Plan, compared: Sequence[PlanComparison] = (), missing: Sequence[RunnerError] = ()) -> str:
    """Render the page of a plan; ``missing`` is what ``apply`` would refuse."""
    return render("plan.html", **values_of(plan, compared, missing))


def values_of(
    plan: Plan, compared: Sequence[PlanComparison] = (), missing: Sequence[RunnerError] = ()
) -> dict[str, object]:
    """Return what the templates of a plan's page show."""
    return {
        "plan": plan,
        "words": words,
        "closing": words.closing(plan, len(missing)).split("\n"),
        "changes": [line for one in compared if one.since for line in words.changes(one)],
        "missing": diagnostics(missing).split("\n") if missing else [],
        "order_of_runs": runs_graph(plan) if 1 < len(plan.runs) <= MOST else None,
        "order_of_steps": steps_graph,
    }
