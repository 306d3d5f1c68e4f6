"""Several servers that the chart has put into a real cluster, with one PostgreSQL and workspaces in pods."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runner.cluster.pod_access import JOB_RIGHTS, RIGHTS, Right
from runner.ops.host.cluster_check import access_manifest
from tests.support import cluster, components, dockerd, needs, postgres, server_image
from tests.support.artifact_stores import KEYS, bucket, moto, s3_url
from tests.support.cluster.real import CLUSTER, NAMESPACE, Cluster
from tests.support.situations import until
from tests.test_chart import CHART, HELM, PLAIN

pytestmark = [
    *(CLUSTER.mark, needs.KUBECTL.mark, needs.POSTGRES.mark),
    *(pytest.mark.nightly, pytest.mark.timeout(1800)),
]

RELEASE = "runner"  # and its namespace
WAIT = 240.0  # seconds; a kubelet this old keeps the object of a pod that has ended for up to a minute
MANIFESTS = f"""\
apiVersion: runner/v1
kind: AgentType
metadata: {{name: worker}}
spec:
  agent: script
  script: {{path: agent.sh}}
  workspace: {{enabled: true, repo_source: {{type: none}}, base_image: "{dockerd.IMAGE}"}}
---
apiVersion: runner/v1
kind: IncidentRun
metadata: {{name: hello}}
spec: {{agent_type: worker}}
"""


class Servers:
    """The release ``runner`` in a cluster. ``url`` is the database's, ``chart`` what the release is of."""

    def __init__(self, real: Cluster, chart: Path) -> None:
        self.real = real
        self.chart = chart
        self.url = ""

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        """Answer of the administrator's kubectl, which must succeed."""
        return self._done(str(components.KUBECTL / "bin" / "kubectl"), *words, stdin=stdin)

    def helm(self, *words: str) -> str:
        return self._done(HELM, *words, stdin=None)

    def _done(self, *words: str, stdin: str | None) -> str:
        env = {"PATH": os.environ["PATH"], "KUBECONFIG": str(self.real.kubeconfig), "HOME": str(self.real.folder)}
        done = subprocess.run(words, input=stdin, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, number: int, *words: str) -> str:
        """What a command in one server's container prints."""
        return self.kubectl("-n", RELEASE, "exec", f"{RELEASE}-{number}", "--", *words)

    def ask(self, number: int, method: str, path: str, token: str, body: object = None) -> Any:
        return json.loads(self.run(number, *server_image.asking(method, path, token, body)))

    def bash(self, number: int, token: str, workspace: str, command: str) -> str:
        """What a command prints in a workspace, or the code of the refusal."""
        path = f"/workspaces/{workspace}/tools/bash"
        answer = self.ask(number, "POST", path, token, {"command": command})
        return str(answer.get("stdout", answer.get("code")))

    def are_ready(self) -> bool:
        found = json.loads(self.kubectl("-n", RELEASE, "get", "pods", "--output=json"))["items"]
        ready = [
            pod["metadata"]["name"]
            for pod in found
            if "deletionTimestamp" not in pod["metadata"]
            and any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", ()))
        ]
        return sorted(ready) == [f"{RELEASE}-0", f"{RELEASE}-1"]

    @contextmanager
    def reached(self) -> Iterator[None]:
        """Pods that are made in the block reach their node, and it them; those of workspaces must not."""
        self.real.open_network()
        try:
            yield
            until(self.are_ready, WAIT)
        finally:
            self.real.close_network()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Two servers of this checkout, installed with helm."""
    folder = tmp_path_factory.mktemp("servers")
    found = Servers(cluster.real_cluster(), folder / "chart")
    server_image.put(found.real.daemon, folder)
    with postgres.running() as database, found.real.reached(found.real.port, database.port):
        found.real.make_namespace(RELEASE)
        found.url = f"postgresql://postgres@{found.real.address}:{database.port}/{database.database()}"
        _prepare(found, folder)
        try:
            with found.reached():
                _install(found, folder)
            yield found
        finally:
            found.helm("uninstall", RELEASE, "-n", RELEASE)
            found.kubectl("delete", "namespace", RELEASE, "--wait=false")
            found.kubectl("delete", "persistentvolume", "home-0", "home-1", "--wait=false")
            until(lambda: found.real.kubectl("get", "pods", "-n", RELEASE, "--output=name") == "", WAIT)


def _prepare(servers: Servers, folder: Path) -> None:
    """Make what the chart refers to: the database's URL, volumes, manifests."""
    (folder / "manifests").mkdir()
    (folder / "manifests" / "all.runner.yaml").write_text(MANIFESTS)
    (folder / "manifests" / "agent.sh").write_text('#!/bin/sh\necho made > made\nprintf "made here\\n"\n')
    create = ("-n", RELEASE, "create")
    servers.kubectl(*create, "secret", "generic", "runner-database", f"--from-literal=url={servers.url}")
    servers.kubectl(*create, "configmap", "runs", f"--from-file={folder / 'manifests'}")
    for number in range(2):
        home = servers.real.folder / f"home-{number}"
        home.mkdir()
        home.chmod(0o777)  # a node's directory, whose owner no kubelet changes
        spec = {"capacity": {"storage": "20Gi"}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": str(home)}}
        volume = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": home.name}, "spec": spec}
        servers.kubectl("apply", "-f", "-", stdin=json.dumps(volume))


def _install(servers: Servers, folder: Path) -> None:
    chart = servers.chart
    shutil.copytree(CHART, chart)
    about = (chart / "Chart.yaml").read_text().splitlines(keepends=True)  # the built server does not know its version
    (chart / "Chart.yaml").write_text("".join(line for line in about if not line.startswith("kubeVersion")))
    repository, _, tag = server_image.TAG.partition(":")
    values = {
        "image": {"repository": repository, "tag": tag},
        "workspaces": {"namespace": NAMESPACE, "create": False},
        "manifests": "runs",
        "env": [  # the cluster has no proxy of its services
            {"name": "KUBERNETES_SERVICE_HOST", "value": servers.real.address},
            {"name": "KUBERNETES_SERVICE_PORT", "value": str(servers.real.port)},
        ],
    }
    (folder / "values.yaml").write_text(json.dumps(values))
    servers.helm("install", RELEASE, str(chart), "-n", RELEASE, "-f", str(folder / "values.yaml"), "--wait")


@pytest.fixture(scope="module")
def token(servers: Servers) -> str:
    return servers.run(0, "runner", "token", "create", "ci", "--scope", "admin").strip()


def test_the_servers_find_their_cluster_fit(servers: Servers) -> None:
    for number in range(2):
        assert "MISSING" not in servers.run(number, "runner", "cluster", "check")


def test_a_run_of_one_server_is_seen_by_the_other(servers: Servers, token: str) -> None:
    [run] = servers.ask(0, "POST", "/runs", token, {})["runs"]

    until(lambda: servers.ask(1, "GET", f"/runs/{run['id']}", token)["exit_code"] is not None, WAIT)

    assert servers.ask(1, "GET", f"/runs/{run['id']}", token)["exit_code"] == 0
    assert "made here" in servers.run(0, "runner", "runs", "logs", run["id"])


def test_a_workspace_outlives_its_server_and_is_used_where_it_is(servers: Servers, token: str) -> None:
    made = servers.ask(0, "POST", "/workspaces", token, {"image": dockerd.IMAGE})["id"]
    servers.bash(0, token, made, "echo kept > file")
    elsewhere = servers.bash(1, token, made, "cat file")

    with servers.reached():  # a pod that is made anew has the volume of the last one
        servers.kubectl("-n", RELEASE, "delete", "pod", f"{RELEASE}-0")
    moved = servers.bash(0, token, made, "cat file")
    _kill(servers)
    killed = servers.bash(0, token, made, "cat file")
    servers.ask(0, "DELETE", f"/workspaces/{made}?discard=true", token)

    assert (elsewhere, moved, killed) == ("workspace.state", "kept\n", "kept\n")
    until(lambda: servers.real.kubectl("get", "pods", "-n", NAMESPACE, "--output=name") == "", WAIT)


def _kill(servers: Servers) -> None:
    """Kill a server, and wait until the kubelet has started it anew."""
    with servers.real.daemon.client() as client:
        [container] = client.containers(filters={"name": f"k8s_server_{RELEASE}-0_"})
        client.kill(container["Id"], signal.SIGKILL)

    def restarted() -> bool:
        pod = json.loads(servers.kubectl("-n", RELEASE, "get", "pod", f"{RELEASE}-0", "--output=json"))
        [status] = pod["status"]["containerStatuses"]
        return bool(status["restartCount"] == 1 and status["ready"])

    until(restarted, WAIT)


def may(servers: Servers, verb: str, what: str, namespace: str) -> str:
    account = f"--as=system:serviceaccount:{RELEASE}:{RELEASE}"
    return servers.real.kubectl("auth", "can-i", verb, what, "-n", namespace, account).strip()


def named(rights: Sequence[Right]) -> set[tuple[str, str]]:
    """Rights as kubectl takes them."""
    return {
        (verb, f"{resource}/{sub}" if sub else f"{resource}.{group}" if group else resource)
        for verb, group, resource, sub in rights
    }


def test_the_account_may_do_what_pods_take_and_no_more(servers: Servers) -> None:
    needed = named(RIGHTS)
    refused = [
        *named(JOB_RIGHTS),
        ("get", "secrets"),
        ("create", "deployments.apps"),
        ("delete", "configmaps"),
        ("patch", "pods"),
    ]
    refused += [
        ("list", "nodes"),
        ("create", "rolebindings.rbac.authorization.k8s.io"),
        ("create", "serviceaccounts/token"),
    ]

    assert {one: may(servers, *one, NAMESPACE) for one in needed} == dict.fromkeys(needed, "yes")
    assert {one: may(servers, *one, NAMESPACE) for one in refused} == dict.fromkeys(refused, "no")
    assert {one: may(servers, *one, RELEASE) for one in needed} == dict.fromkeys(needed, "no")


def test_the_api_server_takes_each_plain_object(servers: Servers) -> None:
    """But for the budget, whose API is younger than this server."""
    documents = PLAIN.read_text().split("---\n")
    fit = [one for one in documents if "kind: PodDisruptionBudget" not in one]
    named = [line for one in fit for line in one.splitlines() if line.startswith("kind: ")]

    told = servers.kubectl("apply", "--dry-run=server", "--validate=true", "-f", "-", stdin="---\n".join(fit))

    assert len(fit) == len(documents) - 1
    assert told.count("(server dry run)") == len(named)


def test_runs_are_jobs_once_the_chart_says_so(servers: Servers, token: str) -> None:
    """The account of their workers is that of `runner cluster manifest`, and their image that of the servers."""
    place = s3_url(bucket()).replace("127.0.0.1", servers.real.address)
    variables = {
        **KEYS,
        "KUBERNETES_SERVICE_HOST": servers.real.address,
        "KUBERNETES_SERVICE_PORT": str(servers.real.port),
    }
    there = {"RUNNER_DATABASE_URL": servers.url, "RUNNER_ARTIFACTS": place, **variables}
    literals = [f"--from-literal={name}={value}" for name, value in there.items()]
    values = {
        "jobs": {"enabled": True},
        "artifacts": place,
        "env": [{"name": name, "value": value} for name, value in variables.items()],
    }
    changed = servers.chart.with_name("jobs.yaml")
    changed.write_text(json.dumps(values))
    servers.kubectl("apply", "-f", "-", stdin=access_manifest(NAMESPACE))
    servers.kubectl("-n", NAMESPACE, "create", "secret", "generic", "runner-worker", *literals)
    with servers.real.reached(moto()):
        with servers.reached():
            given = ("--reuse-values", "-f", str(changed), "--wait", "--timeout=10m")
            servers.helm("upgrade", RELEASE, str(servers.chart), "-n", RELEASE, *given)
        [run] = servers.ask(0, "POST", "/runs", token, {})["runs"]
        shown = servers.ask(0, "GET", f"/runs/{run['id']}", token)["status"]
        [job] = servers.kubectl("-n", NAMESPACE, "get", "jobs", "--output=name").split()
        until(lambda: servers.ask(0, "GET", f"/runs/{run['id']}", token)["exit_code"] is not None, WAIT)
        ended = servers.ask(1, "GET", f"/runs/{run['id']}", token)
        printed = servers.run(1, "runner", "runs", "logs", run["id"])
        until(lambda: servers.kubectl("-n", NAMESPACE, "get", "jobs,pods", "--output=name") == "", WAIT)
    servers.kubectl("-n", NAMESPACE, "delete", "secret", "runner-worker")

    assert (job, shown) == (f"job.batch/runner-{run['id']}", "pending")
    assert (ended["exit_code"], "made here" in printed) == (0, True)
    assert {one: may(servers, *one, NAMESPACE) for one in named(JOB_RIGHTS)} == dict.fromkeys(named(JOB_RIGHTS), "yes")
    assert may(servers, "get", "secrets", NAMESPACE) == "no"
