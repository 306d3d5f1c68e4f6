"""Runs as Jobs, on the double: a worker that is a process of its own, with PostgreSQL and S3 between it and us."""

from __future__ import annotations

import shutil
import signal
import subprocess
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.ops.runs.test_two_hosts import stop_hearts
from tests.providers.test_kubernetes import Api
from tests.support import cluster, dockerd
from tests.support.artifact_stores import KEYS, bucket, s3_url
from tests.support.cluster.double import NAMESPACE
from tests.support.folder_contents import folder
from tests.support.needs import POSTGRES, ROOT
from tests.support.situations import REPO, Project, commit, document, until, write_files

pytestmark = [ROOT.mark, POSTGRES.mark, pytest.mark.slow]

IMAGE = "registry.example/worker:1"
JOBS = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
WORK = """
echo "the agent works in a pod"
echo work > made
echo told > "$RUNNER_OUTPUT/report.md"
"""


@pytest.fixture
def api() -> Iterator[Api]:
    dockerd.DOCKER.require()
    made = Api()
    made("POST", "/double/images", [IMAGE])
    yield made
    for what, usual in (("images", []), ("quota", ""), ("unschedulable", ""), ("held", False)):
        made("POST", f"/double/{what}", usual)
    until(lambda: made.pods() == [], 60)
    assert made("GET", JOBS)["items"] == []
    assert [name for name in names(made, "configmaps") if not name.startswith("runner-guest-")] == []


def names(api: Api, resource: str) -> list[str]:
    return [one["metadata"]["name"] for one in api("GET", f"/api/v1/namespaces/{NAMESPACE}/{resource}")["items"]]


@pytest.fixture
def project(project: Project, api: Api) -> Iterator[Project]:
    """A project of a host that has no docker, whose Jobs get the store and the keys from a Secret."""
    from tests.support.postgres import fresh_url

    shared = {"RUNNER_DATABASE_URL": fresh_url(), "RUNNER_ARTIFACTS": s3_url(bucket()), **KEYS}
    there = {**shared, "KUBECONFIG": str(cluster.double_kubeconfig()), "TOKEN": "not-in-any-plan"}
    data = {name: b64encode(value.encode()).decode() for name, value in there.items()}
    secret = f"/api/v1/namespaces/{NAMESPACE}/secrets"
    api("POST", secret, {"metadata": {"name": "runner-worker"}, "data": data})
    project.env |= {
        **shared,
        "KUBECONFIG": str(cluster.double_kubeconfig()),
        "RUNNER_KUBERNETES_NAMESPACE": NAMESPACE,
        "RUNNER_WORKER_IMAGE": IMAGE,
    }
    yield project
    api("DELETE", f"{secret}/runner-worker")


def plays(project: Project, script: str, **more: str) -> None:
    workspace = f"base_image: {dockerd.image_id()}\n" + more.pop("workspace", "")
    project.script(script, provider="kubernetes", workspace=workspace, **more)


def has_incident(project: Project, incident: str) -> None:
    project.edit("agent_type: worker", f"agent_type: worker\n  incident: {incident}")
    write_files(project.folder, {"incident/incident.json": '{"title": "slow"}', "incident/pods/web.log": "it is slow"})


def submit(project: Project, *arguments: str) -> subprocess.Popen[str]:
    return project.start("apply", str(project.folder), "--on", "kubernetes", *arguments)


def newest(project: Project) -> dict[str, Any]:
    found: dict[str, Any] = project.json("runs", "list", "--all")[0]
    return found


def test_a_saved_plan_that_is_a_job_is_watched_and_delivered_from_here(project: Project) -> None:
    """The secret of its agent is in the cluster only."""
    script = f'test "$TOKEN" = not-in-any-plan || exit 1\n{WORK}'
    agent = "secrets: [{name: TOKEN, from: {env: TOKEN}, steps: [agent]}]"
    plays(project, script, agent=agent, run="snapshot: {}")
    project.runner("plan", str(project.folder), "--save", "plan.json")
    project.manifest.unlink()

    done = project.runner("apply", "plan.json", "--on", "kubernetes")

    assert done.code == 0, done.out + done.err
    assert "   | the agent works in a pod" in done.out
    run = newest(project)["id"]
    assert not (project.home / "state" / "runs" / run).exists(), "it ran elsewhere"
    assert "+work" in project.runner("runs", "patch", run).out


def test_a_run_is_cancelled_followed_and_told_of_from_elsewhere_too(project: Project) -> None:
    plays(project, "echo begun; sleep 300")
    other = replace(project, home=folder(project.home / "other"))
    applied = submit(project)
    until(lambda: step_of(project, "agent") == "running", 120)
    attached = other.start("runs", "attach", newest(project)["id"])

    applied.send_signal(signal.SIGINT)
    out, err = applied.communicate(timeout=120)
    seen, _ = attached.communicate(timeout=60)

    assert (applied.returncode, attached.returncode) == (130, 130), out + err
    assert "CANCELLED work at agent" in out
    assert "CANCELLED work at agent" in seen
    assert "LEFT BEHIND" not in out
    assert newest(other)["status"] == "cancelled"


