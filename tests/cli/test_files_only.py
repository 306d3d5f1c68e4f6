"""``runner triage`` with no cluster: as it was asked for, or since the cluster is away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_rehearse import claude
from tests.cli.test_triage import DESCRIBED, place, record_of, triage
from tests.support.kubernetes import TOKEN, Api, serving
from tests.support.situations import Project

__all__ = ["claude"]

ABSENT = "There is no cluster in this run, and kubectl has none to ask: the files in /incident are all there is."


def write_dead_kubeconfig(project: Project, authority: Path) -> Path:
    """The kubeconfig of a cluster that does not answer, in its usual place."""
    folder = project.home / ".kube"
    folder.mkdir(parents=True)
    with serving(authority) as api:
        return api.write(folder / "config")


@pytest.mark.slow
def test_a_triage_of_files_only_asks_no_cluster(project: Project, claude: Path, authority: Path) -> None:
    with serving(authority) as api:
        (project.home / ".kube").mkdir(parents=True)
        api.write(project.home / ".kube" / "config")
        project.env["KUBECONFIG"] = str(project.home / ".kube" / "config")
        project.env["KUBERNETES_CONTEXT"] = "prod-eu"
        where = place(project, "local", claude)
        done = triage(project, *DESCRIBED, *where, "--files-only")
        printed = triage(project, *DESCRIBED, *where, "--files-only", "--print")
        (project.folder / "printed.runner.yaml").write_text(printed.out)
        planned = project.runner("plan", "printed.runner.yaml")

    assert done.code == 0, done.out + done.err
    assert "cluster    none: the files of the incident are all there is\n" in done.out
    assert "Second opinion: runner triage -w INC-1 -a codex --files-only --provider local" in done.out
    assert ABSENT in (project.folder / "INC-1" / "prompt-sent.md").read_text()
    assert ABSENT in printed.out
    assert "kubeconfig" not in printed.out
    assert "cluster none: the files of the incident are all there is" in planned.out
    assert api.asked == []
    assert [one["message"] for one in record_of(project)["warnings"] if one["code"] == "cluster.away"] == []


@pytest.mark.parametrize("option", ["--kubeconfig", "--context"])
def test_files_only_and_a_cluster_contradict_each_other(project: Project, option: str) -> None:
    done = project.runner("triage", "-w", "INC-1", *DESCRIBED, "--files-only", option, "x")

    assert done.code == 2
    assert f"`--files-only` contradicts `{option}`, which names a cluster" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_cluster_that_is_away_leaves_the_files_to_look_at(
    project: Project, claude: Path, authority: Path, form: str
) -> None:
    """Its being away may be the incident."""
    write_dead_kubeconfig(project, authority)
    (project.folder / "INC-1").mkdir()
    (project.folder / "INC-1" / "kubelet.log").write_text("etcd: no space left on device\n")
    done = triage(project, *place(project, "local", claude), "-o", form)

    assert done.code == 0, done.out + done.err
    words = "connection refused; only the files of the incident are looked at"
    assert "warning[cluster.away]: cluster https://127.0.0.1:" in done.err
    assert words in done.err
    if form == "text":
        assert "cluster    none: the files of the incident are all there is\n" in done.out
    (away,) = [one["message"] for one in record_of(project)["warnings"] if one["code"] == "cluster.away"]
    assert words in away
    prompt = (project.folder / "INC-1" / "prompt-sent.md").read_text()
    assert ABSENT in prompt
    assert "It was to be looked at, but cluster https://127.0.0.1:" in prompt


def test_a_cluster_that_is_away_ends_a_triage_without_files(project: Project, claude: Path, authority: Path) -> None:
    write_dead_kubeconfig(project, authority)
    (project.folder / "INC-1").mkdir()
    done = triage(project, *place(project, "local", claude))

    assert done.code == 4, done.out + done.err
    assert "error[cluster.unreachable]: cluster https://127.0.0.1:" in done.err
    assert "or name another one with --kubeconfig FILE, or go without: --files-only" in done.err
    assert not list((project.home / "state").glob("runs/*"))


def test_a_credential_that_cannot_be_had_names_the_ways_on(project: Project, claude: Path, authority: Path) -> None:
    """Whoever has to log in should know it, whatever files there are."""
    folder = project.home / ".kube"
    folder.mkdir(parents=True)
    (folder / "plug").write_text(f"#!/bin/sh\necho x >> {folder}/asked\necho 'log in first' >&2\nexit 1\n")
    (folder / "plug").chmod(0o755)
    entry = {"apiVersion": "client.authentication.k8s.io/v1", "command": "./plug", "interactiveMode": "Never"}
    Api(authority, None).write(folder / "config", {"exec": entry}, server="https://127.0.0.1:1")  # type: ignore[arg-type]
    done = triage(project, *DESCRIBED, *place(project, "local", claude))

    assert done.code == 4, done.out + done.err
    assert "error[cluster.credential]: credential plug-in `./plug` of user `me` exited 1: log in first" in done.err
    assert "go without: --files-only" in done.err
    assert (folder / "asked").read_text() == "x\n"
    assert TOKEN not in json.dumps(done.err)
