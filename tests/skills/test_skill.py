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
from typing import Any

import pytest
from ruamel.yaml import YAML

from runner.ops.triage.manifest import manifest_of
from runner.ops.triage.request import SYSTEM, TriageRequest
from runner.triage.sections import HEADINGS as TITLES
from runner.triage.sections import SECTIONS, bodies_of, is_empty, known_as, sections_of
from tests.skills.api_server import serving
from tests.skills.clusters import CLUSTERS
from tests.skills.objects import NOW
from tests.support.needs import SHELLCHECK

ROOT = Path(__file__).parents[2]
SKILL = ROOT / "skills/k8s-troubleshooter"
HERE = Path(__file__).parent
CRASHING = HERE / "states/crash-loop-back-off.txt"
SYMPTOMS = sorted(path.stem for path in (SKILL / "references").glob("*.md"))


def by_day(rows: Sequence[tuple[str, ...]]) -> list[Any]:
    """Every fourth of the rows, and the others by night."""
    return [pytest.param(*row, marks=() if n % 4 == 0 else pytest.mark.nightly) for n, row in enumerate(rows)]


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
    Case("healthy", "incident_triage.sh --resource deployments/checkout"),
    Case("refused", "incident_triage.sh --namespace payments"),
    Case("hostile", "incident_triage.sh -o json"),
    Case("crash-loop-back-off", "diagnose_pod.sh -n payments checkout-7c9d64bf5b-00001"),
    Case("crash-loop-back-off", "diagnose_pod.sh -n payments gone", 4),
    Case("private-key", "incident_triage.sh -o json"),
    Case("init-hangs", "diagnose_pod.sh -n payments alone"),
    Case("init-hangs", "incident_triage.sh --resource cronjob/report"),
    Case("node-problems", "diagnose_node.sh node-a"),
    Case("cron-jobs", "incident_triage.sh -n payments --resource cronjob/missed"),
    Case("argo-rollout", "diagnose_rollout.sh -n payments Rollout/checkout"),
    Case("cluster-dns", "incident_triage.sh -n payments"),
    Case("cpu-throttling", "diagnose_pod.sh -n payments checkout-7c9d64bf5b-00001"),
    Case("no-metrics", "diagnose_pod.sh -n payments checkout-7c9d64bf5b-00009", 4),
    Case("no-metrics", "diagnose_pod.sh -n payments checkout-7c9d64bf5b-00001"),
    Case("many-events", "incident_triage.sh -o json"),
    Case("many-containers", "diagnose_pod.sh -n payments wide"),
    Case("private-key", "diagnose_pod.sh -n payments checkout-7c9d64bf5b-00001"),
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


def transcript(done: subprocess.CompletedProcess[str]) -> str:
    return f"{done.stdout}{done.stderr and '--- stderr' + chr(10)}{done.stderr}--- exit {done.returncode}\n"


