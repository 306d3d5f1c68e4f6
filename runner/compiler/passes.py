"""The passes, in the order in which they run. Each takes a draft of one run and returns the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from types import ModuleType

import runner.steps
from runner import plugins
from runner.errors import IsolationTooWeak, NotEnforced, ProviderUnavailable, RunnerError, Unenforceable
from runner.plan.graph import Graph
from runner.plan.model import FORMAT, Plan, RunPlan, Step, digest
from runner.ports.provider import Probe
from runner.spec.model import Demand, Facts, RunSpec


@dataclass(frozen=True)
class Draft:
    spec: RunSpec
    facts: Facts
    steps: tuple[Step, ...] = ()
    notes: tuple[str, ...] = ()
    findings: tuple[RunnerError, ...] = ()

    def found(self, *findings: RunnerError) -> Draft:
        return replace(self, findings=(*self.findings, *findings)) if findings else self


Pass = Callable[[Draft], Draft]


def add_steps(draft: Draft) -> Draft:
    """Ask every step kind whether this run needs it."""
    steps = (module.plan(draft.spec, draft.facts) for module in _kinds().values())
    return replace(draft, steps=tuple(step for step in steps if step is not None))


def connect_needs(draft: Draft) -> Draft:
    """Of the kinds that can stand for a need, the best one that is present is the need."""
    needs = _needs(frozenset(step.kind for step in draft.steps))
    return replace(
        draft, steps=tuple(replace(step, needs=found) if (found := needs[step.kind]) else step for step in draft.steps)
    )


@cache
def _needs(present: frozenset[str]) -> Mapping[str, tuple[str, ...]]:
    """What each kind needs in a run of these kinds; most runs of a plan have the same ones."""

    def best(choice: Sequence[str]) -> list[str]:
        return [kind for kind in choice if kind in present][:1]

    return {kind: tuple(need for choice in _kinds()[kind].NEEDS for need in best(choice)) for kind in present}


def bound_deadlines(draft: Draft) -> Draft:
    """No step may promise more time than its run has."""
    run = draft.spec.deadline_seconds
    if all(step.deadline_seconds <= run for step in draft.steps):
        return draft
    return replace(
        draft,
        steps=tuple(replace(s, deadline_seconds=min(s.deadline_seconds, run)) for s in draft.steps),
    )


def demand_isolation(draft: Draft) -> Draft:
    """Every provider of the chain must be as strong as asked, since any of them may be the one."""
    spec = draft.spec
    weak = [
        IsolationTooWeak(
            f"`{name}` gives isolation `{probe.isolation.word}`, and `{spec.isolation.word}` is asked for",
            at=spec.providers_at,
            hint=f"take `{name}` out of the providers",
        )
        for name, probe in _chain(draft)
        if probe.isolation < spec.isolation
    ]
    return draft.found(*weak)


def demand_features(draft: Draft) -> Draft:
    """What a manifest asks for is enforced by every provider of its chain, or the run does not compile."""
    notes: list[str] = []
    findings: list[RunnerError] = []
    for demand in draft.spec.demands:
        for name, probe in _chain(draft):
            if not probe.available or probe.enforces(demand.feature):
                continue
            notes.append(f"{demand.text}: not enforced by {name}")
            if demand.written:
                findings.append(_unenforced(draft, demand, name, probe))
    return replace(draft, notes=tuple(notes)).found(*findings)


def _unenforced(draft: Draft, demand: Demand, name: str, probe: Probe) -> RunnerError:
    why = probe.missing[demand.feature]
    text = f"`{name}` can not enforce {demand.text}: {why}"
    if draft.spec.best_effort and demand.feature.value in ("cpu", "memory", "disk", "pids"):
        return NotEnforced(text, at=demand.at)
    able = sorted(n for n, p in draft.facts.probes.items() if p.available and p.enforces(demand.feature))
    hint = f"providers here that can: {', '.join(able)}" if able else "no provider here can; leave the field out"
    return Unenforceable(text, at=demand.at, hint=hint)


def demand_availability(draft: Draft) -> Draft:
    """At least one provider of the chain must be there; the others are refused one by one when their turn comes."""
    chain = _chain(draft)
    if draft.facts.open or any(probe.available for _, probe in chain):
        return draft
    reasons = "; ".join(f"`{name}`: {probe.reason}" for name, probe in chain)
    hint = next((probe.hint for _, probe in chain if probe.hint), "see `runner doctor`")
    return draft.found(
        ProviderUnavailable(f"no provider of run `{draft.spec.name}` is available: {reasons}", hint=hint)
    )


def order_stably(draft: Draft) -> Draft:
    """Equal specs give equal plans."""
    steps = {step.id: step for step in draft.steps}
    order = _order(tuple((step.id, step.phase, step.needs) for step in draft.steps))
    return replace(draft, steps=tuple(steps[id] for id in order))


@cache
def _order(nodes: tuple[tuple[str, str, tuple[str, ...]], ...]) -> tuple[str, ...]:
    """The ids of steps, each after what it needs, those that settle last."""
    settle = {id for id, phase, _ in nodes if phase == "settle"}
    return tuple(sorted(Graph({id: needs for id, _, needs in nodes}).order(), key=settle.__contains__))


PASSES: tuple[Pass, ...] = (
    add_steps,
    connect_needs,  # after add_steps: a need is on what is present
    bound_deadlines,
    demand_isolation,
    demand_features,
    demand_availability,
    order_stably,  # last: same spec, same plan, same digest
)


def compile_plan(
    specs: Sequence[RunSpec], facts: Facts, *, documents: object, settings: object
) -> tuple[Plan, list[RunnerError]]:
    """Turn resolved specs into a plan; with errors among the findings, do not run it.

    ``documents`` and ``settings`` are what the specs were resolved from, in plain form, for the digest.
    """
    runs: list[RunPlan] = []
    findings: list[RunnerError] = []
    for spec in specs:
        draft = Draft(spec, facts)
        for apply in PASSES:
            draft = apply(draft)
        findings += draft.findings
        runs.append(_run_plan(draft))
    inputs = {"format": FORMAT, "documents": documents, "settings": settings, "facts": facts.pinned()}
    return Plan(digest(inputs), tuple(runs), facts.open), findings


def _run_plan(draft: Draft) -> RunPlan:
    spec = draft.spec
    task = {key: value for key, value in vars(spec.task).items() if value is not None}
    incident = {"incident": draft.facts.incidents.get(spec.name, {})} if spec.incident is not None else {}
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
        policies=tuple(f"{p.name} ({p.origin})" for p in spec.policies),
        notes=draft.notes,
        values={"task": task, **incident},
        steps=draft.steps,
        origins={**spec.origins, **{demand.feature.value: demand.origin for demand in spec.demands}},
    )


def _chain(draft: Draft) -> list[tuple[str, Probe]]:
    """The providers that may be the one, as probed; of open Facts, none."""
    return [] if draft.facts.open else [(name, draft.facts.probes[name]) for name in draft.spec.providers]


@cache
def _kinds() -> Mapping[str, ModuleType]:
    """The ``plan`` module of every step kind, by kind."""
    return {name: import_module(f"runner.steps.{name}.plan") for name in plugins.names(runner.steps)}