@pytest.mark.nightly
def test_a_stop_in_the_moment_in_which_the_worker_begins_is_passed_on(project: Project, api: Api) -> None:
    """It comes before the first event is seen here, and when the store has it already."""
    plays(project, "sleep 300")
    api("POST", "/double/held", True)
    applied = submit(project)
    until(lambda: has_worker(api), 30)
    applied.send_signal(signal.SIGSTOP)
    api("POST", "/double/held", False)
    until(lambda: project.json("runs", "list", "--all") != [], 60)

    applied.send_signal(signal.SIGINT)
    applied.send_signal(signal.SIGCONT)
    out, err = applied.communicate(timeout=60)

    assert (applied.returncode, "CANCELLED" in out) == (130, True), out + err
    assert newest(project)["status"] == "cancelled"


def has_worker(api: Api) -> bool:
    [pod] = api("GET", f"/api/v1/namespaces/{NAMESPACE}/pods")["items"] or [{"status": {}}]
    return bool(pod["status"].get("phase") == "Running")


def test_a_stop_before_the_worker_is_the_runner_leaves_no_run(project: Project, api: Api) -> None:
    plays(project, WORK)
    api("POST", "/double/held", True)
    applied = submit(project)
    until(lambda: has_worker(api), 30)

    applied.send_signal(signal.SIGINT)
    _, err = applied.communicate(timeout=60)

    assert (applied.returncode, "was stopped before it began" in err) == (130, True), err
    assert (newest(project)["status"], names(api, "pods")) == ("cancelled", [])


@pytest.mark.nightly
def test_a_stop_at_any_moment_is_heard_by_the_worker_or_leaves_no_run(project: Project) -> None:
    plays(project, "sleep 300")
    for tenths in range(2, 34, 3):
        applied = submit(project)
        before = {run["id"] for run in project.json("runs", "list", "--all")}
        with pytest.raises(subprocess.TimeoutExpired):
            applied.wait(timeout=1 + tenths / 10)
        applied.send_signal(signal.SIGINT)
        out, err = applied.communicate(timeout=60)

        new = [run for run in project.json("runs", "list", "--all") if run["id"] not in before]
        assert applied.returncode == 130, out + err
        assert [run["status"] for run in new] in ([], ["cancelled"], ["skipped"]), out + err


def step_of(project: Project, name: str) -> str:
    if not (listed := project.json("runs", "list", "--all")):
        return ""
    record = project.json("runs", "show", listed[0]["id"])
    return next((str(one["status"]) for one in record["steps"] if one["id"] == name), "")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        pytest.param(
            {"RUNNER_WORKER_IMAGE": "registry.example/never:1"},
            ["its node cannot pull image `registry.example/never:1`: ErrImageNeverPull", "RUNNER_WORKER_IMAGE"],
            id="image",
        ),
        pytest.param(
            {"RUNNER_WORKER_SECRET": "gone"},
            ['CreateContainerConfigError: secret "gone" not found', "RUNNER_WORKER_SECRET"],
            marks=pytest.mark.nightly,
            id="secret",
        ),
    ],
)
def test_a_job_that_never_starts_is_told_and_leaves_nothing(
    project: Project, setting: dict[str, str], words: list[str]
) -> None:
    plays(project, WORK)
    project.env |= setting

    done = project.runner("apply", str(project.folder), "--on", "kubernetes")

    assert (done.code, done.errors) == (4, ["job.not-started"]), done.err
    assert [word for word in words if word not in done.err] == []
    assert (newest(project)["status"], newest(project)["exit_code"]) == ("failed", 4)


@pytest.mark.parametrize(
    ("what", "said", "words"),
    [
        ("quota", 'pods "x" is forbidden: exceeded quota: small, used: pods=3', "exceeded quota: small, used: pods=3"),
        pytest.param(
            "unschedulable",
            "0/3 nodes are available: 3 Insufficient memory.",
            "0/3 nodes are available",
            marks=pytest.mark.nightly,
        ),
        pytest.param("queue", "", "it waits in queue `team-a`", marks=pytest.mark.nightly),
    ],
    ids=["quota", "no node", "queue"],
)
def test_what_a_job_waits_for_is_told_until_it_is_given_up(
    project: Project, api: Api, what: str, said: str, words: str
) -> None:
    plays(project, WORK)
    if what == "queue":
        project.edit("agent_type: worker", "agent_type: worker\n  project: all")
        spec = "root: .\nworkspace_isolation: true\nprotected_paths: []\nqueue: team-a\n"
        project.add(document("Project", "all", spec))
    else:
        api("POST", f"/double/{what}", said)
    applied = submit(project)
    assert applied.stderr is not None
    told = [applied.stderr.readline() for _ in range(2)]
    [job] = api("GET", JOBS)["items"]

    applied.send_signal(signal.SIGINT)
    _, err = applied.communicate(timeout=60)

    assert told[0].startswith("warning[job.waits]: the Job of run `work` waits: "), told
    assert words in told[0]
    assert "was stopped before it began" in err
    assert applied.returncode == 130
    queued = what == "queue"
    assert job["metadata"]["labels"].get("kueue.x-k8s.io/queue-name") == ("team-a" if queued else None)
    assert job["spec"].get("suspend", False) is queued


