"""Make a plan from a path: load, select, gather, resolve, compile. Starts nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from runner.compiler import compile_plan
from runner.core.errors import Rejected, RunnerError, UsageError, distinct
from runner.core.settings import Settings
from runner.manifest.kinds.incident_run import Spec as IncidentRunSpec
from runner.manifest.kinds.incident_run import Task
from runner.manifest.load import DEFAULTS, Document, defaults, load
from runner.ops.planning.facts import gather, with_kept_layers
from runner.ops.planning.model_faults import model_faults
from runner.ops.planning.stored_projects import recorded_projects
from runner.plan.model import Plan
from runner.spec.cost import bounded, share_out
from runner.spec.facts_request import FactsRequest, facts_request, untrusted_faults
from runner.spec.model import Facts, RunSpec, SecretSpec
from runner.spec.policies import dropped_defaults
from runner.spec.resolve import outputs_of, resolve
from runner.spec.select import Selected, select
from runner.spec.select import only as only_run

BUILT_IN = "built-in "  # before the kind of a document of the defaults


class Request(Struct, frozen=True, kw_only=True):
    """Choices beside the manifests: one run only, fields of the task, no look outside, manifests of a fork.

    ``seconds`` is the time limit of each run and its agent instead of their own. ``max_cost`` is what all runs together
    may cost in dollars, ``run_cost`` what each may. ``output_dir`` and ``output_file`` say where a triage's output and
    log are copied, and the log's name there. With ``record_network`` every step reaches every public host.
    ``incident`` is the directory of the incident of ``only``, instead of its own.
    """

    only: str | None = None
    task: Mapping[str, object] = {}
    offline: bool = False
    untrusted: bool = False
    seconds: float | None = None
    output_dir: str | None = None
    output_file: str | None = None
    max_cost: float | None = None
    run_cost: float | None = None
    record_network: bool = False
    incident: str | None = None


class PlanResult(Struct, frozen=True, kw_only=True):
    """A plan with what it was made from: ``documents`` by kind and name, and the settings that change plans.

    ``wanted`` is what the runs ask of the host; ``secrets`` are where theirs come from. ``warnings`` stop nothing;
    ``missing`` is what this host lacks to execute it. ``probed`` is the monotonic time at which the providers were
    probed.
    """

    plan: Plan
    facts: Facts
    path: Path
    warnings: tuple[RunnerError, ...]
    request: Request
    documents: Mapping[str, Document]
    settings: Mapping[str, object]
    wanted: Mapping[str, FactsRequest] = {}
    secrets: Mapping[str, Sequence[SecretSpec]] = {}
    probed: float = -math.inf
    missing: tuple[RunnerError, ...] = ()


async def make_plan(
    path: Path, settings: Settings, request: Request | None = None, *, pinned: Facts | None = None
) -> PlanResult:
    """Plan the runs of a manifest file or folder. Raises ``Rejected`` with every finding."""
    planned = await draft_plan(path, settings, request, pinned=pinned)
    if planned.missing:
        raise Rejected((*planned.missing, *planned.warnings))
    return planned


async def draft_plan(
    path: Path, settings: Settings, request: Request | None = None, *, pinned: Facts | None = None
) -> PlanResult:
    """Do what ``make_plan`` does, but only note what this host lacks: such a plan can be shown, not executed."""
    request = request or Request()
    documents, findings = load(path)
    _reject(findings)
    if not request.untrusted:  # whose projects are their own affair
        documents += await recorded_projects(documents, settings)
    chosen, unresolved = select([_with_given(document, request) for document in documents], defaults())
    findings += unresolved
    if request.untrusted:
        held_to = untrusted_policy(settings)
        chosen = [_tightened(selected, held_to) for selected in chosen]
    outputs = outputs_of(chosen)
    if request.only is not None:
        chosen = only_run(chosen, request.only)
    _reject(findings)
    wants = []
    for selected in chosen:
        want, complaints = facts_request(selected, settings, untrusted=request.untrusted)
        complaints += untrusted_faults(selected, want) if request.untrusted else []
        wants.append(want)
        findings += complaints
    _reject(findings)
    probed = time.monotonic() if pinned is None else -math.inf
    facts = await gather(wants, settings, pinned=pinned, offline=request.offline)
    specs: list[RunSpec] = []
    for selected in chosen:
        findings += dropped_defaults(selected, defaults())
        spec, complaints = resolve(
            selected, settings, facts, outputs, untrusted=request.untrusted, record_network=request.record_network
        )
        findings += complaints + model_faults(selected, spec)
        specs.append(spec if request.seconds is None else _given(spec, request.seconds))
    specs, complaints = _bounded(specs, request)
    findings += complaints
    _reject(findings)
    written, deciding = _written(chosen), deciding_settings(settings)
    documented = {key: document.data for key, document in written.items()}
    plan, complaints = compile_plan(specs, facts, documents=decided_by(request, documented), settings=deciding)
    findings += complaints
    _reject(findings)
    runs = plan.runs if request.offline else tuple(with_kept_layers(plan.runs, facts, settings))
    plan = replace(plan, max_cost_usd=request.max_cost, runs=runs)
    given = {spec.name: spec.secrets for spec in specs if spec.secrets}
    warnings, missing = ([f for f in distinct(findings) if (f.severity == "error") is wrong] for wrong in (False, True))
    return PlanResult(
        plan=plan,
        facts=facts,
        path=path,
        warnings=tuple(warnings),
        request=request,
        documents=written,
        settings=deciding,
        wanted={want.run: want for want in wants},
        secrets=given,
        probed=probed,
        missing=tuple(missing),
    )


def _with_given(document: Document, request: Request) -> Document:
    """Put the given fields into a run's task, over the written ones, and the given incident in place of its own."""
    spec = document.spec
    if not isinstance(spec, IncidentRunSpec):
        return document
    given: dict[str, object] = {}
    if request.task:
        written = spec.task.model_dump(exclude_none=True) if spec.task is not None else {}
        given["task"] = Task(**{**written, **request.task})
    if request.incident is not None and document.name == request.only and spec.incident is not None:
        given["incident"] = spec.incident.model_copy(update={"directory": request.incident})
    return replace(document, spec=spec.model_copy(update=given)) if given else document


