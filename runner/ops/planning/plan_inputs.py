"""Inputs of a run's plan, stored in its ``plan.json``, for a run that resumes it to compare with."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from runner.artifacts.stored_plan import StoredPlan, read_plan
from runner.core.codec import typed
from runner.core.errors import BadPlanFile, WorkMissing
from runner.core.home import PLAN_FILE
from runner.core.model import Checkout
from runner.events.record import RunRecord
from runner.ops.planning.files import texts_of
from runner.ops.planning.make_plan import PlanResult, Request
from runner.plan.keys import Keys, parts
from runner.plan.model import RunPlan, Step
from runner.ports.provider import Probe
from runner.spec.model import CommitFact, Facts

ANEW = "start it anew: runner apply"


class PlanInputs(Struct, frozen=True, kw_only=True):
    """Inputs of one run's plan; ``checkout`` is as requested, ``commit`` as resolved, ``texts`` are files by hash."""

    manifests: Path
    request: Request
    group: str
    needs: tuple[str, ...]
    checkout: Checkout | None
    commit: CommitFact | None
    probes: Mapping[str, Probe]
    outputs: Mapping[str, object]
    keys: Keys
    texts: Mapping[str, str]


def plan_inputs_of(planned: PlanResult, plan: RunPlan, outputs: Mapping[str, object]) -> PlanInputs:
    facts = planned.facts
    return PlanInputs(
        manifests=planned.path.resolve(),
        request=_of_one(planned.request, plan),
        group=plan.group,
        needs=plan.needs,
        checkout=checkout_of(planned, plan.name),
        commit=facts.of(plan.name).commit,
        probes={name: facts.probes[name] for name in plan.providers},
        outputs=outputs,
        keys=keys_of(plan, facts, outputs),
        texts=texts_of(facts, plan.name),
    )


def checkout_of(planned: PlanResult, run: str) -> Checkout | None:
    """Return what a run asks to be cloned, before its commit is known."""
    return planned.wanted[run].checkout if run in planned.wanted else None


def _of_one(request: Request, plan: RunPlan) -> Request:
    """Return the request as it applies to one run, which has a share of a common cost limit."""
    return request if request.max_cost is None else replace(request, max_cost=None, run_cost=plan.cost_usd)


def read_inputs(stored: StoredPlan) -> PlanInputs:
    """Return the inputs of a stored plan. Raises ``BadPlanFile`` when they are damaged."""
    try:
        return typed(stored.inputs, PlanInputs)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadPlanFile(f"the plan of run `{stored.run.name}` does not say what it was made from") from error


def read_plan_inputs(directory: Path, record: RunRecord) -> PlanInputs:
    """Read the inputs of a run. Raises ``WorkMissing`` when its ``plan.json`` is gone, damaged, or of another
    version.
    """
    try:
        stored = read_plan(directory)
        inputs = read_inputs(stored)
    except BadPlanFile as error:
        raise WorkMissing(error.message, hint=ANEW) from error
    if stored.digest != record.plan:
        raise WorkMissing(f"`{directory / PLAN_FILE}` is not the plan of run `{record.id}`", hint=ANEW)
    return inputs


def keys_of(plan: RunPlan, facts: Facts, outputs: Mapping[str, object]) -> Keys:
    """Return the key parts of every step with content: its body, and what it sees of the host and of other runs."""
    context = {"task": plan.values["task"], "outputs": outputs, **_files(plan, facts)}
    keys = {}
    for step in plan.phase("work"):
        module = import_module(f"runner.steps.{step.kind}.plan")
        if hasattr(module, "inputs"):
            seen = context if step.mounts else {}
            versions = _versions(plan, facts) if made_anew(step) else {}
            given: dict[str, object] = {}
            if step.secrets:
                given["secrets"] = [(secret.name, secret.as_file) for secret in step.secrets]
            if step.injected:
                given["injected"] = [str(injection) for injection in step.injected]
            values = {**versions, **module.inputs(step.body), **seen, **given, "network": step.network}
            keys[step.id] = parts(values)
    return keys


def made_anew(step: Step) -> bool:
    """Tell whether a step's effect ends with the workspace, so that a resumed run has to repeat it."""
    module = import_module(f"runner.steps.{step.kind}.plan")
    return getattr(module, "ANEW", False) or not hasattr(module, "inputs")


def _files(plan: RunPlan, facts: Facts) -> dict[str, object]:
    """Return the hashes of files beside the manifests that commands see."""
    kinds = facts.of(plan.name).files
    return {kind: {name: file.sha256 for name, file in files.items()} for kind, files in kinds.items()}


def _versions(plan: RunPlan, facts: Facts) -> dict[str, object]:
    """Return isolation and program versions of the chain's providers; the kernel's does not count."""
    found: dict[str, object] = {"providers": ", then ".join(plan.providers)}
    for name in plan.providers:
        probe = facts.probes[name]
        found[f"isolation of {name}"] = probe.isolation.value if probe.available else "not available"
        programs = {program: version for program, version in probe.versions.items() if program != "kernel"}
        found |= {f"{program} of {name}": version for program, version in programs.items()}
    return found
