"""Judge every file on disk before any object is written."""

from __future__ import annotations

from msgspec import Struct

from runner.plan.model import Step
from runner.spec.model import Facts, PolicySpec, RunSpec

NEEDS = (("agent",), ("post_hook",), ("session",))


class ScanBody(Struct, frozen=True):
    policies: tuple[PolicySpec, ...]


BODY = ScanBody


def inputs(body: ScanBody) -> dict[str, object]:
    return {"policy": [policy.ceilings for policy in body.policies]}


def plan(spec: RunSpec, facts: Facts, needs: tuple[str, ...]) -> Step:
    patterns = len({p for policy in spec.policies for p in policy.forbidden_patterns})
    size = min(policy.max_file_size for policy in spec.policies)
    return Step(
        id="scan",
        kind="scan",
        routine=True,
        what=f"{patterns} forbidden patterns, {size:,} bytes a file",
        phase="work",
        needs=needs,
        deadline_seconds=spec.timeouts["scan"],
        origin=spec.origins["scan"],
        body=ScanBody(spec.policies),
    )
