"""Header of a run: what its plan tells a person before anything happens."""

from __future__ import annotations

from runner.plan.model import RunPlan
from runner.report.triage import Header
from runner.spec.model import ClusterSpec
from runner.steps.agent.plan import AgentBody
from runner.steps.save.plan import SaveBody
from runner.steps.verify.plan import VerifyBody


def header_of(run: RunPlan | None) -> Header:
    """Return the header of a run; without its plan an empty one."""
    agent = run.body(AgentBody) if run is not None else None
    if run is None or agent is None:
        return Header(network="none")
    verify, save, model = run.body(VerifyBody), run.body(SaveBody), agent.model
    report = verify.verify.report if verify is not None else None
    return Header(
        agent=agent.agent,
        model=model.name if model is not None else "",
        providers=run.providers,
        incident=save.incident if save is not None else None,
        cluster=_words(agent.cluster) if agent.cluster is not None else "",
        network=next(step.network for step in run.steps if step.body is agent),
        turns=model.budget.turns if model is not None else None,
        report=report.path if report is not None else "",
        sections=report.sections if report is not None else (),
        version=agent.cli.found if agent.cli is not None else "",
    )


def _words(cluster: ClusterSpec) -> str:
    where = f", namespace {cluster.namespace}" if cluster.namespace else ""
    by = f"   credential from exec {cluster.plug_in}" if cluster.plug_in else ""
    return f"{cluster.context} {cluster.server}{where}   READ ONLY (get list watch logs; secrets refused){by}"