@pytest.fixture(scope="session")
def recording(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The recording of a cluster, made anew with ``--update-cases``."""
    known = set[str]() if request.config.getoption("--update-cases") else set(CLUSTERS)

    def find(cluster: str) -> Path:
        if cluster not in known:
            known.add(cluster)
            commands = [case.command for case in CASES if case.cluster == cluster]
            record(cluster, commands, tmp_path_factory.mktemp(cluster))
        return HERE / "states" / f"{cluster}.txt"

    return find


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if number % 4 == 0 else pytest.mark.nightly)
        for number, case in enumerate(CASES)
    ],
)
def test_a_recorded_cluster_is_reported_as_before(
    case: Case, recording: Callable[[str], Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    done = run(case.command, tmp_path, state=recording(case.cluster))

    golden = HERE / "outputs" / f"{case.name}.txt"
    if request.config.getoption("--update-cases"):
        golden.write_text(transcript(done))
    assert transcript(done) == golden.read_text()
    assert done.returncode == case.code
    assert not (tmp_path / "faults").exists(), (tmp_path / "faults").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_a_cluster_that_is_not_there_is_told_from_one_without_symptoms(tmp_path: Path) -> None:
    state = tmp_path / "state"
    words = "The connection to the server 10.2.0.1:6443 was refused - did you specify the right host or port?"
    noise = """! E1122 18:00:47.070686 19742 memcache.go:265] "Unhandled Error" err="connection refused"\n""" * 5
    pods = _key("get pods --all-namespaces --field-selector status.phase!=Succeeded -o", "pods")
    state.write_text(f"$ {pods}\n{noise}! {words}\n? 1\n")

    done = run("incident_triage.sh", tmp_path, state=state)

    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.strip().endswith(f"be asked: {words}")


KEY = "-----BEGIN EC PRIVATE KEY-----"
BODY = "MHcCAQEEIIrYSSNQFaA2Hwf1duRSxKtLYX5CB04fSeQ6tF1aY/PuoAoGCCqGSM49"
END = "-----END EC PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        pytest.param(f'a\nm "{KEY}\\nx\\n{END}"\nb', 'a\nm "***"\nb', id="in one line"),
        pytest.param(f'"{KEY}{END} and {KEY}x{END}"\t"b"', '"*** and ***"\t"b"', id="twice in one value"),
        pytest.param(f'"x {KEY}\\n{BODY}"\t"b"\nP\tc', '"x ***"\t"b"\nP\tc', id="a value that is cut off"),
        pytest.param(f"a\n{KEY}\n{BODY}\neA==\n{END}\nb", "a\n***\nb", id="over lines"),
        pytest.param(f"a\n{KEY}\nwhat follows\nfails", "a\n***\nwhat follows\nfails", id="a beginning and no key"),
        pytest.param(f"a\n{KEY}\n{BODY}\nit fails", "a\n***\nit fails", id="no end"),
        pytest.param(f"{BODY}\neA==\n{END}\nb", "***\nb", id="no beginning"),
        pytest.param(f"{BODY}\n{BODY}\nb", "***\nb", id="neither"),
        pytest.param(f"{BODY[:20]}\nit fails\n{BODY}", f"{BODY[:20]}\nit fails\n{BODY}", id="words that are no key"),
        pytest.param(f"1 {KEY}\n1 {BODY}\n2 ok", "1 ***\n1 ***\n2 ok", id="lines with a prefix"),
        pytest.param(f"secret: {KEY}\n{BODY}\n{END}\nb", "secret: ***\nb", id="called a secret"),
        pytest.param("-----BEGIN OPENSSH PRIVATE KEY-----\nb c", "***\nb c", id="another kind"),
        pytest.param("password='a b' token=abc x", "password='*** b' token=*** x", id="values"),
        pytest.param("eyJhbGciOi.eyJzdWIi.c2ln eyJhb. eyJhbGciOi", "*** eyJhb. eyJhbGciOi", id="web tokens"),
        pytest.param("AKIAABCDEFGHIJKLMNOP Bearer abcdefghij", "*** Bearer ***", id="words"),
    ],
)
def test_a_mask_takes_what_it_masks_and_nothing_beside_it(text: str, wanted: str, tmp_path: Path) -> None:
    """A range over lines took every later line of the cluster with a key that stood in one."""
    program = f"source {SKILL}/scripts/common.sh; clean {tmp_path}/told"

    done = subprocess.run(["bash", "-c", program], input=f"{text}\n", capture_output=True, text=True)

    assert (done.stdout, done.stderr) == (f"{wanted}\n", "")
    assert (tmp_path / "told").exists() == ("***" in wanted)


LONG = ["secret", "eyJ", "token: x ", "://a", "bearer aaaaaaaa ", f"{KEY}x", "A"]


@pytest.mark.parametrize("word", by_day([(word,) for word in LONG]))
def test_a_long_line_costs_little_and_is_cut(word: str, tmp_path: Path) -> None:
    """A pattern that is tried at each character took half a minute for a line of 200 kB."""
    program = f"source {SKILL}/scripts/common.sh; clean {tmp_path}/told"
    text = (word * (400_000 // len(word)) + "\n") * 5 + "the end\n"

    done = subprocess.run(["bash", "-c", program], input=text, capture_output=True, text=True, timeout=20)

    assert len(done.stdout) < 1_000_000
    assert done.stdout.endswith("the end\n")


def test_an_output_that_cannot_be_masked_is_no_empty_cluster(tmp_path: Path) -> None:
    broken = tmp_path / "bin"
    broken.mkdir()
    (broken / "awk").write_text('#!/bin/sh\ncase "$*" in *mask.awk*) exit 2 ;; esac\nexec /usr/bin/awk "$@"\n')
    (broken / "awk").chmod(0o755)

    done = run("incident_triage.sh", tmp_path, state=CRASHING)

    assert (done.returncode, done.stdout) == (3, "")
    assert "no pods could be read (failed)" in done.stderr


def _key(words: str, template: str) -> str:
    """A call as the stand-in writes it down: the template by its name and checksum."""
    path = SKILL / "scripts/templates" / f"{template}.gotmpl"
    [total, *_] = subprocess.run(["cksum"], input=path.read_bytes(), capture_output=True, check=True).stdout.split()
    return f"{words} {path.name}@{total.decode()}"


def test_calls_that_hang_are_cut_off_and_named(tmp_path: Path) -> None:
    done = run("incident_triage.sh --timeout 1", tmp_path, state=CRASHING, KUBE_SLOW="get nodes,namespaces")

    assert done.returncode == 0
    assert "crash-loop-back-off  Deployment/checkout" in done.stdout
    assert "  late: kubectl get nodes,namespaces\n" in done.stdout
    assert "of what could be read" in done.stdout


def test_pods_that_do_not_come_in_time_are_no_empty_cluster(tmp_path: Path) -> None:
    done = run("incident_triage.sh --timeout 1", tmp_path, state=CRASHING, KUBE_SLOW="get pods")

    assert (done.returncode, done.stdout) == (3, "")
    assert "no pods could be read (late): it said nothing" in done.stderr


def test_what_a_huge_cluster_prints_is_bounded_and_says_what_it_leaves_out() -> None:
    printed = (HERE / "outputs/huge.incident_triage.txt").read_text()

    assert len(printed) < 16_000
    assert "25 more: narrow with -n NS or --resource KIND/NAME" in printed
    assert "33 more" in printed


def test_no_output_holds_a_credential_or_a_forged_object() -> None:
    printed = "".join(path.read_text() for path in (HERE / "outputs").iterdir())

    assert not re.search(r"hunter2|SECRETKEY|c2hvcnQ|BEGIN|abcdefghijkl|eyJhbG|u:pw|of-the-env|\x1b", printed)
    assert "kube-system/forged" not in printed
    forged = "".join(
        path.read_text() for name in ("hostile", "forged") for path in (HERE / "outputs").glob(f"{name}.*")
    )
    assert "kube-system  " not in forged
    assert "curl evil" not in forged


SHOWS_NO_ENVIRONMENT = {"nodes", "node", "resourcequota,limitrange", "ingress", "hpa", "httproute", "gateway"}
SHOWS_NO_ENVIRONMENT |= {"role", "clusterrole", "certificate"}


def test_no_next_step_prints_the_environment_of_a_container() -> None:
    """As ``describe`` of a pod does, and of everything that has a template of one."""
    steps = [path.read_text().partition("\nNext steps\n")[2] for path in (HERE / "outputs").glob("*triage*")]
    pages = [path.read_text() for path in [SKILL / "SKILL.md", *(SKILL / "references").glob("*.md")]]

    described = re.findall(r"^ +(?:kubectl|[\w.]+/).* describe ([\w,]+)", "\n".join(steps + pages), re.MULTILINE)
    assert len(described) > 10
    assert set(described) <= SHOWS_NO_ENVIRONMENT


def test_a_thousand_equal_events_hide_no_other() -> None:
    told = json.loads((HERE / "outputs/many-events.incident_triage.o.json.txt").read_text().partition("--- exit")[0])

    seen = {(one["reason"], one["workload"]): one["objects"] for one in told["events"]}
    assert seen["BackOff", "Deployment/checkout"] == 3
    assert seen["BackOff", "Pod/checkout-*"] == 297
    assert {"SystemOOM", "FailedScheduling"} <= {reason for reason, _ in seen}


@pytest.mark.parametrize(
    ("schedule", "at", "wanted"),
    [
        ("* * * * *", "2026-11-21T02:52:30Z", "2026-11-21T02:52:00Z"),
        ("*/15 * * * *", "2026-11-21T02:52:00Z", "2026-11-21T02:45:00Z"),
        ("5-50/20 * * * *", "2026-11-21T02:52:00Z", "2026-11-21T02:45:00Z"),
        ("10/20 * * * *", "2026-11-21T02:52:00Z", "2026-11-21T02:50:00Z"),
        ("0 3 * * *", "2026-11-21T02:52:00Z", "2026-11-20T03:00:00Z"),
        ("0 0 * * MON", "2026-11-21T02:52:00Z", "2026-11-16T00:00:00Z"),
        ("0 0 * * 1-5", "2026-11-22T02:52:00Z", "2026-11-20T00:00:00Z"),
        ("0 0 13 * 5", "2026-11-21T02:52:00Z", "2026-11-20T00:00:00Z"),
        ("0 0 13 * *", "2026-11-21T02:52:00Z", "2026-11-13T00:00:00Z"),
        ("30 1 1 jan,jul *", "2026-11-21T02:52:00Z", "2026-07-01T01:30:00Z"),
        ("0 0 29 2 *", "2028-03-01T00:00:00Z", "2028-02-29T00:00:00Z"),
        ("0 0 29 2 *", "2026-11-21T02:52:00Z", ""),
        ("@hourly", "2026-11-21T02:52:00Z", "2026-11-21T02:00:00Z"),
        ("@weekly", "2026-11-21T02:52:00Z", "2026-11-15T00:00:00Z"),
        ("59 23 31 12 ?", "2027-01-01T00:00:00Z", "2026-12-31T23:59:00Z"),
        ("H/5 * * * *", "2026-11-21T02:52:00Z", ""),
        ("60 * * * *", "2026-11-21T02:52:00Z", ""),
        ("*/0 * * * *", "2026-11-21T02:52:00Z", ""),
        ("* * * *", "2026-11-21T02:52:00Z", ""),
        ("@every 1h", "2026-11-21T02:52:00Z", ""),
        ("x\\ny", "2026-11-21T02:52:00Z", ""),
    ],
)
def test_when_a_schedule_was_last_due(schedule: str, at: str, wanted: str) -> None:
    program = f'BEGIN {{ t = last_due("{schedule}", epoch("{at}")); if (t) printf "%s", moment(t) }}'
    files = [word for name in ("lib", "cron") for word in ("-f", str(SKILL / f"scripts/{name}.awk"))]

    done = subprocess.run(["awk", *files, "-f", "-"], input=program, capture_output=True, text=True)

    assert (done.stdout, done.stderr) == (wanted, "")


@pytest.mark.parametrize("path", sorted((HERE / "outputs").glob("*json*")), ids=lambda path: path.stem)
def test_json_output_is_json(path: Path) -> None:
    told = json.loads(path.read_text().partition("--- exit")[0])

    assert told["version"] == 1
    assert {one["reference"] for one in told["symptoms"]} <= {f"references/{name}.md" for name in SYMPTOMS}
    fates = {call["command"].split(" --")[0].split(" get ")[-1]: call["fate"] for call in told["calls"]}
    assert fates.pop("httproutes.gateway.networking.k8s.io,gateways.gateway.networking.k8s.io") == "absent"
    assert (set(fates.values()), told["blast_radius"]["complete"]) == ({"ok"}, True)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("incident_triage.sh --namespace 'a;b'", "is no name of a namespace"),
        ("incident_triage.sh --since never", "is no duration"),
        ("incident_triage.sh --output yaml", "valid: text, json"),
        ("incident_triage.sh --resource checkout", "is no KIND/NAME"),
        ("incident_triage.sh --fix", "is no option"),
        ("diagnose_pod.sh checkout", "wanted: -n NS POD"),
        ("diagnose_rollout.sh -n payments service/checkout", "statefulset/NAME"),
        ("validate_report.sh", "wanted: FILE"),
        ("validate_report.sh gone.md", "cannot be read"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_is_wanted(command: str, words: str, tmp_path: Path) -> None:
    done = run(command, tmp_path, state=tmp_path)

    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert not (tmp_path / "faults").exists()


@pytest.mark.parametrize(
    "call", ["delete pod x", "get secrets", "get pods,secret/x", "rollout undo deploy/x", "exec x"]
)
def test_the_scripts_cannot_call_what_writes_or_reads_a_secret(call: str, tmp_path: Path) -> None:
    program = f"source {SKILL}/scripts/common.sh; work={tmp_path}; kube x {call}"

    done = subprocess.run(["bash", "-c", program], env={"PATH": os.defpath}, capture_output=True, text=True)

    assert done.returncode == 70
    assert call in done.stderr


WRITES = "error: a command that is not read only"
SECRET = "error: a command that reads a secret"
CREDENTIAL = "error: something that looks like a credential"


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one that the quickstart writes."""
    output = tmp_path_factory.mktemp("output")
    incident = ROOT / "manifests/quickstart/incident"
    env = {"PATH": os.environ["PATH"], "RUNNER_OUTPUT": str(output), "RUNNER_INCIDENT": str(incident)}
    subprocess.run(["bash", ROOT / "manifests/quickstart/triage.sh"], check=True, env=env, stdout=subprocess.DEVNULL)
    return output / "investigation.md"


