"""The documented variables that a sub-runner and an agent's own post-hook have in common."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID, uuid5

from runner.ports.provider import PATH, Paths
from runner.runtime.context import RunContext
from runner.steps.agent.plan import AgentBody

PROMPT = "prompt.md"  # among the run's files that a workspace can read
_RUNS = UUID("6a3f1c52-7f0e-5d0b-9a64-0d7c2b9e4f11")  # what ids of sessions are made in


def session_id(run: RunContext) -> str:
    """Return the name for the CLI's own session, where the CLI takes one: a UUID, the same at each call."""
    return str(uuid5(_RUNS, run.id))


def incident_id(run: RunContext) -> str:
    """Return the incident's id: its own, else that of the agent's environment, else the run's."""
    incident = run.plan.values.get("incident")
    known = incident.get("incidentId") if isinstance(incident, Mapping) else None
    if isinstance(known, str) and known.isprintable() and known:
        return known
    given = next((step.body.env for step in run.plan.steps if isinstance(step.body, AgentBody)), {})
    return run.fill(given["INCIDENT_ID"]) if "INCIDENT_ID" in given else run.id


def standard(run: RunContext, agent: str, paths: Paths) -> dict[str, str]:
    """Paths are those inside the workspace; keys and the host's environment are not among them."""
    return {
        "PATH": PATH,
        "LC_ALL": "C.UTF-8",
        "AGENT_CLI": agent,
        "AGENT_HOME": paths.home,
        "PROMPT_FILE": f"{paths.runner}/{PROMPT}",
        "WORKSPACE_DIR": paths.workspace,
        "INCIDENT_ID": incident_id(run),
        "RUN_ID": run.id,
        "SESSION_ID": session_id(run),
    }
