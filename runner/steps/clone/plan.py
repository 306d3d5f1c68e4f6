"""Bring the code: a private repository of the runner's, and a checkout with a ``.git`` of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runner.plan.model import Step
from runner.spec.model import Facts, RunSpec

NEEDS = (("provision",),)


@dataclass(frozen=True)
class Body:
    """``path`` and ``commit`` are ``None`` only in an open plan."""

    path: Path | None
    commit: str | None
    branch: str
    depth: int | None
    include_dirty: bool


def plan(spec: RunSpec, facts: Facts, needs: tuple[str, ...]) -> Step | None:
    checkout = spec.checkout
    if checkout is None:
        return None
    if checkout.commit is not None and not facts.open:
        what = f"{checkout.commit[:12]} = {spec.branch}, private clone"
    else:
        what = f"{checkout.commit or checkout.branch or 'HEAD'} of {checkout.url or checkout.path}, not pinned"
    if checkout.depth:
        what += f", depth {checkout.depth}"
    if checkout.include_dirty:
        what += ", with uncommitted files"
    return Step(
        id="clone",
        kind="clone",
        what=what,
        phase="work",
        needs=needs,
        deadline_seconds=spec.timeouts["clone"],
        origin=spec.origins["clone"],
        body=Body(checkout.path, checkout.commit, spec.branch, checkout.depth, checkout.include_dirty),
    )