KUBECONFIG = "{directory: incident, kubeconfig: kube.yaml}"
UNFIT = [
    pytest.param({"RUNNER_DATABASE_URL": ""}, "", "is seen by one host only", id="store"),
    pytest.param({"RUNNER_ARTIFACTS": ""}, "", "no store of artifacts is named", id="no artifacts"),
    pytest.param({"RUNNER_ARTIFACTS": "file:///srv/a"}, "", "a Job sees nothing of `file:///srv/a`", id="folder"),
    pytest.param({"RUNNER_WORKER_IMAGE": ""}, "", "no image is named for the workers", id="worker image"),
    pytest.param({}, "on this host", "may get its workspace from `local`", id="provider"),
    pytest.param({}, REPO, "takes its code from `", id="code of this host"),
    pytest.param({}, "secret: file", "is in `/srv/token`, which a Job does not see", id="secret in a file"),
    pytest.param({}, "incident", "`picture` of incident `", id="incident that is no text"),
    pytest.param({}, "kubeconfig", "kubeconfig `", id="kubeconfig"),
    pytest.param({}, "script: large", "agent.sh` of run `work` is on this host", id="large script"),
]


@pytest.mark.parametrize(("setting", "change", "words"), UNFIT)
def test_what_a_job_would_not_see_is_refused_before_anything_is_made(
    project: Project, setting: dict[str, str], change: str, words: str
) -> None:
    agent = "secrets: [{name: TOKEN, from: {file: /srv/token}, steps: [agent]}]" if change == "secret: file" else ""
    plays(
        project,
        f"# {'x' * (70 << 10)}" if change == "script: large" else WORK,
        workspace=change if change == REPO else "",
        agent=agent,
    )
    if change == REPO:
        write_files(project.folder / "repo", {"a": "a"})
        commit(project.folder / "repo")
    if change in ("incident", "kubeconfig"):
        has_incident(project, "{directory: incident}" if change == "incident" else KUBECONFIG)
        write_files(project.folder, {"incident/picture": "\0" if change == "incident" else "text"})
        shutil.copy(cluster.double_kubeconfig(), project.folder / "kube.yaml")
    if change == "on this host":
        project.script(WORK)
    project.env |= setting

    done = project.runner("apply", str(project.folder), "--on", "kubernetes")

    assert (done.code, done.errors) == (2, ["job.unfit"]), done.err
    assert words in done.err
    assert "= hint:" in done.err
    assert ("--> " in done.err) == (change in ("incident", "kubeconfig", "secret: file"))


def test_another_place_a_server_and_an_unknown_context_are_refused(project: Project) -> None:
    plays(project, WORK)

    elsewhere = project.runner("apply", "--on", "nomad")
    server = project.runner("apply", "--on", "kubernetes", "--server", "https://runner.example")
    context = project.runner("apply", str(project.folder), "--on", "kubernetes:gone")

    assert (elsewhere.code, server.code, context.code) == (2, 2, 4)
    assert "`--on` is `nomad`" in elsewhere.err
    assert "`--on` does not work on a server" in server.err
    assert "has no context `gone`" in context.err


@pytest.mark.nightly
def test_a_worker_that_dies_is_told_of_and_its_run_recovered_from_here(project: Project, api: Api) -> None:
    plays(project, "sleep 300")
    applied = submit(project)
    until(lambda: step_of(project, "agent") == "running", 120)
    run = newest(project)["id"]
    [pod] = [name for name in names(api, "pods") if name.startswith(f"runner-{run}-") and len(name) == 25]
    api("POST", "/double/kill", pod)
    stop_hearts(project)

    _, err = applied.communicate(timeout=60)
    recovered = project.runner("recover", run)

    assert (applied.returncode, "error[job.lost]" in err, "exit code 247" in err) == (4, True, True), err
    assert f"{run} work: unknown" in recovered.out, recovered.err
    api("DELETE", f"{JOBS}/runner-{run}")  # which takes the pods of its workspaces along


