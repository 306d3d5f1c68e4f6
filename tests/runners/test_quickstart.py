"""The quickstart's scripts on their own, as the script agent plays them."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[2] / "manifests/quickstart"
SECTIONS = ["Summary", "Root Cause", "Evidence", "Commands Executed", "Impact", "Next Steps", "Unchecked"]


@pytest.fixture
def incident(tmp_path: Path) -> Path:
    return shutil.copytree(
        QUICKSTART / "incident", tmp_path / "incident", ignore=shutil.ignore_patterns("output", "logs")
    )


def triage(incident: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    output = incident.parent / "output"
    output.mkdir(exist_ok=True)
    env = {"PATH": os.defpath, "RUNNER_INCIDENT": str(incident), "RUNNER_OUTPUT": str(output)}
    done = subprocess.run(["bash", QUICKSTART / "triage.sh"], cwd="/", env=env, capture_output=True, text=True)
    return done, output / "investigation.md"


def rewrite(incident: Path, name: str, change: Callable[[str], str]) -> None:
    path = incident / "kubectl" / name
    path.write_text(change(path.read_text()))


def test_triage_finds_the_rollout_that_cut_the_limit(incident: Path) -> None:
    done, report = triage(incident)
    text = report.read_text()

    assert (done.returncode, done.stderr) == (0, "")
    assert re.findall("^## (.*)$", text, re.MULTILINE) == SECTIONS
    assert "**Rollout 118 cut the memory limit 512Mi -> 256Mi at 02:38; OOMKilled from 02:41.**" in text
    assert "3 of 5 pods affected, 2 in CrashLoopBackOff now, 14 kills so far" in text
    assert "rollout undo deployment/checkout --to-revision=117" in text
    assert "configmaps: no right to read them" in text


def test_every_fact_names_lines_that_exist_and_every_reference_a_fact(incident: Path) -> None:
    text = triage(incident)[1].read_text()

    facts = re.findall(r"^- \*\*(FACT-\d+)\*\* .* \(`([\w./-]+):([\d,-]+)`\)$", text, re.MULTILINE)
    assert [fact for fact, _, _ in facts] == [f"FACT-{n}" for n in range(1, 13)]
    for _, file, lines in facts:
        length = len((incident / file).read_text().splitlines())
        assert all(1 < int(line) <= length for line in re.split("[,-]", lines))
    assert set(re.findall(r"FACT-\d+", text)) == {fact for fact, _, _ in facts}


def test_triage_is_repeatable_and_leaves_the_incident_alone(incident: Path) -> None:
    before = {path: path.read_bytes() for path in incident.rglob("*") if path.is_file()}
    first = triage(incident)[1].read_bytes()

    assert triage(incident)[1].read_bytes() == first
    assert {path: path.read_bytes() for path in incident.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (
            "describe-pods.txt",
            lambda text: text.replace("OOMKilled", "Error").replace("Code:    137", "Code:    1"),
            "no pod of checkout ended OOMKilled with exit code 137",
        ),
        ("node-events.txt", lambda text: "".join(text.splitlines(keepends=True)[:2]), "the nodes report none"),
    ],
    ids=["pods ended otherwise", "nodes saw nothing"],
)
def test_without_a_memory_kill_triage_says_so_and_fails(
    incident: Path, name: str, change: Callable[[str], str], said: str
) -> None:
    rewrite(incident, name, change)

    done, report = triage(incident)

    assert done.returncode == 1
    assert done.stderr == f"triage: the evidence does not show a memory kill: {said}\n"
    assert not report.exists()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("rollout-117.txt", lambda text: text.replace("512Mi", "256Mi")),
        ("replicasets.txt", lambda text: text.replace("T02:38:04Z", "T02:50:04Z")),
    ],
    ids=["same limit", "rolled out after the first kill"],
)
def test_a_rollout_that_does_not_explain_the_kills_is_not_blamed(
    incident: Path, name: str, change: Callable[[str], str]
) -> None:
    rewrite(incident, name, change)

    text = triage(incident)[1].read_text()

    assert "does not explain it" in text
    assert "rollout undo" not in text


def test_kills_that_the_pods_do_not_account_for_are_unchecked(incident: Path) -> None:
    rewrite(incident, "node-events.txt", lambda text: "".join(text.splitlines(keepends=True)[:-1]))

    assert "- 13 kernel kills against 14 container ends" in triage(incident)[1].read_text()


def test_selftest_lists_the_sub_runners_of_its_workspace(tmp_path: Path) -> None:
    shutil.copytree(QUICKSTART.parents[1] / "runners", tmp_path / "runners")

    env = {"PATH": os.defpath, "RUNNER_WORKSPACE": str(tmp_path)}
    subprocess.run(["bash", QUICKSTART / "selftest.sh"], cwd="/", env=env, check=True, capture_output=True)

    assert "| script | AGENT_SCRIPT |" in (tmp_path / "runners/README.md").read_text().splitlines()