def test_the_report_of_the_quickstart_is_valid(tmp_path: Path, report: Path) -> None:
    done = run(f"validate_report.sh -o json {report}", tmp_path, state=tmp_path)

    told = json.loads(done.stdout)
    assert done.returncode == 0
    assert (told["valid"], told["sections"], told["facts"]) == (True, 7, 12)


FURTHER = [
    ("- 02:51:40", "- `kubectl get secret db -o yaml`\n- 02:51:40", f"{SECRET}, line 33"),
    ("- 02:51:40", "- `kubectl get -n x -o yaml pods,secrets`\n- 02:51:40", f"{SECRET}, line 33"),
    ("- 02:51:40", "- `kubectl describe Secret/db`\n- 02:51:40", f"{SECRET}, line 33"),
    ("- 02:51:40", "- `kubectl get --raw /api/v1/namespaces/x/secrets`\n- 02:51:40", f"{SECRET}, line 33"),
    ("- 02:51:40", "- `kubectl config view --raw`\n- 02:51:40", f"{SECRET}, line 33"),
    ("- 02:51:40", "- `oc whoami -t`\n- 02:51:40", f"{SECRET}, line 33"),
    ("- 02:51:40", "- `kubectl get secret db` (refused)\n- 02:51:40", ""),
    ("- 02:51:40", "- `kubectl get pods secret | grep secret`\n- `kubectl get externalsecrets`\n- 02:51:40", ""),
    ("- 02:51:40", "- `oc delete pod y`\n- 02:51:40", f"{WRITES} (delete), line 33"),
    ("- 02:51:40", "- `oc adm drain y`\n- 02:51:40", f"{WRITES} (adm drain), line 33"),
    ("- 02:51:40", "- `k delete pod y`\n- 02:51:40", f"{WRITES} (delete), line 33"),
    ("- 02:51:40", "- `k get po; sudo k scale deploy x`\n- 02:51:40", f"{WRITES} (scale), line 33"),
    ("- 02:51:40", "- `bash -c 'kubectl delete pod y'`\n- 02:51:40", f"{WRITES} (delete), line 33"),
    ("- 02:51:40", "- `kubectl -v 6 delete pod y`\n- 02:51:40", f"{WRITES} (delete), line 33"),
    ("- 02:51:40", "- `kubectl -v 6 get pods`\n- `kubectl --request-timeout 5s get pods`\n- 02:51:40", ""),
    ("- 02:51:40", "- `which kubectl`\n- `awk -v k 5 x`\n- `oc status`\n- 02:51:40", ""),
    ("- 02:51:40", "- kubectl delete pod y\n- 02:51:40", f"{WRITES} (delete), line 33"),
    ("- 02:51:40", "| kubectl -n x delete pod y | done |\n- 02:51:40", f"{WRITES} (delete), line 33"),
    ("## Impact", "password=hunter2\n\n## Impact", f"{CREDENTIAL}, line 45"),
    ("## Impact", "env `DB_PASSWORD: hunter2`\n\n## Impact", f"{CREDENTIAL}, line 45"),
    ("## Impact", "`kubectl --token abcdef get pods`\n\n## Impact", f"{CREDENTIAL}, line 45"),
    ("## Impact", "postgres://u:pw@db/x\n\n## Impact", f"{CREDENTIAL}, line 45"),
    ("## Impact", "-----BEGIN EC PRIVATE KEY-----\n\n## Impact", f"{CREDENTIAL}, line 45"),
    ("## Impact", "password=*** https://***@db token: expired secret: checkout-tls2 secretName=a\n\n## Impact", ""),
    ("## Evidence", "## **3. Evidence:**\n\n### Pods", ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "finding"),
    [
        *by_day(FURTHER),
        ("## Unchecked", "## Open", "error: no section `Unchecked`"),
        ("## Impact", "## Blast Radius", ""),
        ("## Impact", "## 5. Impact ##", ""),
        ("## Summary", "## Summary\n\n## Words", "error: section `Summary` is empty"),
        ("**FACT-3**", "**FACT-4**", "error: FACT-4 is there twice, line 19"),
        ("**FACT-12**", "**FACT-13**", "error: facts are not numbered through: FACT-12 is missing"),
        (" (`kubectl/pods.txt:3-7`)", "", "error: FACT-3 names no source in backquotes, line 18"),
        ("[FACT-7]", "[FACT-77]", "error: FACT-77 is cited, line 11, but is not there"),
        ("- 02:51:40", "- `kubectl -n x delete pod y`\n- 02:51:40", f"{WRITES} (delete), line 33"),
        ("- 02:51:40", "- `kubectl get po; kubectl --context c exec x`\n- 02:51:40", f"{WRITES} (exec), line 33"),
        ("- 02:51:40", "- `helm rollback x`\n- 02:51:40", f"{WRITES} (rollback), line 33"),
        ("- 02:51:40", "- `kubectl exec x -- ls` (refused)\n- 02:51:40", ""),
        ("- 02:51:40", "- `kubectl rollout undo deploy/x`\n- 02:51:40", f"{WRITES} (rollout undo), line 33"),
        ("None against the cluster", "kubectl was not run, and nothing else", ""),
        ("## Impact", "AKIAABCDEFGHIJKLMNOP\n\n## Impact", "error: something that looks like a credential, line 45"),
        ("## Impact", "TODO\n\n## Impact", "warning: a placeholder, line 45"),
        ("## Impact", "## Timeline\n\n- 02:38 rollout\n\n## Impact", ""),
    ],
)  # fmt: skip
def test_a_report_is_judged_by_what_it_lacks(
    before: str, after: str, finding: str, tmp_path: Path, report: Path
) -> None:
    text = report.read_text()
    assert before in text
    (tmp_path / "report.md").write_text(text.replace(before, after, 1))

    done = run("validate_report.sh report.md", tmp_path, state=tmp_path)

    usual = {"warning: no section `Timeline`", "warning: FACT-3 is cited nowhere"}
    found = [line for line in done.stdout.splitlines()[:-1] if line not in usual]
    assert (finding in found) if finding else not found
    assert done.returncode == finding.startswith("error")


