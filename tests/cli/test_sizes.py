"""What is made of manifests is bounded: a small file that stands for much is refused in little time and memory."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterable

import pytest

from tests.support.bad_input import Make, refused, say
from tests.support.situations import Project, document

MOST_SECONDS = 20.0  # of processor time, on a host that has other things to do
MOST_GROWTH = 300 << 10  # KiB

LONG = "x" * 100_000
NONE = "repo_source: {type: none}\nproviders: [local]"


def agent(*lines: str, workspace: str = NONE, name: str = "worker") -> str:
    nested = "\n".join(f"  {line}" for line in ("enabled: true", *workspace.splitlines()))
    return document(
        "AgentType", name, "\n".join(("agent: script", "script: {files: []}", "workspace:", nested, *lines))
    )


def run(name: str = "work", *lines: str) -> str:
    return document("IncidentRun", name, "\n".join((*lines, "agent_type: worker")))


def among_lines(texts: Iterable[str]) -> str:
    return "[" + ",\n  ".join(texts) + "]"


def manifests(*documents: str) -> Make:
    def make(project: Project) -> None:
        project.manifest.write_text("---\n".join(documents))

    return make


def variables(count: int, value: str) -> str:
    return "env:\n" + "\n".join(f"  A{i}: {value}" for i in range(count))


HUGE = {
    "a text used 3,000 times": manifests(
        agent(f"env:\n  A: &a {LONG}\n" + "\n".join(f"  A{i}: *a" for i in range(3_000))), run()
    ),
    "a list of long commands used 4,000 times": manifests(
        agent(workspace=f"{NONE}\nsetup_commands:\n- &l [{LONG}]\n" + "- *l\n" * 4_000), run()
    ),
    "a long text in 1,000 runs": manifests(agent(f"env: {{A: {LONG}}}"), *(run(f"r{i}") for i in range(1_000))),
    "a matrix of 90,000 runs": manifests(
        *(agent(name=f"w{i}") for i in range(300)),
        document(
            "IncidentRun",
            "work",
            f"matrix:\n  agent_type: {among_lines(f'w{i}' for i in range(300))}\n"
            f"  model: {among_lines(f'm{i}' for i in range(300))}",
        ),
    ),
    "40,000 templates": manifests(agent(variables(40_000, '"{{ task.branch | upper }}"')), run()),
    "templates filled a million times": manifests(
        agent(variables(1_000, '"{{ run.name }}"')), *(run(f"r{i}") for i in range(1_000))
    ),
}


@pytest.mark.parametrize("verb", ["validate", pytest.param("plan", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("make", HUGE.values(), ids=HUGE)
def test_what_stands_for_too_much_is_refused_in_time(project: Project, make: Make, verb: str) -> None:
    make(project)
    began, most = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    said = refused(project, verb, project.folder)

    assert said.code == 2
    assert said.errors == ["manifest.too-large"]
    assert "all.runner.yaml:" in said.err
    assert time.process_time() - began < MOST_SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < MOST_GROWTH


def test_a_large_incident_in_many_runs_is_refused(project: Project) -> None:
    manifests(
        document("AgentType", "worker", "agent: codex\nworkspace: {enabled: true, repo_source: {type: none}}"),
        document(
            "IncidentRun",
            "work",
            "agent_type: worker\nincident: {directory: inc}\n"
            f"matrix:\n  model: {among_lines(f'm{i}' for i in range(20))}",
        ),
    )(project)
    (project.folder / "inc").mkdir()
    (project.folder / "inc" / "incident.json").write_text(json.dumps({"log": [LONG] * 100}))

    said = refused(project, "plan", project.folder)

    assert (said.code, {*said.errors}) == (2, {"manifest.too-large"})
    assert "all.runner.yaml:" in said.err


LARGE = {
    "45,000 protected paths": manifests(
        agent(workspace=f"{NONE}\nprotected_paths: {among_lines(f'a{i}/b' for i in range(45_000))}"), run()
    ),
    "30,000 variables": manifests(agent(variables(30_000, "a")), run()),
    "4,000 templates": manifests(agent(variables(4_000, '"{{ run.name | upper }}"')), run()),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
def test_what_is_merely_large_is_judged_in_time(project: Project, make: Make) -> None:
    make(project)
    began = time.process_time()

    assert say(project, "validate", project.folder).code == 0

    assert time.process_time() - began < MOST_SECONDS
