"""Exclusive use of the run's workspace, before it is made."""

from __future__ import annotations

from runner.lifecycle.lease import REFRESH, TTL
from runner.plan.model import BUILT_IN, Step
from runner.spec.model import Facts, RunSpec

NEEDS: tuple[tuple[str, ...], ...] = ()
DEADLINE = 60.0  # seconds; the store waits for other writers


def plan(spec: RunSpec, facts: Facts, needs: tuple[str, ...]) -> Step:
    return Step(
        id="lease",
        kind="lease",
        routine=True,
        what=f"{TTL / 3600:g}h, refreshed every {REFRESH / 60:g}m",
        phase="work",
        needs=needs,
        deadline_seconds=DEADLINE,
        origin=BUILT_IN,
    )
