"""Choose a provider and make the workspace, with the run's inputs in it."""

from __future__ import annotations

from dataclasses import dataclass

from runner.model import Feature, IsolationClass, Limits
from runner.plan.model import Step
from runner.spec.model import ContextFile, Facts, RunSpec

NEEDS: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Body:
    """``must`` are the features without which a provider of the chain is refused when it is opened."""

    providers: tuple[str, ...]
    isolation: IsolationClass
    limits: Limits
    must: tuple[Feature, ...]
    incident: tuple[tuple[str, ContextFile], ...]
    inputs_in_tree: bool
    script: ContextFile | None
    files: tuple[tuple[str, str, bool], ...]


def plan(spec: RunSpec, facts: Facts, needs: tuple[str, ...]) -> Step:
    must = tuple(d.feature for d in spec.demands if d.written and not spec.best_effort)
    return Step(
        id="provision",
        kind="provision",
        what=", then ".join(spec.providers),
        phase="work",
        needs=needs,
        deadline_seconds=spec.timeouts["provision"],
        origin=spec.origins["provision"],
        body=Body(
            spec.providers,
            spec.isolation,
            spec.limits,
            must,
            tuple(sorted(facts.files.get(f"{spec.name}/incident", {}).items())),
            spec.checkout is None,
            facts.files.get(f"{spec.name}/script", {}).get(spec.script.name),
            spec.script.files,
        ),
    )
