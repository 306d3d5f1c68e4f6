"""The layers of a step's commands. Planning looks for them, the clone step compares them, the step gives them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import trio
from msgspec.structs import replace

from runner.plan.model import RunPlan
from runner.runtime.context import RunContext
from runner.runtime.dependency_layers import Layer, Owner, layer_of
from runner.spec.model import DependencySpec
from runner.steps.clone.plan import CloneBody
from runner.steps.dependencies.plan import DependenciesBody, dependency_words
from runner.steps.provision.plan import ProvisionBody


def layers_of(
    body: DependenciesBody, plan: RunPlan, home: Path, *, needs_image: bool
) -> Iterator[tuple[DependencySpec, Layer]]:
    """Yield the commands of a run, each with its layer on a provider that makes workspaces of images or does not."""
    clone, provision = plan.body(CloneBody), plan.body(ProvisionBody)
    assert clone is not None  # the step needs one
    assert provision is not None
    owner = Owner(project=provision.project, source=clone.url or str(clone.path), untrusted=body.untrusted)
    credentials = [str(one) for step in plan.steps if step.body is body for one in step.injected]
    for one in body.commands:
        yield (
            one,
            layer_of(
                home,
                one,
                owner=owner,
                files=[body.files.get(name, "") for name in one.files],
                image=plan.image if needs_image else None,
                mount_plan=body.mount_plan,
                network=body.network,
                credentials=credentials,
            ),
        )


def tell_kept(plan: RunPlan, home: Path, *, needs_image: bool) -> RunPlan:
    """Return a plan that says which dependencies are kept on this host, and which are still to be made."""
    body = plan.body(DependenciesBody)
    assert body is not None  # its caller has seen one
    found = layers_of(body, plan, home, needs_image=needs_image)
    words = "; ".join(dependency_words(one, "kept" if layer.is_there() else "to be made") for one, layer in found)
    return replace(plan, steps=tuple(replace(s, what=words) if s.body is body else s for s in plan.steps))


async def hold_kept(run: RunContext) -> None:
    """Find the layers that are kept and hold them until the run ends; those that others make are not waited for."""
    body, probe = run.plan.body(DependenciesBody), run.workspace.probe
    if body is None or probe is None:
        return
    for _, layer in layers_of(body, run.plan, run.paths.home, needs_image=probe.needs_image):
        if layer.path in run.results.kept_layers or not layer.is_there():
            continue
        if (found := await layer.try_lock()) is not None:
            record, lock = found
            if record is None:
                os.close(lock)
            else:
                run.results.kept_layers[layer.path] = record
                run.sandboxes.services.start_soon(hold_until_end, lock)


async def hold_until_end(lock: int) -> None:
    """Keep a lock until the run has ended."""
    try:
        await trio.sleep_forever()
    finally:
        os.close(lock)
