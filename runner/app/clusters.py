"""Whether the clusters of a plan can be reached: looked at before anything is provisioned."""

from __future__ import annotations

from collections.abc import Iterable

import trio

from runner.errors import Rejected, RunnerError
from runner.plan.model import RunPlan
from runner.ports.cluster import ClusterGrant
from runner.steps._cluster import grant_of
from runner.steps._run import Ports
from runner.steps.agent.plan import Body


async def check_clusters(plans: Iterable[RunPlan], ports: Ports, *, reused: Iterable[str] = ()) -> None:
    """Raises what is wrong with a cluster, or ``Rejected`` with several; steps that are ``reused`` ask none."""
    done = set(reused)
    bodies = [step.body for plan in plans for step in plan.steps if step.id not in done]
    clusters = {body.cluster for body in bodies if isinstance(body, Body) and body.cluster is not None}
    findings: dict[str, RunnerError] = {}

    async def look(grant: ClusterGrant) -> None:
        try:
            await ports.cluster.reach(grant)
        except RunnerError as error:
            findings[error.message] = error

    async with trio.open_nursery() as nursery:
        for grant in {grant_of(cluster) for cluster in clusters}:
            nursery.start_soon(look, grant)
    if findings:
        raise Rejected(findings.values())
