"""Remove the workspace and everything that ran in it; needs saved work."""

from __future__ import annotations

from runner.plan.model import Step
from runner.spec.model import Facts, RunSpec

NEEDS = (("save",),)


def plan(spec: RunSpec, facts: Facts, needs: tuple[str, ...]) -> Step:
    return Step(
        id="teardown",
        kind="teardown",
        routine=True,
        what="processes, sandbox, files",
        phase="finalize",
        needs=needs,
        deadline_seconds=spec.stop_budget_seconds,
        origin=spec.origins["finalize"],
        when="ended",
    )
