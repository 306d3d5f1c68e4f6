"""The clusters of a plan: whose word their kubeconfigs are, and whether they can be reached before anything is made."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import trio

from runner.core.errors import ClusterAway, ClusterDenied, ClusterUnreachable, CredentialFailed, Rejected, RunnerError
from runner.core.nurseries import stoppable
from runner.core.settings import Settings
from runner.ops.planning.make_plan import PlanResult
from runner.ops.triage.request import TriageRequest
from runner.plan.model import RunPlan
from runner.ports.cluster import ClusterGrant
from runner.runtime.cluster import grant_of
from runner.runtime.context import AgentDependencies
from runner.steps.agent.plan import AgentBody


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


def files_instead(triage: TriageRequest, planned: PlanResult, error: RunnerError) -> tuple[TriageRequest, ClusterAway]:
    """A triage of the incident's files alone, in the place of one whose cluster is away, and what is to be said of it.

    Raises ``error``, with the ways out in its hint, when it says something else too, or when there are no files.
    """
    findings = error.findings if isinstance(error, Rejected) else (error,)
    for finding in findings:
        if isinstance(finding, (ClusterUnreachable, ClusterDenied, CredentialFailed)):
            finding.hint = f"{finding.hint}; --kubeconfig FILE names another one, --files-only goes without"
    away = all(isinstance(finding, ClusterUnreachable) for finding in findings)
    if not away or not any(planned.facts.files.get(f"{run.name}/incident") for run in planned.plan.runs):
        raise error
    message = f"{findings[0].message}; only the files of the incident are looked at"
    instead = replace(triage, kubeconfig=None, context=None, away_reason=findings[0].message)
    return instead, ClusterAway(message, hint="triage again when it answers, for what the files do not show")


async def check_clusters(plans: Iterable[RunPlan], deps: AgentDependencies, *, reused: Iterable[str] = ()) -> None:
    """Raises what is wrong with a cluster, or ``Rejected`` with several; steps that are ``reused`` ask none."""
    done = set(reused)
    bodies = [step.body for plan in plans for step in plan.steps if step.id not in done]
    clusters = {body.cluster for body in bodies if isinstance(body, AgentBody) and body.cluster is not None}
    findings: dict[str, RunnerError] = {}

    async def look(grant: ClusterGrant) -> None:
        try:
            await deps.cluster.check(grant)
        except RunnerError as error:
            findings[error.message] = error

    async with stoppable(), trio.open_nursery() as nursery:
        for grant in {grant_of(cluster) for cluster in clusters}:
            nursery.start_soon(look, grant)
    if findings:
        raise Rejected(findings.values())
