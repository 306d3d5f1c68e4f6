"""Run the hooks of agent type and run after the agent, whatever its outcome; they cannot fail the run."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from runner.core.hosts import NetworkSpec
from runner.plan.model import Step
from runner.runtime.mount_plan import MountPlan, mount_plan_of, planned_mounts
from runner.spec.model import Command, Facts, RunSpec
from runner.steps.setup.plan import command_words

NEEDS = (("agent",),)
TAKES_SECRETS = True


class PostHookBody(Struct, frozen=True):
    """``env`` is the agent's: templates, filled when the step starts."""

    env: Mapping[str, str]
    commands: tuple[Command, ...]
    mount_plan: MountPlan
    network: NetworkSpec = NetworkSpec()


BODY = PostHookBody


def inputs(body: PostHookBody) -> dict[str, object]:
    seen = {"mounts": body.mount_plan, "hosts": body.network.pinned()}
    return {"commands": body.commands, "env": body.env, **seen}


def plan(spec: RunSpec, facts: Facts, needs: tuple[str, ...]) -> Step | None:
    if not spec.post_hooks:
        return None
    mount_plan = mount_plan_of(spec, facts)
    return Step(
        id="post_hook",
        kind="post_hook",
        fills_disk=True,
        what="; ".join(command_words(c) for c in spec.post_hooks),
        phase="work",
        needs=needs,
        deadline_seconds=spec.timeouts["post_hook"],
        origin=spec.origins["post_hook"],
        body=PostHookBody(spec.env, spec.post_hooks, mount_plan, spec.networks["post_hook"]),
        network=str(spec.networks["post_hook"]),
        when="ended",
        post_agent=True,
        mounts=planned_mounts(mount_plan, spec),
    )
