"""Let go of the workspace: the last thing that a run does."""

from __future__ import annotations

from runner.plan.model import BUILT_IN, Step
from runner.spec.model import Facts, RunSpec

NEEDS = (("teardown",),)


def plan(spec: RunSpec, facts: Facts, needs: tuple[str, ...]) -> Step:
    return Step(
        id="release",
        kind="release",
        routine=True,
        what="the lease",
        phase="finalize",
        needs=needs,
        deadline_seconds=spec.stop_budget_seconds,
        origin=BUILT_IN,
        when="ended",
    )
