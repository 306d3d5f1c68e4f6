"""Run the agent's own post-hook after it, and keep what its CLI has written down of its session for whoever looks for a
fault: with ``debug``, and when the agent failed. It cannot fail the run.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from runner.plan.model import Step
from runner.runtime.mount_plan import MountPlan, mount_plan_of, planned_mounts
from runner.spec.model import Facts, RunSpec

NEEDS = (("agent",), ("post_hook",))

HOOK_SECONDS = 20.0
_SECONDS = 60.0  # for the hook, for ending it, and for what it names


class SessionBody(Struct, frozen=True):
    """``env`` is the agent's: templates, filled when the step starts. ``debug`` keeps what went well, too."""

    agent: str
    env: Mapping[str, str]
    debug: bool
    mount_plan: MountPlan


BODY = SessionBody


def inputs(body: SessionBody) -> dict[str, object]:
    return {"agent": body.agent, "env": body.env, "debug": body.debug, "mounts": body.mount_plan}


def plan(spec: RunSpec, facts: Facts, needs: tuple[str, ...]) -> Step | None:
    if spec.model is None:
        return None  # a script has no CLI, so no session
    mount_plan = mount_plan_of(spec, facts)
    return Step(
        id="session",
        kind="session",
        routine=True,
        what=f"runners/{spec.agent}-post.sh: transcripts and commands of {spec.agent}"
        + ("" if spec.debug else ", kept if it fails"),
        phase="work",
        needs=needs,
        deadline_seconds=_SECONDS,
        origin=spec.origins["session"],
        body=SessionBody(spec.agent, spec.env, spec.debug, mount_plan),
        when="ended",
        post_agent=True,
        mounts=planned_mounts(mount_plan, spec),
    )
