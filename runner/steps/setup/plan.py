"""Run the agent type's setup commands in the checkout, in order."""

from __future__ import annotations

import shlex

from msgspec import Struct

from runner.core.hosts import NetworkSpec
from runner.plan.model import Step
from runner.runtime.mount_plan import MountPlan, mount_plan_of, planned_mounts
from runner.spec.model import Command, Facts, RunSpec

NEEDS = (("clone", "provision"),)
TAKES_SECRETS = True


class SetupBody(Struct, frozen=True, kw_only=True):
    commands: tuple[Command, ...]
    command_seconds: float
    may_fail: bool
    mount_plan: MountPlan
    network: NetworkSpec = NetworkSpec()


BODY = SetupBody


def command_words(command: Command) -> str:
    """A command as a person writes it."""
    return command[2] if command[:2] == ("sh", "-c") and len(command) == 3 else shlex.join(command)


def inputs(body: SetupBody) -> dict[str, object]:
    seen = {"mounts": body.mount_plan, "hosts": body.network.pinned()}
    return {"commands": body.commands, "on_failure": body.may_fail, **seen}


def plan(spec: RunSpec, facts: Facts, needs: tuple[str, ...]) -> Step | None:
    if not spec.setup.commands:
        return None
    mount_plan = mount_plan_of(spec, facts)
    return Step(
        id="setup",
        kind="setup",
        fills_disk=True,
        what="; ".join(command_words(c) for c in spec.setup.commands),
        phase="work",
        needs=needs,
        deadline_seconds=spec.timeouts["setup"],
        origin=spec.origins["setup"],
        repeated_on_fallback=True,
        body=SetupBody(
            commands=spec.setup.commands,
            command_seconds=spec.setup.timeout_seconds,
            may_fail=spec.setup.may_fail,
            mount_plan=mount_plan,
            network=spec.networks["setup"],
        ),
        network=str(spec.networks["setup"]),
        mounts=planned_mounts(mount_plan, spec),
    )
