"""A triage whose sandbox a pool has kept warm: incident, skills and cluster come into one that runs already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_pool import keeper, slots, wait_for_slots
from tests.cli.test_rehearse import claude
from tests.cli.test_triage import MARKED, REPORT, TURNS, place, record_of, triage
from tests.support.kubernetes import KUBECTL, POD, serving
from tests.support.situations import Project, step

__all__ = ["claude"]

SEES = """\
(
cat /incident/incident.json
touch /incident/new /workspace/incident.json
ls /skills/k8s-troubleshooter ~/.claude/skills
kubectl get pods -o name; kubectl logs %s; kubectl get secrets
) >/output/seen 2>&1
"""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.usefixtures("kubectl")
def test_a_triage_is_the_same_in_a_sandbox_that_was_kept_warm(
    project: Project, claude: Path, authority: Path, tmp_path: Path
) -> None:
    incident = project.folder / "INC-1"
    incident.mkdir()
    (incident / "incident.json").write_text('{"incidentId": "INC-1", "namespace": "payments"}')
    turns = [{"say": "I look.", "run": SEES % POD}, *TURNS[1:]]
    with serving(authority) as api:
        cluster = ("--toolchain", str(KUBECTL), "--kubeconfig", str(api.write(tmp_path / "kubeconfig")))
        where = (*place(project, "docker", claude), *cluster)

        def run() -> tuple[dict[str, Any], str]:
            done = triage(project, *where, turns=turns)
            assert done.code == 0, done.out + done.err
            return record_of(project), (incident / "output" / "seen").read_text()

        cold, seen_cold = run()
        (project.folder / "pool.runner.yaml").write_text(project.runner("triage", "-w", "INC-1", *where, "--print").out)
        with keeper(project, "--size", "1"):
            wait_for_slots(project, 1)
            warm, seen_warm = run()

    assert step(cold, "provision")["outcome"]["message"] == "docker, isolation namespaces"
    assert step(warm, "provision")["outcome"]["message"] == "docker, isolation namespaces, kept warm"
    assert seen_warm == seen_cold
    assert '"INC-1"' in seen_warm
    assert seen_warm.count("Read-only file system") == 2
    assert {"SKILL.md", "k8s-troubleshooter", "secrets"} <= {*seen_warm.replace('"', " ").split()}
    assert {**warm["observed"], "uid": 0} == {**cold["observed"], "uid": 0}
    assert (incident / "output" / "investigation.md").read_text().strip() == MARKED + REPORT.strip()
    assert slots(project) == []
