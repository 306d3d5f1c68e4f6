"""The clusters of a plan: whose word their kubeconfigs are, and whether they can be reached before anything is made."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import trio

from runner.errors import Rejected, RunnerError
from runner.plan.model import RunPlan
from runner.ports.cluster import ClusterGrant
from runner.settings import Settings
from runner.steps._cluster import grant_of
from runner.steps._run import Ports
from runner.steps.agent.plan import Body


def foreign_places(manifest: Path, incident: Path | None, settings: Settings) -> dict[Path, str]:
    """The directories whose kubeconfigs may name no program, with what they are: they hold what others have written.

    These are the incident's, and the repository of a ``manifest`` that is not the runner's own, or else its folder.
    Nothing is said of the usual place, which is always the user's.
    """
    manifest = Path(os.path.realpath(manifest))
    found = {Path(os.path.realpath(settings.reach.get("HOME", "/"))) / ".kube": ""}
    if not manifest.is_relative_to(os.path.realpath(settings.home)):
        top = next((folder for folder in (manifest, *manifest.parents) if (folder / ".git").exists()), manifest)
        found[top] = "in the repository of the manifest" if (top / ".git").exists() else "beside the manifest"
    if incident is not None:
        found[Path(os.path.realpath(incident))] = "in the incident's directory"
    return found


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
