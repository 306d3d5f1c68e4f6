"""Runs as Jobs of a real cluster: workers of the server's image, with the rights of `runner cluster manifest`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.ops.runs.test_jobs import WORK, newest, submit
from tests.support import cluster, dockerd, server_image
from tests.support.artifact_stores import KEYS, bucket, moto, s3_url
from tests.support.cluster.real import CLUSTER, NAMESPACE, Cluster
from tests.support.needs import POSTGRES
from tests.support.situations import Project, until, write_files

pytestmark = [CLUSTER.mark, POSTGRES.mark, pytest.mark.nightly, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    found = cluster.real_cluster()
    server_image.put(found.daemon, tmp_path_factory.mktemp("image"))
    return found


def left(real: Cluster) -> list[str]:
    listed = real.kubectl("get", "jobs,pods,configmaps", "-n", NAMESPACE, "--output=name").split()
    return [one for one in listed if "runner-guest-" not in one and "kube-root-ca" not in one]


@pytest.fixture
def project(project: Project, real: Cluster, tmp_path: Path) -> Iterator[Project]:
    from tests.support.postgres import fresh_url

    url, place = fresh_url(), s3_url(bucket())
    manifest, variables = tmp_path / "access.yaml", tmp_path / "worker.env"
    manifest.write_text(project.runner("cluster", "manifest", "--namespace", NAMESPACE).out)
    real.kubectl("apply", "-f", str(manifest))
    port, store = urlsplit(url).port, moto()
    assert port is not None
    there = {
        "RUNNER_DATABASE_URL": url.replace("127.0.0.1", real.address),
        "RUNNER_ARTIFACTS": place.replace("127.0.0.1", real.address),
        "KUBERNETES_SERVICE_HOST": real.address,  # nobody forwards the address of the service here
        "KUBERNETES_SERVICE_PORT": str(real.port),
        **KEYS,
    }
    variables.write_text("".join(f"{name}={value}\n" for name, value in there.items()))
    real.kubectl("create", "secret", "generic", "runner-worker", "-n", NAMESPACE, f"--from-env-file={variables}")
    project.env |= {
        "RUNNER_DATABASE_URL": url,
        "RUNNER_ARTIFACTS": place,
        **KEYS,
        "KUBECONFIG": str(real.kubeconfig),
        "RUNNER_KUBERNETES_NAMESPACE": NAMESPACE,
        "RUNNER_WORKER_IMAGE": server_image.TAG,
    }
    with ExitStack() as stack:
        stack.enter_context(real.reached(port, store, real.port))
        yield project
        until(lambda: left(real) == [], 120)
    real.kubectl("delete", "secret", "runner-worker", "-n", NAMESPACE)


def has_begun(project: Project) -> bool:
    """Tell whether the agent's command runs: old kubelets take a minute to end a pod that only starts."""
    listed = project.json("runs", "list", "--all")
    return bool(listed) and "begun" in project.runner("runs", "logs", listed[0]["id"], "agent").out


def plays(project: Project, script: str, run: str = "") -> None:
    project.script(script, provider="kubernetes", workspace=f"base_image: {dockerd.IMAGE}", run=run)


def test_a_run_is_a_job_there_and_is_watched_and_delivered_from_here(project: Project) -> None:
    plays(project, WORK, run="snapshot: {}")

    done = project.runner("apply", str(project.folder), "--on", "kubernetes")

    assert done.code == 0, done.out + done.err
    assert "   | the agent works in a pod" in done.out
    assert "+work" in project.runner("runs", "patch", newest(project)["id"]).out


READS = """
import json, os, urllib.error, urllib.request
server = json.load(open(os.environ["KUBECONFIG"]))["clusters"][0]["cluster"]["server"]
listed = urllib.request.urlopen(f"{server}/api/v1/namespaces/agents/pods")
print("pods", len(json.load(listed)["items"]))
try:
    urllib.request.urlopen(f"{server}/api/v1/namespaces/agents/secrets")
except urllib.error.HTTPError as error:
    print("secrets", error.code)
"""


def test_a_job_there_reads_the_cluster_by_the_kubeconfig_of_workers(
    project: Project, real: Cluster, tmp_path: Path
) -> None:
    plays(project, f"python3 -c '{READS}'", run="incident: {directory: incident, kubeconfig: kube.yaml, access: read}")
    write_files(project.folder, {"incident/incident.json": "{}"})
    reachable, secret = project.folder / "kube.yaml", ("secret", "runner-clusters", "-n", NAMESPACE)
    reachable.touch(mode=0o600)
    reachable.write_text(real.kubeconfig.read_text().replace("127.0.0.1", real.address))
    real.kubectl("create", "secret", "generic", *secret[1:], f"--from-file=config={reachable}")
    project.env["RUNNER_WORKER_KUBECONFIG"] = "runner-clusters"

    done = project.runner("apply", str(project.folder), "--on", "kubernetes")

    assert done.code == 0, done.out + done.err
    assert "| pods 2" in done.out, done.out
    assert "| secrets 403" in done.out
    real.kubectl("delete", *secret)


def test_a_job_there_is_cancelled_from_here_and_leaves_nothing(project: Project) -> None:
    plays(project, "echo begun; sleep 300")
    applied = submit(project)
    until(lambda: has_begun(project), 120)

    applied.send_signal(signal.SIGINT)
    out, err = applied.communicate(timeout=180)

    assert (applied.returncode, "CANCELLED work" in out, "LEFT BEHIND" in out) == (130, True, False), out + err


def test_a_job_there_whose_image_nobody_has_is_told(project: Project) -> None:
    plays(project, WORK)
    project.env["RUNNER_WORKER_IMAGE"] = "127.0.0.1:1/none:1"

    done = project.runner("apply", str(project.folder), "--on", "kubernetes")

    assert (done.code, done.errors) == (4, ["job.not-started"]), done.err
    assert "its node cannot pull image `127.0.0.1:1/none:1`" in done.err


def test_a_job_there_that_is_deleted_takes_its_workspaces_along(project: Project, real: Cluster) -> None:
    plays(project, "echo begun; sleep 300")
    applied = submit(project)
    until(lambda: has_begun(project), 120)

    real.kubectl("delete", "job", "-n", NAMESPACE, f"runner-{newest(project)['id']}", "--wait=false")
    out, err = applied.communicate(timeout=180)

    assert (applied.returncode, "CANCELLED work" in out) == (130, True), out + err