def test_a_table_of_commands_without_backquotes_is_commands(tmp_path: Path, report: Path) -> None:
    before, _, rest = report.read_text().partition("## Commands Executed\n")
    table = "| command | said |\n|---|---|\n| kubectl -n x get pods | 3 lines |\n| k get nodes | 2 |\n"
    (tmp_path / "report.md").write_text(
        f"{before}## Commands Executed\n\n{table}\n## Impact{rest.partition('## Impact')[2]}"
    )

    done = run("validate_report.sh report.md", tmp_path, state=tmp_path)

    assert "no command is listed" not in done.stdout
    assert done.returncode == 0, done.stdout


# Reports about which the validator, the run that judges a report and its screen have to agree.
HEADINGS = [
    "",
    "## Summary\n",
    "## Summary\n\ntext",
    "## summary ##\ntext",
    "# 1. Summary\ntext",
    "###### 1.2) Summary:\ntext",
    "## 5 - **Summary**\ntext",
    "## 5Summary\ntext",
    "####### Summary\ntext",
    "##Summary\ntext",
    "   ## Summary\ntext",
    "    ## Summary\ntext",
    "##\tRoot  Cause\t#\ntext",
    "## `Root` _Cause_\ntext",
    "## Impact\ntext",
    "## Blast Radius\ntext",
    "## 4. IMPACT:\r\ntext\r\n",
    "## Summary\n---\n...\n- \n",
    "## Summary\n```bash\n```\n",
    "## Summary\n```\n## Root Cause\ntext\n```\n",
    "```\n## Summary\ntext",
    "## Summary\n<!-- what broke -->\n",
    "## Summary\n<!-- what --> broke\n",
    "## Summary\n### Root Cause\n\ntext",
    "## Summary\n### Pods\n\ntext\n## Evidence\n### Pods\n",
    "### Summary\n## Root Cause\ntext",
    "## Summary\n## Summary\ntext",
    "## Summary\ntext\n## Summary\n",
    "## Summary\n\u00e9",
    "# A\n## Summary\n### Unchecked\n# B\ntext",
    "".join(f"## {title}\n" for title in SECTIONS),
    "".join(f"## {number}. {title}\nNone: x\n" for number, title in enumerate(SECTIONS)),
]


