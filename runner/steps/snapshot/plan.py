"""Commit the tree on disk to the runner's private repository, judge what changed, publish."""

from __future__ import annotations

from msgspec import Struct

from runner.plan.model import Step
from runner.runtime.mount_plan import MountPlan, mount_plan_of
from runner.spec.model import Facts, PolicySpec, RunSpec

NEEDS = (("scan",),)


class SnapshotBody(Struct, frozen=True, kw_only=True):
    """``commits`` is the shape in which the agent's own are bundled; ``None`` when they cannot start at the base.

    With ``wants_change`` it fails when nothing was changed.
    """

    message: str
    branch: str | None
    policies: tuple[PolicySpec, ...]
    commits: MountPlan | None
    wants_change: bool


BODY = SnapshotBody


def inputs(body: SnapshotBody) -> dict[str, object]:
    policy = [policy.ceilings for policy in body.policies]
    return {"policy": policy, "message": body.message, "branch": body.branch, "wants a change": body.wants_change}


def plan(spec: RunSpec, facts: Facts, needs: tuple[str, ...]) -> Step | None:
    needs_tree = spec.verify is not None and spec.verify.needs_tree
    if spec.checkout is None and spec.snapshot is None and not needs_tree:
        return None
    commits = spec.checkout is not None and not spec.checkout.include_dirty
    branch = spec.snapshot.branch if spec.snapshot else None
    return Step(
        id="snapshot",
        kind="snapshot",
        routine=True,
        what=f"branch {branch} (not pushed)" if branch else "private commit",
        phase="work",
        needs=needs,
        deadline_seconds=spec.timeouts["snapshot"],
        origin=spec.origins["snapshot"],
        body=SnapshotBody(
            message=spec.message,
            branch=branch,
            policies=spec.policies,
            commits=mount_plan_of(spec, facts) if commits else None,
            wants_change=spec.snapshot is not None and spec.snapshot.needs_change,
        ),
    )
