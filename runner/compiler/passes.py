"""The passes, in the order in which they run. Each takes a draft of one run and returns the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType

from msgspec import Struct
from msgspec.structs import asdict, replace

import runner.steps
from runner.core import plugins
from runner.core.codec import digest
from runner.core.errors import IsolationTooWeak, NotEnforced, ProviderUnavailable, RunnerError, Unenforceable
from runner.core.model import Feature
from runner.manifest.text import collector_paused
from runner.plan.graph import Graph
from runner.plan.model import FORMAT, Plan, PlannedCluster, RunPlan, SecretGrant, Step
from runner.ports.provider import Probe
from runner.spec.model import Demand, Facts, RunSpec, no_image


class Draft(Struct, frozen=True, kw_only=True):
    spec: RunSpec
    facts: Facts
    steps: tuple[Step, ...] = ()
    notes: tuple[str, ...] = ()
    findings: tuple[RunnerError, ...] = ()

    def found(self, *findings: RunnerError) -> Draft:
        return replace(self, findings=(*self.findings, *findings))


Pass = Callable[[Draft], Draft]


def add_steps(draft: Draft) -> Draft:
    """Ask every step kind whether this run needs it, after the kinds that it may need; finalize steps come last."""
    steps: dict[str, Step] = {}
    for kind, module in step_kinds().items():
        step = module.plan(draft.spec, draft.facts, needs_of(kind, *steps))
        if step is not None:
            steps[kind] = step
    return replace(draft, steps=in_phases(steps.values()))


def in_phases(steps: Iterable[Step]) -> tuple[Step, ...]:
    return tuple(sorted(steps, key=lambda step: step.phase == "finalize"))


@cache
def needs_of(kind: str, *present: str) -> tuple[str, ...]:
    """Choose the best present kind for each need."""
    found = ([need for need in choice if need in present] for choice in _choices(kind, step_kinds()))
    return tuple(best[0] for best in found if best)


def give_secrets(draft: Draft) -> Draft:
    """Add to each step the secrets that are for it or its requests, by name."""
    if not draft.spec.secrets:
        return draft
    steps = []
    for step in draft.steps:
        secrets = [secret for secret in draft.spec.secrets if step.kind in secret.steps]
        given = (
            SecretGrant(secret.name, secret.as_file, f"{secret.at.file}:{secret.at.line}")
            for secret in secrets
            if secret.injection is None
        )
        injected = (secret.injection for secret in secrets if secret.injection is not None)
        steps.append(replace(step, secrets=tuple(given), injected=tuple(injected)))
    return replace(draft, steps=tuple(steps))


def give_network(draft: Draft) -> Draft:
    """Give all steps the host's network when the agent has the key of its model, since all that it runs has it too."""
    model = draft.spec.model
    if model is None or not model.key_inside:
        return draft
    return replace(draft, steps=tuple(replace(step, network="host") for step in draft.steps))


def bound_deadlines(draft: Draft) -> Draft:
    """Cut the deadlines of steps to that of their run."""
    run = draft.spec.deadline_seconds
    if all(step.deadline_seconds <= run for step in draft.steps):
        return draft
    return replace(
        draft,
        steps=tuple(replace(s, deadline_seconds=min(s.deadline_seconds, run)) for s in draft.steps),
    )


def demand_isolation(draft: Draft) -> Draft:
    """Require every provider of the chain to be as strong as asked, since any of them may be used."""
    spec = draft.spec
    weak = [
        IsolationTooWeak(
            f"`{name}` gives isolation `{probe.isolation.value}`, and `{spec.isolation.value}` is asked for",
            at=spec.providers_at,
            hint=f"remove `{name}` from the providers",
        )
        for name, probe in _chain(draft)
        if probe.isolation < spec.isolation
    ]
    return draft.found(*weak)


def demand_features(draft: Draft) -> Draft:
    """Require every provider of the chain to enforce what the manifest asks for."""
    notes: list[str] = []
    findings: list[RunnerError] = []
    chain = [(name, probe.on_shared_disk() if draft.spec.shared else probe) for name, probe in _chain(draft)]
    for demand in draft.spec.demands:
        for name, probe in chain:
            if not probe.available or probe.enforces(demand.feature):
                continue
            watched = demand.feature in probe.watched
            how = f"{probe.watch_words(demand.feature)}, with" if watched else "not enforced by"
            notes.append(f"{demand.text}: {how} {name}")
            if demand.written and not watched:
                findings.append(_unenforced(draft, demand, name, probe))
    return replace(draft, notes=tuple(notes)).found(*findings)


def _unenforced(draft: Draft, demand: Demand, name: str, probe: Probe) -> RunnerError:
    why = probe.missing[demand.feature]
    text = f"`{name}` cannot enforce {demand.text}: {why}"
    if draft.spec.best_effort and demand.feature.value in ("cpu", "memory", "disk", "pids"):
        return NotEnforced(text, at=demand.at)
    probes = {n: p.on_shared_disk() if draft.spec.shared else p for n, p in draft.facts.probes.items()}
    able = sorted(n for n, p in probes.items() if p.available and p.enforces(demand.feature))
    others = "leave the field out, or see `runner doctor` for another provider"
    hint = f"providers here that can: {', '.join(able)}" if able else others
    return Unenforceable(text, at=demand.at, hint=hint)


