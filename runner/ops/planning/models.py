"""Models of a plan's agents: check that they can be used before anything is provisioned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from runner.core.errors import InputError, Rejected
from runner.plan.model import RunPlan, Step
from runner.ports.agent import ModelAgent
from runner.runtime.agent_dependencies import AgentDependencies
from runner.steps.agent.plan import AgentBody


def check_models(plans: Iterable[RunPlan], deps: AgentDependencies, *, reused: Iterable[str] = ()) -> None:
    """Raise ``Rejected`` with everything missing, each once; skips steps that are ``reused``."""
    done = set(reused)
    steps = [step for plan in plans for step in plan.steps if step.id not in done]
    findings = {finding.message: finding for finding in _missing(steps, deps)}
    if findings:
        raise Rejected(findings.values())


def _missing(steps: Iterable[Step], deps: AgentDependencies) -> Iterator[InputError]:
    for step in steps:
        if not isinstance(step.body, AgentBody) or step.body.model is None:
            continue
        from runner.steps.agent.model import check  # with all that a run takes

        agent = deps.agent(step.body.agent)
        assert isinstance(agent, ModelAgent)  # as every one whose manifests may name a model
        try:
            check(agent, step.body.model, deps)
        except InputError as error:
            yield error
