"""Clusters of a plan: kubeconfigs that may not name programs, and reachability before anything is made."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import trio
from msgspec.structs import replace

from runner.core.errors import ClusterAway, ClusterDenied, ClusterUnreachable, CredentialFailed, Rejected, RunnerError
from runner.core.settings import Settings
from runner.ops.planning.make_plan import PlanResult
from runner.ops.triage.request import TriageRequest
from runner.plan.model import RunPlan
from runner.ports.cluster import ClusterGrant
from runner.runtime.agent_dependencies import AgentDependencies
from runner.steps.agent.plan import AgentBody


def foreign_places(manifest: Path, incident: Path | None, settings: Settings) -> dict[Path, str]:
    """Return the directories, with a description, whose kubeconfigs may name no program, since others write there.

    These are the incident's, and the repository of a ``manifest`` that is not the runner's own, or else its folder. The
    user's own ``~/.kube`` has an empty description.
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
    """Replace a triage whose cluster is unreachable by one of the incident's files alone, with a warning.

    Raises ``error``, with alternatives in its hint, when it has another cause too, or when there are no files.
    """
    findings = error.findings if isinstance(error, Rejected) else (error,)
    for finding in findings:
        if isinstance(finding, (ClusterUnreachable, ClusterDenied, CredentialFailed)):
            finding.hint = f"{finding.hint}; or name another one with --kubeconfig FILE, or go without: --files-only"
    away = all(isinstance(finding, ClusterUnreachable) for finding in findings)
    if not away or not any(planned.facts.of(run.name).incident_files for run in planned.plan.runs):
        raise error
    message = f"{findings[0].message}; only the files of the incident are looked at"
    instead = replace(triage, kubeconfig=None, context=None, away_reason=findings[0].message)
    return instead, ClusterAway(message, hint="triage again when it answers, for what the files do not show")


async def check_clusters(plans: Iterable[RunPlan], deps: AgentDependencies, *, reused: Iterable[str] = ()) -> None:
    """Raise the error of an unreachable cluster, or ``Rejected`` for several; skips steps that are ``reused``."""
    done = set(reused)
    bodies = [step.body for plan in plans for step in plan.steps if step.id not in done]
    clusters = {body.cluster for body in bodies if isinstance(body, AgentBody) and body.cluster is not None}
    if not clusters:
        return
    from runner.runtime.cluster import grant_of

    findings: dict[str, RunnerError] = {}

    async def look(grant: ClusterGrant) -> None:
        try:
            await deps.cluster.check(grant)
        except RunnerError as error:
            findings[error.message] = error

    async with trio.open_nursery() as nursery:
        for grant in {grant_of(cluster) for cluster in clusters}:
            nursery.start_soon(look, grant)
    if findings:
        raise Rejected(findings.values())
