"""Where an incident is, as the manifest says or the incident itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.core.settings import Settings
from runner.ops.planning.make_plan import Request, make_plan
from runner.steps.preload.plan import PreloadBody
from tests.support.situations import document

TYPES = """
    agent: script
    script: {files: [{path: run.sh, content: 'true'}]}
    skills: [k8s-troubleshooter]
    workspace: {enabled: true, repo_source: {type: none}}
"""


@pytest.mark.parametrize(
    ("written", "told", "namespace"),
    [
        pytest.param(", namespace: payments", "orders", "payments", id="the manifest counts first"),
        pytest.param("", "orders", "orders", id="then the incident"),
        pytest.param("", None, None, id="nobody says"),
        pytest.param("", 7, None, id="no name"),
    ],
)
async def test_the_baseline_is_of_the_namespace_of_the_incident(
    tmp_path: Path, written: str, told: object, namespace: str | None
) -> None:
    (tmp_path / "incident").mkdir()
    (tmp_path / "incident" / "incident.json").write_text(json.dumps({"namespace": told}))
    run = f"""
        agent_type: worker
        incident: {{directory: incident, kubeconfig: kube.yaml{written}}}
        context: {{preload: [baseline]}}
    """
    documents = document("AgentType", "worker", TYPES), document("IncidentRun", "triage", run)
    (tmp_path / "all.runner.yaml").write_text("---\n".join(documents))

    planned = await make_plan(tmp_path, Settings.from_env({}), Request(offline=True))

    (body,) = (step.body for step in planned.plan.runs[0].steps if step.id == "preload")
    assert isinstance(body, PreloadBody)
    assert (body.namespace, body.baseline_seconds) == (namespace, 30)