@pytest.fixture
def clusters(api: Api) -> Iterator[str]:
    """A Secret with the kubeconfig of workers."""
    path, name = f"/api/v1/namespaces/{NAMESPACE}/secrets", "runner-clusters"
    config = b64encode(cluster.double_kubeconfig().read_bytes()).decode()
    api("POST", path, {"metadata": {"name": name}, "data": {"config": config}})
    yield name
    api("DELETE", f"{path}/{name}")


@pytest.mark.nightly
def test_a_job_reads_a_cluster_by_the_kubeconfig_that_its_worker_has(project: Project, clusters: str) -> None:
    plays(project, 'cat "$KUBECONFIG"', workspace="repo_source: {type: none}")
    has_incident(project, KUBECONFIG)
    shutil.copy(cluster.double_kubeconfig(), project.folder / "kube.yaml")
    submitted = ["apply", str(project.folder), "--on", "kubernetes"]
    project.env["RUNNER_WORKER_KUBECONFIG"] = "gone"

    missing = project.runner(*submitted)
    project.env["RUNNER_WORKER_KUBECONFIG"] = clusters
    done = project.runner(*submitted)
    (project.folder / "kube.yaml").write_text(cluster.double_kubeconfig().read_text().replace("agents", "others"))
    other = project.runner(*submitted)

    assert missing.code != 0
    assert "`/run/runner-kubeconfig/config` " in missing.err
    assert done.code == 0, done.out + done.err
    assert "double" in done.out.partition("current-context")[2].splitlines()[0]
    assert other.code != 0
    assert "namespace" in other.err


@pytest.mark.nightly
def test_an_incident_goes_to_its_job_and_what_was_found_comes_back(project: Project) -> None:
    work = 'cat /incident/pods/web.log; echo "because" > "$RUNNER_OUTPUT/report.md"; cat /workspace/incident.json'
    plays(project, work, workspace="repo_source: {type: none}")
    has_incident(project, "{directory: incident}")
    write_files(project.folder, {"incident/output/of-others": "earlier"})

    done = project.runner("apply", str(project.folder), "--on", "kubernetes")
    again = project.runner("apply", str(project.folder), "--on", "kubernetes")

    assert (done.code, again.code) == (0, 0), done.err + again.err
    assert "it is slow" in done.out
    incident = project.folder / "incident"
    assert (incident / "output" / "report.md").read_text() == "because\n"
    assert (incident / "prompt-sent.md").exists()
    assert (incident / "output" / "of-others").read_text() == "earlier"


@pytest.mark.nightly
def test_runs_that_need_each_other_are_jobs_in_their_order_with_their_outputs(project: Project) -> None:
    place = f"providers: [kubernetes], base_image: '{dockerd.image_id()}'"
    project.write(
        project.worker("asks", 'echo 42 > "$RUNNER_OUTPUT/answer"', place),
        project.worker("reads", "cat", place),
        document("IncidentRun", "first", "agent_type: asks\noutputs: {answer: {file: answer}}"),
        document(
            "IncidentRun", "second", "agent_type: reads\nneeds: [first]\nprompt: 'it was {{ outputs.first.answer }}'"
        ),
    )

    done = project.runner("apply", str(project.folder), "--on", "kubernetes")

    assert done.code == 0, done.out + done.err
    assert "it was 42" in done.out


@pytest.mark.nightly
def test_a_second_apply_with_the_same_key_makes_no_second_job(project: Project, api: Api) -> None:
    plays(project, WORK)
    first = project.runner("apply", str(project.folder), "--on", "kubernetes", "--run-key", "build-7")
    again = project.runner("apply", str(project.folder), "--on", "kubernetes", "--run-key", "build-7")

    assert (first.code, again.code) == (0, 0), again.err
    assert "warning[run.attached]" in again.err
    assert len(project.json("runs", "list", "--all")) == 1


def test_a_saved_plan_is_executed_under_the_id_that_somebody_chose_once(project: Project) -> None:
    """What a Job runs, for whoever has another scheduler."""
    project.script("echo done")
    project.runner("plan", str(project.folder), "--save", "plan.json")
    run = "7k3q9m2x4c6p"

    alone = replace(project, env={}).runner("execute", "plan.json")
    done = project.runner("execute", "plan.json", "--id", run)
    again = project.runner("execute", "plan.json", "--id", run)
    (project.folder / "plan.json").write_text((project.folder / "plan.json").read_text().replace("done", "other"))
    changed = project.runner("execute", "plan.json")

    assert (alone.code, alone.errors) == (2, ["job.unfit", "job.unfit"])
    assert (done.code, newest(project)["id"]) == (0, run), done.err
    assert (again.code, f"there is a run `{run}` already" in again.err) == (2, True)
    assert (changed.code, "is not a saved plan" in changed.err or "was changed" in changed.err) == (2, True)