def demand_image(draft: Draft) -> Draft:
    """Require an image of a run whose provider makes workspaces of images."""
    if draft.spec.base_image is not None:
        return draft
    lost = [name for name, probe in _chain(draft) if probe.available and probe.needs_image]
    return draft.found(*(no_image(draft.spec, name) for name in lost))


def demand_availability(draft: Draft) -> Draft:
    """Require at least one available provider; the others are rejected one by one when their turn comes."""
    chain = _chain(draft)
    if draft.facts.open or any(probe.available for _, probe in chain):
        return draft
    reasons = "; ".join(f"`{name}`: {probe.reason}" for name, probe in chain)
    hint = next((probe.hint for _, probe in chain if probe.hint), "see `runner doctor`")
    return draft.found(
        ProviderUnavailable(f"no provider of run `{draft.spec.name}` is available: {reasons}", hint=hint)
    )


PASSES: tuple[Pass, ...] = (
    add_steps,
    give_secrets,  # after add_steps: it takes the steps that are there
    give_network,  # after add_steps: it takes the steps that are there
    bound_deadlines,  # after add_steps: it takes the steps that are there
    demand_isolation,
    demand_features,
    demand_image,
    demand_availability,
)


@collector_paused()
def compile_plan(
    specs: Sequence[RunSpec], facts: Facts, *, documents: object, settings: object
) -> tuple[Plan, list[RunnerError]]:
    """Turn resolved specs into a plan; with errors among the findings, do not run it.

    ``documents`` and ``settings`` are what the specs were resolved from, in plain form, for the digest.
    """
    runs: list[RunPlan] = []
    findings: list[RunnerError] = []
    for spec in specs:
        draft = Draft(spec=spec, facts=facts)
        for apply in PASSES:
            draft = apply(draft)
        findings += draft.findings
        runs.append(_run_plan(draft))
    return Plan(plan_digest(facts, documents=documents, settings=settings), tuple(runs), facts.open), findings


def plan_digest(facts: Facts, *, documents: object, settings: object) -> str:
    """Return the digest of all that decides a plan."""
    return digest({"format": FORMAT, "documents": documents, "settings": settings, "facts": facts.pinned()})


def _run_plan(draft: Draft) -> RunPlan:
    spec, found = draft.spec, draft.facts.of(draft.spec.name)
    task = {key: value for key, value in asdict(spec.task).items() if value is not None}
    incident = {"incident": found.incident} if spec.incident is not None else {}
    return RunPlan(
        name=spec.name,
        group=spec.group,
        needs=spec.needs,
        max_parallel=spec.max_parallel,
        outputs=spec.outputs,
        origin=spec.origin,
        providers=spec.providers,
        isolation=spec.isolation,
        limits=spec.limits,
        commit=spec.checkout.commit if spec.checkout else None,
        deadline_seconds=spec.deadline_seconds,
        stop_budget_seconds=spec.stop_budget_seconds,
        policies=tuple(p.name for p in spec.policies),
        notes=draft.notes,
        values={"task": task, **incident},
        steps=draft.steps,
        origins={**spec.origins, **{f"policy {p.name}": p.origin for p in spec.policies}},
        base_image=spec.base_image,
        image=found.image,
        cluster=_cluster(spec),
        cost_usd=_cost(spec),
        webhook=spec.webhook,
        messages=spec.messages,
        queue=spec.queue,
        host_network=tuple(
            name for name, probe in _chain(draft) if probe.available and not probe.enforces(Feature.NETWORK_NONE)
        ),
    )


def _cost(spec: RunSpec) -> float | None:
    """Return the ceiling of a run's model cost; ``None`` when the agent has the key itself."""
    if spec.model is None:
        return 0.0
    return None if spec.model.key_inside else spec.model.budget.cost_usd


def _cluster(spec: RunSpec) -> PlannedCluster | None:
    if (found := spec.cluster) is None:
        return None
    return PlannedCluster(
        context=found.context,
        server=found.server,
        namespace=found.namespace,
        access=found.access,
        plug_in=found.plug_in,
    )


def _chain(draft: Draft) -> list[tuple[str, Probe]]:
    """List the chain's providers with their probes; empty for open Facts."""
    return [] if draft.facts.open else [(name, draft.facts.probes[name]) for name in draft.spec.providers]


@cache
def step_kinds() -> Mapping[str, ModuleType]:
    """Import the ``plan`` module of every step kind, each after those that it may need."""
    modules = {name: import_module(f"runner.steps.{name}.plan") for name in plugins.names(runner.steps)}
    choices = {name: [need for choice in _choices(name, modules) for need in choice] for name in modules}
    return {name: modules[name] for name in Graph(choices).order()}


def _choices(kind: str, modules: Mapping[str, ModuleType]) -> Sequence[Sequence[str]]:
    """List the ``NEEDS`` of a kind, and the kinds that want to be before it."""
    earlier = [(name,) for name, module in modules.items() if kind in getattr(module, "BEFORE", ())]
    return (*modules[kind].NEEDS, *earlier)