@pytest.mark.parametrize("text", by_day([(text,) for text in HEADINGS]))
def test_the_validator_finds_the_sections_that_the_run_finds(text: str, tmp_path: Path) -> None:
    """Reports that the one called valid the other threw away, and seven bare headings were a success."""
    (tmp_path / "report.md").write_bytes(text.encode())

    done = run("validate_report.sh -o json report.md", tmp_path, state=tmp_path)

    findings = [one["text"] for one in json.loads(done.stdout)["findings"]]
    words = {"missing": "no section `{}`", "empty": "section `{}` is empty"}
    found = {title: [word for word, said in words.items() if said.format(title) in findings] for title in SECTIONS}
    bodies = bodies_of(text)
    wanted = {
        title: ["missing"] if known_as(title) not in bodies else ["empty"] * is_empty(bodies[known_as(title)])
        for title in SECTIONS
    }
    assert found == wanted
    assert sections_of(text, SECTIONS) == tuple(title for title in SECTIONS if not found[title])


def test_all_that_ask_for_a_report_ask_for_the_same_sections() -> None:
    skill = re.findall(r"^## (.+)$", (SKILL / "SKILL.md").read_text().partition("```markdown\n")[2], re.MULTILINE)
    context = (ROOT / "runners/context/GEMINI.md").read_text().partition("has these sections: ")[2]

    assert tuple(title for title in skill if title != "Timeline") == SECTIONS
    assert tuple(re.sub(r" \(.*?\)", "", context).strip(".\n").split(", ")) == tuple(skill)
    assert tuple(skill) == TITLES
    assert ", ".join(TITLES) in SYSTEM
    verify = YAML(typ="safe").load_all(manifest_of(TriageRequest(directory=ROOT)))
    assert [one["spec"]["verify"]["report"]["sections"] for one in verify if "verify" in one["spec"]] == [
        list(SECTIONS)
    ]


