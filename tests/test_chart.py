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
WITH_JOBS = CHART.parent / "server-with-jobs.yaml"
JOBS = ("--set", "jobs.enabled=true,artifacts=s3://BUCKET/PREFIX")
HELM = str(components.KUBECTL / "bin" / "helm")
HEADER = """\
# The server in a cluster, as `helm template runner docs/kubernetes/plan-runner --namespace runner` gives it. Before it
# come the namespace, and Secret `runner-database` with the database's `url`: docs/howto/deploy-the-server.md says how.
"""
JOBS_HEADER = """\
# The same server whose runs are Jobs, with `--set jobs.enabled=true,artifacts=s3://BUCKET/PREFIX` besides: write the
# bucket. After it comes Secret `runner-worker` in namespace `agents`, as docs/howto/runs-as-jobs.md says.
"""
EVERYTHING = """\
replicas: 3
image: {repository: registry.example.org/plan-runner, tag: "1", pullPolicy: Always, pullSecrets: [registry]}
hosts: [runner.example.org]
home: {size: 100Gi, storageClass: fast}
artifacts: s3://runs/shop
workspaces: {namespace: pods, create: false, runtimeClass: gvisor, storageClass: fast, agentSandbox: true}
jobs: {enabled: true, secret: workers, image: "registry.example.org/worker:2", priorityClass: low, kubeconfig: clusters}
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


@pytest.mark.parametrize(("file", "header", "words"), [(PLAIN, HEADER, ()), (WITH_JOBS, JOBS_HEADER, JOBS)])
def test_the_plain_manifests_are_those_of_the_chart(
    file: Path, header: str, words: tuple[str, ...], pytestconfig: pytest.Config
) -> None:
    lines = rendered(*words).removeprefix("---\n").splitlines(keepends=True)
    text = header + "".join(line for line in lines if not line.startswith("# Source: "))
    if pytestconfig.option.update_cases:
        file.write_text(text)

    assert file.read_text() == text


@pytest.mark.parametrize(("account", "file"), [("runner", "rights"), ("runner-submitter", "job_rights")])
def test_the_rights_are_those_of_the_accounts_that_the_manifest_makes(
    account: str, file: str, pytestconfig: pytest.Config
) -> None:
    roles = access_manifest("agents").split("---\n")
    [role] = [one for one in roles if f"kind: Role\nmetadata: {{name: {account}," in one]
    rules = "".join(f"{line.strip()}\n" for line in role.splitlines() if "apiGroups: [" in line)
    place = CHART / "files" / f"{file}.yaml"
    if pytestconfig.option.update_cases:
        place.write_text(rules)

    assert place.read_text() == rules


def test_the_rights_for_sandboxes_come_with_the_chart_and_the_manifest_where_asked_for(
    everything: str, pytestconfig: pytest.Config
) -> None:
    plain, more = access_manifest("agents").splitlines(), access_manifest("agents", sandboxes=True).splitlines()
    rules = "".join(f"{line.strip()}\n" for line in more if line not in plain)
    place = CHART / "files" / "sandbox_rights.yaml"
    if pytestconfig.option.update_cases:
        place.write_text(rules)
    [role] = [
        one for one in objects(everything) if one["kind"] == "Role" and one["metadata"]["name"] == "runner-servers"
    ]
    [servers] = [one for one in objects(everything) if one["kind"] == "StatefulSet"]
    [server] = servers["spec"]["template"]["spec"]["containers"]

    assert place.read_text() == rules
    assert YAML(typ="safe").load(rules) == [
        {"apiGroups": ["agents.x-k8s.io"], "resources": ["sandboxes"], "verbs": ["create", "get", "list", "delete"]}
    ]
    assert role["rules"][-1:] == YAML(typ="safe").load(rules)
    assert {"name": "RUNNER_KUBERNETES_SANDBOXES", "value": "agent-sandbox"} in server["env"]


@pytest.mark.parametrize("made", ["the manifest", "the chart"])
def test_with_a_runtime_class_its_accounts_may_read_that_one_and_no_other(everything: str, made: str) -> None:
    text = access_manifest("agents", runtime_class="gvisor") if made == "the manifest" else everything
    roles = [one for one in objects(text) if one["kind"] == "ClusterRole"]
    [bound] = [one for one in objects(text) if one["kind"] == "ClusterRoleBinding"]

    assert [role["rules"] for role in roles] == [
        [{"apiGroups": ["node.k8s.io"], "resources": ["runtimeclasses"], "resourceNames": ["gvisor"], "verbs": ["get"]}]
    ]
    assert bound["roleRef"]["name"] == roles[0]["metadata"]["name"]
    assert {one["name"] for one in bound["subjects"]} >= {"runner"}


def granted(text: str) -> dict[str, list[str]]:
    """The names of the roles that each account has, in the only namespace where anything is granted."""
    found: dict[str, list[str]] = {}
    for one in objects(text):
        if one["kind"] in ("Role", "RoleBinding"):
            assert one["metadata"]["namespace"] == "agents"
        assert one["kind"] not in ("ClusterRole", "ClusterRoleBinding")
        for subject in one.get("subjects", ()):
            found.setdefault(f"{subject['namespace']}/{subject['name']}", []).append(one["roleRef"]["name"])
    return found


def test_an_account_may_do_what_it_needs_and_nothing_else() -> None:
    plain, with_jobs = rendered(), rendered(*JOBS)
    rules = {one["metadata"]["name"]: one["rules"] for one in objects(with_jobs) if one["kind"] == "Role"}

    assert granted(plain) == {"runner/runner": ["runner-servers"]}
    assert granted(with_jobs) == {
        "runner/runner": ["runner-servers", "runner-submitters"],
        "agents/runner": ["runner-servers"],
    }
    for name, file in (("runner-servers", "rights"), ("runner-submitters", "job_rights")):
        assert rules[name] == YAML(typ="safe").load(CHART / "files" / f"{file}.yaml")


def test_jobs_have_the_image_of_the_servers_or_another(everything: str) -> None:
    def variables(text: str) -> dict[str, str]:
        [servers] = [one for one in objects(text) if one["kind"] == "StatefulSet"]
        [server] = servers["spec"]["template"]["spec"]["containers"]
        assert "--on=kubernetes" in server["args"]
        return {one["name"]: one.get("value", "") for one in server["env"] if "WORKER" in one["name"]}

    assert variables(rendered(*JOBS)) == {
        "RUNNER_WORKER_IMAGE": f"plan-runner:{__version__}",
        "RUNNER_WORKER_SECRET": "runner-worker",
    }
    assert variables(everything) == {
        "RUNNER_WORKER_IMAGE": "registry.example.org/worker:2",
        "RUNNER_WORKER_SECRET": "workers",
        "RUNNER_WORKER_PRIORITY_CLASS": "low",
        "RUNNER_WORKER_KUBECONFIG": "clusters",
    }


@pytest.mark.parametrize("version", ["1.28", "1.37"])
def test_each_object_is_as_the_published_schema_has_it(version: str, everything: str) -> None:
    found = [*objects(rendered()), *objects(rendered(*JOBS)), *objects(everything)]
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
        ("jobs.enabled=true", "jobs.enabled takes artifacts"),
        ("jobs.queue=team-a", "queue"),
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
