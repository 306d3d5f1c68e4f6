"""The account that a triage reads with: what kubectl makes of its manifest, and that it is what is read."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from runner.cluster.kubeconfig import read_target
from runner.cluster.session import _PERMISSIONS
from runner.core.settings import shipped
from runner.manifest.text import parse
from runner.triage.reader_account import OF_CLUSTER, READER, READS, reader_manifest
from tests.support.kubernetes import CONTEXT, SECRET, TOKEN, serving

LONG = {"node": "nodes", "service": "services", "persistentvolumeclaim": "persistentvolumeclaims", "pod": "pods"}
APPLY = ("--dry-run=client", "--validate=false", "-f")
EVERY = {(group, one) for reads in (READS, OF_CLUSTER) for group, resources in reads.items() for one in resources}


def read_by_scripts() -> set[tuple[str, str]]:
    """What the scripts of the skill name after `get`, `describe`, `logs` and `top`; a kind of a variable is no name."""
    found: set[tuple[str, str]] = set()
    groups = {one: group for group, one in sorted(EVERY, reverse=True) if group != "metrics.k8s.io"}
    for script in (shipped("skills") / "k8s-troubleshooter" / "scripts").glob("*.sh"):
        for verb, words in re.findall(r"^ *(?:\S.* )?kube \S+ (get|describe|logs|top) (\S+)", script.read_text(), re.M):
            for word in [] if words.startswith(("--raw", '"')) and verb != "logs" else words.split(","):
                name, _, group = word.partition(".")
                name = LONG.get(name, name)
                found |= {
                    "logs": {("", "pods/log")},
                    "top": {("metrics.k8s.io", name)},
                }.get(verb, {(group or groups.get(name, "?"), name)})
    return found


def test_what_the_scripts_read_and_what_rights_are_asked_for_may_be_read() -> None:
    found = read_by_scripts()

    assert len(found) > 20
    assert found <= EVERY
    assert {(group, "/".join(filter(None, (one, sub)))) for _, group, one, sub in _PERMISSIONS} <= EVERY
    assert not [one for _, one in EVERY if "secret" in one]


@pytest.mark.parametrize("namespace", ["payments", "on", None])
def test_kubectl_takes_the_manifest(tmp_path: Path, kubectl: Path, authority: Path, namespace: str | None) -> None:
    (tmp_path / "reader.yaml").write_text(text := reader_manifest(namespace))
    with serving(authority) as api:
        config = api.write(tmp_path / "config")
        done = subprocess.run(
            [kubectl / "bin" / "kubectl", "--kubeconfig", config, "apply", *APPLY, tmp_path / "reader.yaml"],
            capture_output=True,
            text=True,
            check=False,
            env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        )

    assert done.returncode == 0, done.stderr
    where = f"in namespace {namespace}" if namespace else "in every namespace"
    assert text.startswith(f"# {READER}: reads what `runner triage` looks at {where}, and no secrets.\n")
    assert text.count(f'metadata: {{name: {READER}, namespace: "') == (2 if namespace else 0)
    kind = "role" if namespace else "clusterrole"
    assert done.stdout.splitlines() == [
        *([] if namespace else ["namespace/runner-triage created (dry run)"]),
        f"serviceaccount/{READER} created (dry run)",
        f"{kind}.rbac.authorization.k8s.io/{READER} created (dry run)",
        f"{kind}binding.rbac.authorization.k8s.io/{READER} created (dry run)",
    ]
    trees, findings = parse("reader.yaml", text.encode())
    role = next(tree.data for tree in trees if tree.data["kind"] in ("Role", "ClusterRole"))
    assert findings == []
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    assert {(rule["apiGroups"][0], one) for rule in role["rules"] for one in rule["resources"]} == (
        EVERY if namespace is None else {(group, one) for group, resources in READS.items() for one in resources}
    )
    assert "*" not in "".join(line for line in text.splitlines() if not line.startswith("#"))


@pytest.mark.parametrize(("namespace", "option"), [("payments", " --namespace payments"), (None, "")])
def test_the_recipe_names_a_namespace_if_there_is_one(namespace: str | None, option: str) -> None:
    assert re.findall(r"--reader-manifest.*|--current.*", reader_manifest(namespace)) == [
        f"--reader-manifest{option} | kubectl apply -f -",
        f"--current --user {READER}{option}",
    ]


def test_the_recipe_makes_a_kubeconfig_that_has_nothing_of_the_administrator_s(
    tmp_path: Path, kubectl: Path, authority: Path
) -> None:
    """Line by line as it is typed, with the real kubectl; only the token is made up, for there is nobody to give it."""
    recipe = re.findall(r"^#   (kubectl .*|umask .*)$", reader_manifest("payments"), re.MULTILINE)
    named = re.findall(r"kubectl.* create token .*", "\n".join(recipe))
    with serving(authority) as api:
        api.write(tmp_path / "admin", {"token": SECRET})
        made = f'kubectl() {{ case " $* " in *" create token "*) echo {TOKEN};; *) command kubectl "$@";; esac; }}'
        env = {"HOME": str(tmp_path), "KUBECONFIG": str(tmp_path / "admin"), "PATH": f"{kubectl}/bin:/usr/bin:/bin"}
        done = subprocess.run(
            ["bash", "-euc", "\n".join([made, *recipe])],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        asked = subprocess.run(
            ["kubectl", "--kubeconfig", tmp_path / "triage.kubeconfig", "get", "pods", "-o", "name"],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )

    assert (done.returncode, done.stderr) == (0, "")
    assert named == [f"kubectl --namespace payments create token {READER} --duration 24h > triage.token"]
    assert asked.returncode == 0, asked.stderr
    assert SECRET not in (tmp_path / "triage.kubeconfig").read_text()
    target = read_target(str(tmp_path / "triage.kubeconfig"), None, None, {})
    assert (target.context, target.namespace, target.exposed) == (CONTEXT, "payments", "")
    assert target.authorization() == f"Bearer {TOKEN}".encode()
    assert oct(os.stat(tmp_path / "triage.token").st_mode)[-3:] == "600"