def test_the_skill_is_whole_and_names_only_what_it_has() -> None:
    text = (SKILL / "SKILL.md").read_text()
    _, front, body = text.split("---\n", 2)

    assert text.count("\n") < 500
    assert re.search(r"^name: k8s-troubleshooter$", front, re.MULTILINE)
    assert 40 < len(front) < 1024
    named = set(re.findall(r"(?:scripts|references)/[\w.-]+\w", body))
    assert {path for path in named if not (SKILL / path).is_file()} == set()
    assert {f"references/{name}.md" for name in SYMPTOMS} <= named
    commands = {f"scripts/{path.name}" for path in (SKILL / "scripts").glob("*.sh") if os.access(path, os.X_OK)}
    assert commands == {path for path in named if path.startswith("scripts/")}


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_a_reference_has_every_part_and_its_links_lead_somewhere(symptom: str) -> None:
    text = (SKILL / "references" / f"{symptom}.md").read_text()

    parts = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert parts == ["Looks like", "Decide with", "Causes, likeliest first", "False friends", "Next action"]
    assert {name for name in re.findall(r"\]\(([\w-]+)\.md\)", text) if name not in SYMPTOMS} == set()
    assert {path for path in re.findall(r"scripts/[\w.]+\w", text) if not (SKILL / path).is_file()} == set()


