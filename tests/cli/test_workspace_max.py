"""``WORKSPACE_MAX`` counts the workspaces of runs and of ``workspace create`` alike, and says what to do."""

from __future__ import annotations

import json
import signal
import time

import pytest

from tests.support.situations import Project, document, step


def full(project: Project, most: int) -> list[str]:
    """As many workspaces as there may be, the first made first."""
    project.env |= {"WORKSPACE_PROVIDERS": "process"} | ({"WORKSPACE_MAX": str(most)} if most != 10 else {})
    return [create(project) for _ in range(most)]


def create(project: Project, *words: str) -> str:
    done = project.runner("workspace", "create", "--output", "json", *words)
    assert done.code == 0, done.err
    return str(json.loads(done.out)["id"])


def destroy(project: Project, ids: list[str]) -> None:
    assert [project.runner("workspace", "destroy", id).code for id in ids] == [0] * len(ids)


@pytest.mark.scenario("LIF-05")
def test_the_eleventh_workspace_is_refused_to_a_person_and_to_a_run(project: Project) -> None:
    project.script("true")
    ids = full(project, 10)

    refused, (done, record) = project.runner("workspace", "create"), project.apply()

    for said in (refused, done):
        assert said.code == 5, said.out + said.err
        assert "no room for another workspace beside 10: `WORKSPACE_MAX` is 10" in said.out + said.err
        assert f"destroy those not in use, longest idle first: {ids[0]}, {ids[1]}, {ids[2]}" in said.out + said.err
    assert (record["outcome"]["reason"], record["left_behind"]) == ("limit", [])
    assert step(record, "agent")["status"] == "skipped"
    assert len(project.json("workspace", "list")) == 10
    destroy(project, ids[:1])
    assert project.apply()[0].code == 0
    destroy(project, ids[1:])


@pytest.mark.scenario("LIF-05")
def test_a_run_takes_its_room_from_everybody(project: Project) -> None:
    project.env["WORKSPACE_MAX"] = "1"
    project.script("sleep 100")
    running = project.start("apply", ".", "--output", "jsonl")
    assert running.stdout is not None
    assert any("IsolationObserved" in line for line in running.stdout)

    refused, (done, _) = project.runner("workspace", "create"), project.apply("--run-key", "other")
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=60)

    assert (refused.code, done.code, running.returncode) == (5, 5, 130), refused.err + done.out
    assert "wait for runs to end" in refused.err
    assert "wait for runs to end" in done.out + done.err


@pytest.mark.scenario("LIF-05")
def test_members_of_a_matrix_wait_for_the_room_that_others_leave(project: Project) -> None:
    ids = full(project, 2)
    destroy(project, ids[1:])
    agents = [project.worker(name, "true") for name in ("one", "two", "three")]
    project.write(*agents, document("IncidentRun", "many", "matrix: {agent_type: [one, two, three]}"))

    done = project.runner("apply", ".")

    assert done.code == 0, done.out + done.err
    destroy(project, ids[:1])


@pytest.mark.scenario("LIF-13")
def test_an_apply_removes_what_has_had_its_time_and_says_so(project: Project) -> None:
    """There is room for what it makes then. Persistent workspaces stay, and so does one that is used."""
    project.env |= {"WORKSPACE_MAX": "3", "WORKSPACE_PROVIDERS": "process", "WORKSPACE_TTL": "3s"}
    project.script("true", provider="process")
    idle, used, _ = (create(project, *words) for words in ([], [], ["--persistent"]))
    assert project.runner("workspace", "exec", idle, "--", "sh", "-c", "echo work > made").code == 0
    using = project.start("workspace", "exec", used, "--", "sh", "-c", "echo begun; sleep 100")
    assert using.stdout is not None
    using.stdout.readline()
    time.sleep(3.1)

    done = project.runner("apply", ".")

    assert done.code == 0, done.out + done.err
    saved = project.home / "state" / "saved" / idle
    told = f"warning[workspace.expired]: workspace `{idle}` is removed: its time was over, and its work is saved"
    assert f"{told} in `{saved}`" in done.err
    assert "+work" in (saved / "work.patch").read_text()
    left = {row["id"] for row in project.json("workspace", "list")}
    assert (len(left), idle in left, used in left) == (2, False, True)
    using.send_signal(signal.SIGINT)
    using.communicate(timeout=60)
    destroy(project, sorted(left))