def _bounded(specs: list[RunSpec], request: Request) -> tuple[list[RunSpec], list[RunnerError]]:
    """Limit the runs' budgets to the requested cost."""
    if request.run_cost is not None:
        return [bounded(spec, request.run_cost) for spec in specs], []
    return (specs, []) if request.max_cost is None else share_out(specs, request.max_cost)


def _given(spec: RunSpec, seconds: float) -> RunSpec:
    """Set the time limit of a run and of its agent."""
    origins = {**spec.origins, "deadline": "--timeout", "timeouts.agent": "--timeout"}
    return replace(spec, deadline_seconds=seconds, timeouts={**spec.timeouts, "agent": seconds}, origins=origins)


def _reject(findings: Sequence[RunnerError]) -> None:
    """Raise ``Rejected`` with all findings if one is an error in the manifests."""
    if any(f.severity == "error" and not f.of_host for f in findings):
        raise Rejected(distinct(findings))


def untrusted_policy(settings: Settings) -> Document | None:
    """Read this host's policy for manifests of a fork, if it has one. Raises ``Rejected`` and ``UsageError``."""
    if settings.untrusted_policy is None:
        return None
    documents, findings = load(settings.untrusted_policy)
    _reject(findings)
    if [document.kind for document in documents] != ["Policy"]:
        hint = "name the file of a Policy in RUNNER_UNTRUSTED_POLICY"
        raise UsageError(f"`{settings.untrusted_policy}` is not one document of kind Policy", hint=hint)
    return documents[0]


def _tightened(selected: Selected, held_to: Document | None) -> Selected:
    """Add the built-in policy and this host's to those of a selection, which then cannot loosen them."""
    others = [policy for policy in selected.policies if policy is not defaults()["Policy"]]
    return replace(selected, policies=(*others, defaults()["Policy"]), host_policy=held_to)


def _written(chosen: Sequence[Selected]) -> dict[str, Document]:
    """Return the documents that the plan rests on, by kind and name."""
    built_in = {f"{BUILT_IN}{kind}": document for kind, document in defaults().items()}
    used = {
        f"{'host ' * (document is selected.host_policy)}{document.kind} {document.name}": document
        for selected in chosen
        for document in selected.documents
        if document.file != DEFAULTS
    }
    return dict(sorted((built_in | used).items()))


def decided_by(request: Request, documents: Mapping[str, object]) -> dict[str, object]:
    """Return all that people wrote, as a plan's digest covers it."""
    chosen = {"seconds": request.seconds, "max_cost": request.max_cost, "run_cost": request.run_cost}
    given = {name: value for name, value in chosen.items() if value is not None}
    given |= {"record_network": True} if request.record_network else {}
    return {"written": documents, "task": request.task, "untrusted": request.untrusted, **given}


def deciding_settings(settings: Settings) -> dict[str, object]:
    """Return the settings that change plans."""
    return {
        "cpus": settings.default_cpus,
        "memory": settings.default_memory,
        "disk": settings.default_disk,
        "providers": settings.providers,
        "warm_pool": settings.warm_pool_size,
    }
