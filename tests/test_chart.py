"""The Helm chart of the server, and its plain manifests: what a cluster is asked for, before there is one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from ruamel.yaml import YAML

from runner import __version__
from runner.ops.host.cluster_check import access_manifest
from tests.support import components, needs
from tests.support.wheel import ROOT

CHART = ROOT / "docs" / "kubernetes" / "plan-runner"
PLAIN = CHART.parent / "server.yaml"
RIGHTS = CHART / "files" / "rights.yaml"
HELM = str(components.KUBECTL / "bin" / "helm")
HEADER = """\
# The server in a cluster, as `helm template runner docs/kubernetes/plan-runner --namespace runner` gives it. Before it
# come the namespace, and Secret `runner-database` with the database's `url`: docs/howto/deploy-the-server.md says how.
"""
EVERYTHING = """\
replicas: 3
image: {repository: registry.example.org/plan-runner, tag: "1", pullPolicy: Always, pullSecrets: [registry]}
hosts: [runner.example.org]
home: {size: 100Gi, storageClass: fast}
artifacts: s3://runs/shop
workspaces: {namespace: pods, create: false, runtimeClass: gvisor}
manifests: runs
tls: runner-tls
args: [--oidc-issuer, "https://login.example.org"]
env: [{name: AWS_REGION, value: eu-central-1}]
envFrom: [{secretRef: {name: models}}]
serviceAccount: {annotations: {eks.amazonaws.com/role-arn: arn}}
user: null
podAnnotations: {team: platform}
nodeSelector: {pool: servers}
tolerations: [{key: servers, operator: Exists}]
affinity: {nodeAffinity: {}}
networkPolicy: {from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: ingress-nginx}}}], ports: [443]}
serviceMonitor: {enabled: true, tlsConfig: {serverName: runner}}
"""

pytestmark = needs.KUBECTL.mark


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HELM, *words], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "HOME": "/nowhere"}
    )


def rendered(*words: str) -> str:
    done = helm("template", "runner", str(CHART), "--namespace", "runner", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(text: str) -> Iterator[dict[str, Any]]:
    yield from (one for one in YAML(typ="safe").load_all(text) if one is not None)


@pytest.fixture
def everything(tmp_path: Path) -> str:
    """The chart with each value other than its default."""
    (tmp_path / "values.yaml").write_text(EVERYTHING)
    return rendered("--values", str(tmp_path / "values.yaml"))


def test_the_plain_manifests_are_those_of_the_chart(pytestconfig: pytest.Config) -> None:
    lines = rendered().removeprefix("---\n").splitlines(keepends=True)
    text = HEADER + "".join(line for line in lines if not line.startswith("# Source: "))
    if pytestconfig.option.update_cases:
        PLAIN.write_text(text)

    assert PLAIN.read_text() == text


def test_the_account_may_do_what_the_provider_needs_and_nothing_else(pytestconfig: pytest.Config) -> None:
    [role] = [one for one in access_manifest("agents").split("---\n") if "kind: Role\nmetadata: {name: runner," in one]
    rules = [line.strip() for line in role.splitlines() if "apiGroups: [" in line]
    if pytestconfig.option.update_cases:
        RIGHTS.write_text("".join(f"{rule}\n" for rule in rules))
    roles = [one for one in objects(rendered()) if one["kind"] in ("Role", "ClusterRole")]

    assert RIGHTS.read_text().splitlines() == rules
    assert [(role["kind"], role["metadata"]["namespace"]) for role in roles] == [("Role", "agents")]
    assert roles[0]["rules"] == YAML(typ="safe").load("\n".join(rules))


@pytest.mark.parametrize("version", ["1.28", "1.37"])
def test_each_object_is_as_the_published_schema_has_it(version: str, everything: str) -> None:
    found = [*objects(rendered()), *objects(everything)]
    kinds = {one["kind"] for one in found}

    assert kinds >= {"StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy", "Role", "ServiceMonitor"}
    for one in found:
        if one["kind"] != "ServiceMonitor":  # which is not Kubernetes' own
            kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize(("version", "api"), [("1.20.2", "policy/v1beta1"), ("1.37.1-eks-3", "policy/v1")])
def test_the_budget_is_of_the_version_that_the_cluster_has(version: str, api: str) -> None:
    found = objects(rendered("--kube-version", version))

    assert [one["apiVersion"] for one in found if one["kind"] == "PodDisruptionBudget"] == [api]


def test_lint_finds_nothing(tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(EVERYTHING)
    for words in ((), ("--values", str(tmp_path / "values.yaml"))):
        done = helm("lint", "--strict", str(CHART), *words)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("replica=3", "replica"),
        ("workspaces.namespace=Agents", "workspaces.namespace"),
        ("image.pullPolicy=Sometimes", "image.pullPolicy"),
        ("user=0", "user"),
        ("artifacts=/var/lib", "artifacts"),
        ("networkPolicy.from=null", "from is required"),
        ("database=null", "database is required"),
    ],
)
def test_a_value_that_means_nothing_is_refused_by_name(value: str, words: str) -> None:
    done = helm("template", "runner", str(CHART), "--set", value)

    assert done.returncode != 0
    assert words in done.stderr


def test_the_pods_are_what_the_restricted_standard_admits(everything: str) -> None:
    for text in (rendered(), everything):
        [servers] = [one for one in objects(text) if one["kind"] == "StatefulSet"]
        pod = servers["spec"]["template"]["spec"]
        [server] = pod["containers"]

        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["securityContext"].get("runAsUser", 1) != 0
        assert server["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {kind for volume in pod["volumes"] for kind in volume if kind != "name"} <= {
            "emptyDir",
            "configMap",
            "secret",
        }
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    [namespace] = [one for one in objects(rendered()) if one["kind"] == "Namespace"]
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_nothing_secret_is_in_an_object() -> None:
    [servers] = [one for one in objects(rendered()) if one["kind"] == "StatefulSet"]
    env = {one["name"]: one for one in servers["spec"]["template"]["spec"]["containers"][0]["env"]}

    assert [one["kind"] for one in objects(rendered()) if one["kind"] == "Secret"] == []
    assert env["RUNNER_DATABASE_URL"]["valueFrom"] == {"secretKeyRef": {"name": "runner-database", "key": "url"}}


def test_the_chart_is_of_this_version() -> None:
    chart = YAML(typ="safe").load(CHART / "Chart.yaml")

    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
