"""The skill's scripts against recorded clusters: what they print, what they never do, and what its files promise."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.skills.api_server import serving
from tests.skills.clusters import CLUSTERS, NOW

ROOT = Path(__file__).parents[2]
SKILL = ROOT / "skills/k8s-troubleshooter"
HERE = Path(__file__).parent
SYMPTOMS = sorted(path.stem for path in (SKILL / "references").glob("*.md"))


@dataclass(frozen=True)
class Case:
    """A script run against a cluster: its golden output is ``outputs/<name>.txt``."""

    cluster: str
    command: str
    code: int = 0

    @property
    def name(self) -> str:
        script, *words = self.command.split()
        return ".".join([self.cluster, script.removesuffix(".sh"), *(re.sub(r"\W+", "-", w).strip("-") for w in words)])


CASES = [
    *(Case(cluster, "incident_triage.sh", 3 if cluster == "no-rights" else 0) for cluster in CLUSTERS),
    Case("crash-loop-back-off", "incident_triage.sh --namespace payments --output json"),
    Case("crash-loop-back-off", "incident_triage.sh --resource deploy/checkout"),
    Case("refused", "incident_triage.sh --namespace payments"),
    Case("hostile", "incident_triage.sh -o json"),
    Case("crash-loop-back-off", "diagnose_pod.sh -n payments checkout-7c9d64bf5b-00001"),
    Case("crash-loop-back-off", "diagnose_pod.sh -n payments gone", 4),
    Case("pod-pending", "diagnose_pod.sh -n payments checkout-7c9d64bf5b-00001"),
    Case("refused", "diagnose_pod.sh -n payments checkout-7c9d64bf5b-00001"),
    Case("node-not-ready", "diagnose_node.sh node-a"),
    Case("node-not-ready", "diagnose_node.sh gone", 4),
    Case("no-rights", "diagnose_node.sh node-a", 3),
    Case("service-unreachable", "diagnose_service.sh -n payments checkout"),
    Case("service-unreachable", "diagnose_service.sh -n payments gone", 4),
    Case("refused", "diagnose_service.sh -n payments checkout"),
    Case("oom-killed", "diagnose_rollout.sh -n payments Deployment/checkout"),
    Case("rollout-stuck", "diagnose_rollout.sh -n payments deployment/cart"),
    Case("storage", "diagnose_storage.sh -n payments data-db-0"),
]


def run(command: str, folder: Path, *, state: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A script with the stand-in before any kubectl; its faults are in ``folder/faults``."""
    stand_in = folder / "bin"
    stand_in.mkdir(exist_ok=True)
    if not (stand_in / "kubectl").exists():
        (stand_in / "kubectl").symlink_to(HERE / "kubectl")
    script, *words = command.split()
    given = {
        "PATH": f"{stand_in}:{os.defpath}",
        "KUBE_STATE": str(state),
        "KUBE_FAULTS": str(folder / "faults"),
        "TRIAGE_NOW": str(int(NOW.timestamp())),
        "TMPDIR": str(folder),
    }
    argv = ["bash", str(SKILL / "scripts" / script), *words]
    return subprocess.run(argv, env=given | env, cwd=folder, capture_output=True, text=True, timeout=60)


def record(cluster: str, commands: Sequence[str], folder: Path) -> None:
    """Write ``states/<cluster>.txt``: what the real kubectl answers to every call of these commands."""
    real = shutil.which("kubectl")
    assert real is not None, "--update-cases records with the real kubectl"
    calls = folder / "calls"
    calls.mkdir()
    config = folder / "config"
    with serving(CLUSTERS[cluster]) as url:
        config.write_text(json.dumps(_config(url)))
        for command in commands:
            run(command, folder, state=calls, KUBE_REAL=real, KUBECONFIG=str(config), HOME=str(folder))
    texts = sorted(re.sub(r"\(uid-[^)]*\)", "", path.read_text()) for path in calls.glob("*.call"))
    (HERE / "states" / f"{cluster}.txt").write_text("".join(texts).replace(url, "https://10.2.0.1:6443"))


def _config(url: str) -> object:
    context = {"cluster": "prod-eu", "user": "reader", "namespace": "payments"}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "prod-eu", "cluster": {"server": url}}],
        "users": [{"name": "reader", "user": {}}],
        "contexts": [{"name": "prod-eu", "context": context}],
        "current-context": "prod-eu",
    }


def said(done: subprocess.CompletedProcess[str]) -> str:
    return f"{done.stdout}{done.stderr and '--- stderr' + chr(10)}{done.stderr}--- exit {done.returncode}\n"


@pytest.fixture(scope="session")
def recording(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The recording of a cluster, made anew with ``--update-cases``."""
    known = set[str]() if request.config.getoption("--update-cases") else set(CLUSTERS)

    def find(cluster: str) -> Path:
        if cluster not in known:
            known.add(cluster)
            record(cluster, [case.command for case in CASES if case.cluster == cluster], tmp_path_factory.mktemp(cluster))
        return HERE / "states" / f"{cluster}.txt"

    return find


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_recorded_cluster_is_reported_as_before(
    case: Case, recording: Callable[[str], Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    done = run(case.command, tmp_path, state=recording(case.cluster))

    golden = HERE / "outputs" / f"{case.name}.txt"
    if request.config.getoption("--update-cases"):
        golden.write_text(said(done))
    assert said(done) == golden.read_text()
    assert done.returncode == case.code
    assert not (tmp_path / "faults").exists(), (tmp_path / "faults").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]
