"""Give the workspace its dependencies: kept from an earlier run, or made by commands that see nothing but their files.

They run after the clone, of which they get the files, and before everything else.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from runner.core.hosts import NetworkSpec
from runner.core.model import Feature
from runner.plan.model import Step
from runner.runtime.mount_plan import MountPlan
from runner.spec.model import DependencySpec, Facts, RunSpec
from runner.steps.setup.plan import command_words

NEEDS = (("clone",),)
BEFORE = ("setup", "preload", "agent")
ANEW = True


class DependenciesBody(Struct, frozen=True, kw_only=True):
    """``files`` are all that the commands read, by path, with the hash of each.

    What ``untrusted`` manifests make serves no others.
    """

    commands: tuple[DependencySpec, ...]
    files: Mapping[str, str]
    mount_plan: MountPlan
    untrusted: bool
    network: NetworkSpec = NetworkSpec()


BODY = DependenciesBody


def inputs(body: DependenciesBody) -> dict[str, object]:
    return {"commands": body.commands, "files": body.files, "mounts": body.mount_plan}


def plan(spec: RunSpec, facts: Facts, needs: tuple[str, ...]) -> Step | None:
    if not spec.dependencies:
        return None
    mount_plan = MountPlan(
        protected=(), toolchains=spec.lent.toolchains, incident=False, environment=spec.lent.environment
    )
    return Step(
        id="dependencies",
        kind="dependencies",
        fills_disk=True,
        what="; ".join(map(dependency_words, spec.dependencies)),
        phase="work",
        needs=needs,
        deadline_seconds=spec.timeouts["dependencies"],
        origin=spec.origins[Feature.DEPENDENCIES],
        repeated_on_fallback=True,
        body=DependenciesBody(
            commands=spec.dependencies,
            files=facts.of(spec.name).lock_files,
            mount_plan=mount_plan,
            untrusted=spec.untrusted,
            network=spec.networks["dependencies"],
        ),
        network=str(spec.networks["dependencies"]),
    )


def dependency_words(one: DependencySpec, state: str = "") -> str:
    """Return a command and what it makes, as people read it."""
    return f"{command_words(one.argv)} -> {', '.join(one.keep)}" + (f" ({state})" if state else "")