def test_every_symptom_that_the_triage_names_has_a_reference_and_a_recorded_cluster() -> None:
    program = (SKILL / "scripts/triage.awk").read_text()
    ranked = re.search(r'split\("([a-z0-9 -]+)", order', program)

    assert ranked is not None
    assert sorted(ranked[1].split()) == SYMPTOMS
    for symptom in SYMPTOMS:
        assert f"{symptom}  " in (HERE / "outputs" / f"{symptom}.incident_triage.txt").read_text()


@pytest.mark.parametrize("name", ["GEMINI.md", ".goosehints"])
def test_a_context_file_leads_to_the_skill_and_to_scripts_that_exist(name: str) -> None:
    text = (ROOT / "runners/context" / name).read_text()

    named = re.findall(r"/skills/([\w./-]+\.(?:sh|md))", text)
    assert "Kubernetes incident triage" in text
    assert text == (ROOT / "runners/context/GEMINI.md").read_text()
    assert "k8s-troubleshooter/SKILL.md" in named
    assert {f"k8s-troubleshooter/scripts/{path.name}" for path in (SKILL / "scripts").glob("*_*.sh")} <= set(named)
    assert {path for path in named if "SYMPTOM" not in path and not (ROOT / "skills" / path).is_file()} == set()


def test_goose_begins_with_the_provider_and_model_of_its_runner() -> None:
    settings = YAML(typ="safe").load(ROOT / "runners/context/goose-config.yaml")

    assert settings == {"GOOSE_PROVIDER": "openai", "GOOSE_MODEL": "gpt-4.1"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "script", [*sorted((SKILL / "scripts").glob("*.sh")), HERE / "kubectl"], ids=lambda path: path.name
)
@SHELLCHECK.mark
def test_shell_is_clean(script: Path) -> None:
    done = subprocess.run(["shellcheck", "-x", "-P", "SCRIPTDIR", script], capture_output=True, text=True)

    assert done.stdout + done.stderr == ""
