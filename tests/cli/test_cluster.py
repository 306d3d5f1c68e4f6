"""The real kubectl in a workspace, and a cluster behind the runner: what it reads, what is refused, and where the
credential is not."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from runner.core.errors import Rejected, StalePlan
from runner.core.settings import Settings
from runner.fake_model.script import Turn
from runner.ops.planning.make_plan import Request, make_plan
from runner.ops.planning.plan_file import save
from runner.ops.planning.saved_plan import load_plan
from runner.report.plan import render_plan
from tests.cli.test_agent_clis import CLIS, PLACE, places_with, work_off
from tests.support import dockerd
from tests.support.kubernetes import KUBECTL, POD, SECRET, TOKEN, Api, serving
from tests.support.needs import AGENTS
from tests.support.situations import Done, Project, document, until

HOUSING = {
    "local": f"providers: [local], toolchains: [{KUBECTL}]",
    "docker": f"providers: [docker], base_image: {dockerd.IMAGE}, toolchains: [{KUBECTL}, /usr, /etc/ssl]",
    "gvisor": f"providers: [gvisor], base_image: {dockerd.IMAGE}, toolchains: [{KUBECTL}, /usr, /etc/ssl]",
}

START = f"""
cd "$RUNNER_OUTPUT"
POD={POD}
ask() {{ name=$1; shift; timeout 30 "$@" > "$name.out" 2> "$name.err"; echo $? > "$name.code"; }}
"""
SHORT = """
ask pods kubectl get pods
ask logs kubectl logs $POD
ask secrets kubectl get secrets
ask delete kubectl delete pod $POD
ask exec kubectl exec $POD -- id
ask kubeconfig cat "$KUBECONFIG"
ask change sh -c 'echo x > "$KUBECONFIG"'
ask beside sh -c 'echo x > "${KUBECONFIG%/*}/other"'
ask mounted grep -E ' /root/.kube [^ ]+ ro[, ]' /proc/mounts
cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' > processes
find /run /tmp /root ~ -xdev -type f -exec cat {} + > files 2>/dev/null
"""
BY_DAY = f"""{SHORT}
ask describe kubectl describe pod $POD
ask may kubectl auth can-i get secrets
ask another kubectl auth can-i get configmaps --as=system:serviceaccount:payments:checkout
ask follow timeout 1 kubectl logs -f $POD
ask watch timeout 1 kubectl get pods --watch
"""
FULL = f"""{BY_DAY}
ask in_their_name kubectl get pods --as=nobody-at-all --as-group=x
ask wide kubectl get pods,deployments -o wide -A
ask events kubectl events
ask can kubectl auth can-i get pods
ask version kubectl version
ask ready kubectl get --raw /readyz
ask context kubectl config current-context
ask top kubectl top pods
ask secret kubectl get secret key -n kube-system -o yaml
ask odd kubectl get --raw /api/v1/namespaces/x/%2573ecrets
ask create kubectl create configmap made --from-literal=a=b
ask apply kubectl apply --validate=false -f made.json
ask forward kubectl port-forward pod/$POD 8080
"""
MADE = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "made"}, "data": {"a": "b"}}

SAID = {  # what each command ends with, and says
    "pods": (0, POD),
    "logs": (0, "out of memory"),
    "secrets": (1, "Error from server (Forbidden): runner: secrets are refused"),
    "delete": (1, "Error from server (Forbidden): runner: read only: `delete pods` is refused"),
    "another": (1, "Error from server (Forbidden): runner: impersonation (`--as`) is not forwarded"),
    "in_their_name": (1, "Error from server (Forbidden): runner: impersonation (`--as`) is not forwarded"),
    "exec": (1, "runner: read only: nothing can be run, attached or forwarded"),
    "kubeconfig": (0, "http://127.0.0.1:"),
    "change": (2, "cannot create /root/.kube/config: "),
    "beside": (2, "cannot create /root/.kube/other: "),
    "mounted": (0, " /root/.kube "),
    "wide": (0, "deployment.apps/checkout"),
    "describe": (0, "OOMKilled"),
    "events": (0, "No events found in payments namespace"),
    "can": (0, "yes"),
    "may": (1, "no - runner: this cluster is read-only here"),
    "version": (0, "Server Version: v1.31.2"),
    "ready": (0, "[+]etcd ok"),
    "follow": (124, "line 2"),
    "watch": (124, POD),
    "context": (0, "prod-eu"),
    "top": (0, "250m"),
    "secret": (1, "runner: secrets are refused"),
    "odd": (1, "runner: the path of the URL is not plain"),
    "create": (1, "runner: read only: `create configmaps` is refused"),
    "apply": (1, "runner: read only: `create configmaps` is refused"),
    "forward": (1, "runner: read only: nothing can be run, attached or forwarded"),
}


def write(project: Project, api: Api, script: str = "true", *, provider: str = "local") -> Path:
    """One run that reads a cluster, and its kubeconfig; its agent is a shell script."""
    if provider != "local":
        project.env["DOCKER_HOST"] = dockerd.host()
    (project.folder / "agent.sh").write_text(f"{START}echo '{json.dumps(MADE)}' > made.json\n{script}")
    (project.folder / "incident").mkdir(exist_ok=True)
    (project.folder / "incident" / "incident.json").write_text("{}")
    agent = f"""
        agent: script
        script: {{path: agent.sh}}
        workspace: {{enabled: true, repo_source: {{type: none}}, {HOUSING[provider]}}}
    """
    run = "agent_type: worker\nincident: {directory: incident, kubeconfig: kube.yaml}\n"
    project.write(document("AgentType", "worker", agent), document("IncidentRun", "triage", run))
    return api.write(project.folder / "kube.yaml")


def answers_of(project: Project, record: Mapping[str, Any]) -> dict[str, Done]:
    """What each command of the script printed, by its name."""
    found = {}
    for code in (project.directory(dict(record)) / "output").glob("*.code"):
        out, err = (code.with_suffix(suffix).read_text() for suffix in (".out", ".err"))
        found[code.stem] = Done(int(code.read_text()), out, err)
    return found


@pytest.mark.scenario("TRI-06", only="provider")
@pytest.mark.parametrize(
    ("provider", "script"),
    [
        pytest.param("local", BY_DAY, id="local"),
        pytest.param("local", FULL, id="local in full", marks=pytest.mark.nightly),
        pytest.param("docker", SHORT, id="docker"),
        pytest.param("docker", FULL, id="docker in full", marks=pytest.mark.nightly),
        pytest.param("gvisor", SHORT, id="gvisor"),
    ],
)
def test_kubectl_reads_a_cluster_and_gets_neither_secrets_nor_writes(
    project: Project, kubectl: Path, authority: Path, provider: str, script: str
) -> None:
    with serving(authority) as api:
        write(project, api, script, provider=provider)
        done, record = project.apply()

    assert done.code == 0, done.out + done.err
    found = answers_of(project, record)
    wrong = [name for name, one in found.items() if one.code != SAID[name][0] or SAID[name][1] not in one.out + one.err]
    assert wrong == [], found
    assert len(found) == script.count("ask ")
    assert "secrets" not in "".join(api.paths())
    assert set(api.paths("POST")) <= {"/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"}
    assert {one.method for one in api.asked} <= {"GET", "POST"}
    assert places_with(TOKEN, project.home) == []
    assert places_with(SECRET, project.home) == []
    assert b"KUBECONFIG=/root/.kube/config\n" in (project.directory(record) / "output" / "processes").read_bytes()
    cluster = record["cluster"]
    assert (cluster["context"], cluster["server"], cluster["namespace"]) == ("prod-eu", api.server, "payments")
    assert cluster["refused"]["list secrets"] == 1
    assert cluster["answered"]["get pods/log"] >= 1
    refused = sum(cluster["refused"].values())
    total = refused + sum(cluster["answered"].values())
    assert f"  cluster    prod-eu: {total} requests, {refused} refused (" in done.out


@pytest.mark.usefixtures("kubectl")
async def test_a_plan_pins_the_server_and_no_credential(project: Project, authority: Path) -> None:
    settings = project.settings()
    with serving(authority) as api:
        write(project, api)
        planned = await make_plan(project.folder, settings)
        save(planned, project.folder / "plan.json")
        api.write(project.folder / "kube.yaml", {"token": "renewed-0123456789"})
        renewed = await load_plan(project.folder / "plan.json", settings)
        api.write(project.folder / "kube.yaml", server="https://127.0.0.1:1")
        with pytest.raises(StalePlan, match=f'cluster of triage.server "{api.server}" -> "https://127.0.0.1:1"'):
            await load_plan(project.folder / "plan.json", settings)

    text = render_plan(planned.plan, width=200)
    words = f"  cluster prod-eu {api.server} namespace payments READ ONLY (get list watch logs; secrets refused)"
    assert words in text
    assert "/root/.kube ro" in text
    assert "cluster, read only" in text
    assert renewed.plan.digest == planned.plan.digest
    assert api.asked == []


@pytest.mark.usefixtures("kubectl")
@pytest.mark.parametrize(
    ("trouble", "error"), [("gone", "cluster.unreachable"), ("unknown", "cluster.denied")], ids=["server", "credential"]
)
def test_a_cluster_that_does_not_answer_ends_it_before_anything_is_made(
    project: Project, authority: Path, trouble: str, error: str
) -> None:
    with serving(authority) as api:
        write(project, api)
        api.tokens = set()
        done = project.runner("apply", ".")
    if trouble == "gone":
        done = project.runner("apply", ".")

    assert done.code == 4
    assert f"error[{error}]: cluster https://127.0.0.1:" in done.err
    assert "= hint: " in done.err
    assert project.runner("runs", "list", "--output", "json").out.strip() in ("[]", "")


MATRIX = """
agent_type: worker
matrix: {incident: [first, second]}
incident: {kubeconfig: kube.yaml, namespace: orders}
context: {preload: [permissions]}
"""


@pytest.mark.usefixtures("kubectl")
async def test_the_incidents_of_a_matrix_have_one_cluster(project: Project, authority: Path) -> None:
    settings = project.settings()
    with serving(authority) as api:
        write(project, api)
        first = project.manifest.read_text().split("---")[0]
        project.write(first, document("IncidentRun", "triage", MATRIX))
        for name in ("first", "second"):
            (project.folder / name).mkdir()
        planned = await make_plan(project.folder, settings)
        with pytest.raises(Rejected) as caught:
            await make_plan(project.folder, Settings.from_env({}), Request(untrusted=True))
        project.write(first, document("IncidentRun", "triage", MATRIX.replace("{kube", "{directory: first, kube")))
        twice = project.runner("plan", ".")

    assert [run.name for run in planned.plan.runs] == ["triage.1", "triage.2"]
    assert [(run.cluster.server, run.cluster.namespace) for run in planned.plan.runs if run.cluster] == [
        (api.server, "orders")
    ] * 2
    assert [step.network for run in planned.plan.runs for step in run.steps if step.id == "preload"] == [
        "cluster, read only"
    ] * 2
    assert planned.warnings == ()
    assert {one.code for one in caught.value.findings} == {"policy.untrusted"}
    told = "an untrusted manifest may not read a cluster with your kubeconfig"
    assert told in [one.message for one in caught.value.findings]
    assert twice.code == 2
    assert "`incident.directory` is written here and in the matrix" in twice.err


V1 = "client.authentication.k8s.io/v1"


def write_plug_in(project: Project, api: Api, folder: Path) -> Path:
    """A kubeconfig in ``folder`` whose credential a program gives that stands beside it, and that counts."""
    folder.mkdir(parents=True, exist_ok=True)
    answer = json.dumps({"apiVersion": V1, "kind": "ExecCredential", "status": {"token": TOKEN}})
    (folder / "give-token").write_text(f"#!/bin/sh\necho $$ >> '{folder}/asked'\necho '{answer}'\n")
    (folder / "give-token").chmod(0o755)
    entry = {"apiVersion": V1, "command": "./give-token", "interactiveMode": "IfAvailable", "args": ["--secret=s3cret"]}
    return api.write(folder / "config", {"exec": entry})


@pytest.mark.scenario("BEY-23")
@pytest.mark.scenario("TRI-06", only="provider")
@pytest.mark.parametrize("provider", ["local", "docker"])
def test_a_run_reads_a_cluster_whose_credential_a_program_gives(
    project: Project, kubectl: Path, authority: Path, provider: str
) -> None:
    """The kubeconfig in its usual place; the program runs once, outside, and what it gives is nowhere inside."""
    project.env["HOME"] = str(project.home / "me")
    with serving(authority) as api:
        write(project, api, SHORT, provider=provider)
        (project.folder / "kube.yaml").unlink()
        project.edit("kubeconfig: kube.yaml", "kubeconfig: ~/.kube/config")
        folder = project.home / "me" / ".kube"
        write_plug_in(project, api, folder)
        planned = project.runner("plan", ".")
        (folder / "asked").unlink()  # a plan says whether the cluster answers
        record = project.succeed()

    assert planned.code == 0, planned.err
    assert " credential from exec ./give-token" in " ".join(planned.out.split())
    found = answers_of(project, record)
    wrong = {name: one for name, one in found.items() if one.code != SAID[name][0]}
    assert (wrong, len(found)) == ({}, SHORT.count("ask "))
    assert len((folder / "asked").read_text().splitlines()) == 1
    (folder / "give-token").unlink()
    assert places_with(TOKEN, project.home) == []
    assert places_with("s3cret", project.home) == ["me/.kube/config"]
    assert [one.headers["authorization"] for one in api.asked] == [f"Bearer {TOKEN}"] * len(api.asked)


@pytest.mark.usefixtures("kubectl")
async def test_a_plan_pins_the_program_of_a_credential_and_does_not_run_it(project: Project, authority: Path) -> None:
    settings = project.settings()
    with serving(authority) as api:
        write(project, api)
        file = write_plug_in(project, api, project.home / "mine")
        project.edit("kubeconfig: kube.yaml", f"kubeconfig: {file}")
        planned = await make_plan(project.folder, settings)
        save(planned, project.folder / "plan.json")
        again = await load_plan(project.folder / "plan.json", settings)
        file.write_text(file.read_text().replace("s3cret", "other"))
        with pytest.raises(StalePlan, match="cluster of triage gets its credential with other arg"):
            await load_plan(project.folder / "plan.json", settings)
        file.write_text(file.read_text().replace("give-token", "is-not-there"))
        with pytest.raises(Rejected) as caught:
            await make_plan(project.folder, settings)

    assert planned.plan.digest == again.plan.digest
    assert "s3cret" not in (project.folder / "plan.json").read_text()
    assert not (file.parent / "asked").exists()
    assert [one.code for one in caught.value.findings] == ["cluster.credential"]


@pytest.mark.usefixtures("kubectl")
@pytest.mark.parametrize(
    ("place", "words"),
    [
        pytest.param("", "kube.yaml` is beside the manifest", id="beside"),
        pytest.param(".git", "kube.yaml` is in the repository of the manifest", id="repository"),
        pytest.param("incident", "config` is in the incident's directory", id="incident"),
    ],
)
def test_a_program_that_a_kubeconfig_of_others_names_is_not_run(
    project: Project, authority: Path, place: str, words: str
) -> None:
    with serving(authority) as api:
        file = write(project, api)
        if place == ".git":
            (project.folder / ".git").mkdir()
        incident = project.home / "INC-1"
        named = write_plug_in(project, api, incident if place == "incident" else project.home / "named")
        if place == "incident":
            project.edit("kubeconfig: kube.yaml", f"kubeconfig: {named}")
            project.edit("directory: incident", f"directory: {incident}")
        else:
            file.write_text(named.read_text().replace("./give-token", str(named.parent / "give-token")))
        done = project.runner("apply", ".")

    assert done.code == 3, done.err
    assert "error[kubeconfig.refused]: user `me` runs a program, and `" in done.err
    assert words in done.err
    assert "all.runner.yaml" in done.err
    assert not (named.parent / "asked").exists()


@pytest.mark.nightly
def test_rights_and_a_baseline_of_the_cluster_are_in_the_prompt(
    project: Project, kubectl: Path, authority: Path
) -> None:
    with serving(authority) as api:
        write(project, api, "ask pods kubectl get pods")
        project.edit("agent: script\n", "agent: script\n  skills: [k8s-troubleshooter]\n")
        project.edit(
            "agent_type: worker\n", "agent_type: worker\n  context: {preload: [incident, permissions, baseline]}\n"
        )
        record = project.succeed()

    prompt = (project.folder / "incident" / "prompt-sent.md").read_text()
    assert '"can_get_pods": true' in prompt
    assert '"can_get_nodes": false' in prompt
    assert "OOMKilled" in prompt
    assert answers_of(project, record)["pods"].code == 0
    assert record["cluster"]["answered"]["list pods"] >= 2
    assert "secrets" not in "".join(api.paths())
    assert places_with(TOKEN, project.home) == []
    permissions = json.loads((project.folder / "incident" / "output" / "incident_cluster_permissions.json").read_text())
    assert (permissions["cluster_name"], permissions["secrets_access_allowed"]) == ("prod-eu", False)


@pytest.mark.nightly
def test_a_watch_does_not_outlive_its_step(project: Project, kubectl: Path, authority: Path) -> None:
    with serving(authority) as api:
        write(project, api, "kubectl get pods --watch & kubectl logs -f $POD & wait")
        project.edit("agent: script\n", "agent: script\n  timeouts: {agent: 4s}\n")
        done, record = project.apply()

    assert done.code == 124, done.out + done.err
    assert (record["outcome"]["reason"], record["left_behind"]) == ("timeout", [])
    assert record["cluster"]["answered"]["watch pods"] == 1
    assert record["cluster"]["answered"]["get pods/log"] == 1


@pytest.mark.nightly
@pytest.mark.parametrize("name", CLIS)
async def test_the_shell_of_each_cli_reaches_the_cluster(
    project: Project, kubectl: Path, authority: Path, name: str
) -> None:
    AGENTS.require()
    ask = f"kubectl get pods > $RUNNER_OUTPUT/pods 2>&1; kubectl get secret a > $RUNNER_OUTPUT/secret 2>&1; echo {POD}"
    with serving(authority) as api:
        write(project, api)
        spec = f"agent: {name}\nworkspace: {{enabled: true, repo_source: {{type: none}}, providers: [local], "
        agent = document("AgentType", "worker", f"{spec}toolchains: [{PLACE}, {KUBECTL}]}}")
        project.write(agent, project.manifest.read_text().partition("---\n")[2] + "  prompt: look\n")
        record = await work_off(project, name, [Turn(run=ask), Turn(say="All done.")], bytearray())

    output = project.directory(record) / "output"
    assert record.exit_code == 0, record.outcome
    assert POD in (output / "pods").read_text()
    assert "runner: secrets are refused" in (output / "secret").read_text()
    assert record.cluster is not None
    assert record.cluster.refused == {"get secrets": 1}
    assert places_with(TOKEN, project.home) == []


@pytest.mark.usefixtures("kubectl")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_whoever_stops_a_login_leaves_no_program_behind(project: Project, authority: Path, number: int) -> None:
    with serving(authority) as api:
        write(project, api)
        file = write_plug_in(project, api, project.home / "mine")
        asked = file.parent / "asked"
        hangs = f"#!/bin/sh\necho $$ > '{asked}.half'\nmv {asked}.half {asked}\nsleep 600\n"
        (file.parent / "give-token").write_text(hangs)
        project.edit("kubeconfig: kube.yaml", f"kubeconfig: {file}")
        process = project.start("apply", ".")
        until(asked.exists)
        process.send_signal(number)
        _, err = process.communicate(timeout=30)

    assert process.returncode == 130
    assert "Traceback" not in err
    assert not Path(f"/proc/{asked.read_text().strip()}").exists()
