"""Bring the code: a private repository of the runner's, and a checkout with a ``.git`` of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runner.plan.model import Step
from runner.spec.model import Facts, RunSpec

NEEDS = (("provision",),)


@dataclass(frozen=True)
class Body:
    path: Path
    commit: str
    branch: str
    depth: int | None
    include_dirty: bool


def plan(spec: RunSpec, facts: Facts) -> Step | None:
    checkout = spec.checkout
    if checkout is None or checkout.path is None or checkout.commit is None:
        return None
    what = f"{checkout.commit[:12]} = {spec.branch}, private clone"
    if checkout.depth:
        what += f", depth {checkout.depth}"
    if checkout.include_dirty:
        what += ", with uncommitted files"
    return Step(
        id="clone",
        kind="clone",
        what=what,
        phase="work",
        needs=(),
        deadline_seconds=spec.timeouts["clone"],
        origin=spec.origins["clone"],
        body=Body(checkout.path, checkout.commit, spec.branch, checkout.depth, checkout.include_dirty),
    )
