"""Remove the workspace and everything that ran in it; needs saved work."""

from __future__ import annotations

from dataclasses import dataclass

from runner.plan.model import Step
from runner.spec.model import Facts, RunSpec

NEEDS = (("save",),)


@dataclass(frozen=True)
class Body:
    pass


def plan(spec: RunSpec, facts: Facts, needs: tuple[str, ...]) -> Step:
    return Step(
        id="teardown",
        kind="teardown",
        what="processes, sandbox, files",
        phase="settle",
        needs=needs,
        deadline_seconds=spec.stop_budget_seconds,
        origin=spec.origins["settle"],
        body=Body(),
        when="ended",
    )
