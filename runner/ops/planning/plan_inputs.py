"""Inputs of a run's plan, stored in its ``plan.json``, for a run that resumes it to compare with."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from runner.core.codec import plain, typed
from runner.core.errors import BadPlanFile, WorkMissing
from runner.core.model import Checkout
from runner.events.record import RunRecord
from runner.ops.planning.files import texts_of
from runner.ops.planning.make_plan import PlanResult, Request
from runner.ops.planning.plan_file import read_document
from runner.plan.keys import Keys, parts
from runner.plan.model import Json, RunPlan, Step
from runner.ports.provider import Probe
from runner.spec.model import CommitFact, Facts

ANEW = "start it anew: runner apply"


class PlanInputs(Struct, frozen=True):
    """Inputs of one run's plan; ``checkout`` is as requested, in plain JSON, and ``commit`` as resolved."""

    manifests: Path
    request: Request
    group: str
    needs: tuple[str, ...]
    checkout: Json
    commit: CommitFact | None
    probes: Mapping[str, Probe]
    outputs: Mapping[str, object]
    keys: Keys


def plan_inputs_of(planned: PlanResult, plan: RunPlan, outputs: Mapping[str, object]) -> Json:
    facts = planned.facts
    return {
        "manifests": str(planned.path.resolve()),
        "request": plain(_of_one(planned.request, plan)),
        "checkout": plain(checkout_of(planned, plan.name)),
        "commit": plain(facts.of(plan.name).commit),
        "probes": {name: plain(facts.probes[name]) for name in plan.providers},
        "outputs": plain(outputs),
        "keys": plain(keys_of(plan, facts, outputs)),
        "texts": plain(texts_of(facts, plan.name)),
    }


def checkout_of(planned: PlanResult, run: str) -> Checkout | None:
    """Return what a run asks to be cloned, before its commit is known."""
    return planned.wanted[run].checkout if run in planned.wanted else None


def _of_one(request: Request, plan: RunPlan) -> Request:
    """Return the request as it applies to one run, which has a share of a common cost limit."""
    return request if request.max_cost is None else replace(request, max_cost=None, run_cost=plan.cost_usd)


def read_plan_inputs(directory: Path, record: RunRecord) -> PlanInputs:
    """Read the inputs of a run. Raises ``WorkMissing`` when its ``plan.json`` is gone, damaged, or of another
    version.
    """
    try:
        document = read_document(directory / "plan.json")
        (run,), inputs = document["runs"], document["inputs"]
        if document["digest"] != record.plan:
            raise WorkMissing(f"`{directory / 'plan.json'}` is not the plan of run `{record.id}`", hint=ANEW)
        return PlanInputs(
            Path(inputs["manifests"]),
            typed(inputs["request"], Request),
            run["group"],
            tuple(run["needs"]),
            inputs["checkout"],
            typed(inputs["commit"], CommitFact) if inputs["commit"] is not None else None,
            typed(inputs["probes"], dict[str, Probe]),
            dict(inputs["outputs"]),
            {step: dict(values) for step, values in inputs["keys"].items()},
        )
    except BadPlanFile as error:
        raise WorkMissing(error.message, hint=ANEW) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"`{directory / 'plan.json'}` does not say what run `{record.id}` was made from"
        raise WorkMissing(what, hint=ANEW) from error


def keys_of(plan: RunPlan, facts: Facts, outputs: Mapping[str, object]) -> Keys:
    """Return the key parts of every step with content: its body, and what it sees of the host and of other runs."""
    context = {"task": plan.values["task"], "outputs": outputs, **_files(plan, facts)}
    keys = {}
    for step in plan.phase("work"):
        module = import_module(f"runner.steps.{step.kind}.plan")
        if hasattr(module, "inputs"):
            seen = context if step.mounts else {}
            versions = _versions(plan, facts) if made_anew(step) else {}
            given = {"secrets": [(secret.name, secret.as_file) for secret in step.secrets]} if step.secrets else {}
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
