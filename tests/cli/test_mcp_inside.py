"""MCP servers in the agent's own workspace: what they are, what they may use, and how they end, on each provider."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_agent_mcp import KEY, rehearse, results, verdicts
from tests.providers.test_docker_volumes import as_member, settle
from tests.support import dockerd
from tests.support.mcp_agent import PROGRAM, STAND_IN, call, write
from tests.support.needs import MEMORY
from tests.support.situations import Project, leftovers, until, write_files

NEAR = {"name": "near", "command": ["python3", "near.py"]}
MARKS: dict[str, list[pytest.MarkDecorator]] = {
    "local": [],
    "docker": [dockerd.DOCKER.mark],
    "docker-user": [dockerd.DOCKER.mark, pytest.mark.nightly],
    "gvisor": [dockerd.GVISOR.mark, pytest.mark.nightly],
}
PLACES = [pytest.param(place, marks=marks) for place, marks in MARKS.items()]
BY_DAY = [("signal", "local"), ("kill", "docker")]


@pytest.fixture
def place(request: pytest.FixtureRequest, project: Project) -> Iterator[str]:
    """A provider, for an ordinary user as well; nothing of the project is left there at the end."""
    homes = Path(tempfile.mkdtemp(prefix="runner-homes-", dir="/tmp"))
    homes.chmod(0o755)
    settle(project, homes)
    yield request.param
    left = leftovers(project.home)
    shutil.rmtree(homes)
    assert left == []


def prepare(project: Project, place: str, turns: list[dict[str, Any]], *, limits: str = "", **more: str) -> None:
    """A run whose repository brings a server, for the one who runs it there."""
    project.env["KEY"] = KEY
    tools = project.folder.parent / "tools"
    write_files(tools, {"bin/claude": STAND_IN})
    setup = f'python3 -c \'import sys; open("near.py", "w").write(sys.argv[1])\' {shlex.quote(PROGRAM.read_text())}'
    workspace = f", checkout_on_start: false, setup_commands: [{json.dumps(setup)}]{limits}"
    provider = place.partition("-")[0]
    if provider != "local":
        project.env |= {"DOCKER_HOST": dockerd.host(), "WORKSPACE_PROVIDERS": provider}
        workspace += f", base_image: {dockerd.IMAGE}"
    write(project, tools, used=[NEAR], turns=turns, provider=provider, workspace=workspace, **more)
    if place == "docker-user":
        as_member(project, dockerd.session())


@pytest.mark.scenario("BEY-12")
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_such_a_server_is_what_the_agent_is_and_is_there_again_after_a_crash(place: str, project: Project) -> None:
    more = "env: {OF_AGENT: 'yes'}\nsecrets: [{name: KEY, from: {env: KEY}, steps: [agent]}]"
    turns = [
        call("seen", "near"),
        call("fill", "near", mebibytes=1),
        {"run": "python3 -c 'import os; s = os.stat(\"filled\"); print(s.st_size, s.st_uid, os.getuid())'"},
        call("die", "near", code=3),
        call("echo", "near", text="again"),
    ]
    prepare(project, place, turns, more=more)

    planned = project.runner("plan", str(project.folder)).out
    done, record = rehearse(project)

    assert done.code == 0, done.out + done.err
    assert "INSIDE" in planned
    told = results(project)
    env = json.loads(json.loads(told[0])["content"][0]["text"])[1]
    assert (env["OF_AGENT"], "KEY" in env) == ("yes", False)
    size, owner, me = told[2].split()
    assert (size, owner) == (str(1 << 20), me)
    assert "has ended" in told[3]
    assert "again" in told[4]
    assert verdicts(record)["near echo answered"] == 1
    assert project.json("mcp", "hosted", "list") == []  # nobody is asked for consent to what is the agent's


@MEMORY.mark
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_it_has_the_agents_limits_and_the_run_says_what_was_killed(place: str, project: Project) -> None:
    """What takes too much is the largest, which is the server; gVisor ends the sandbox, and so the agent's step."""
    turns = [call("echo", "near", text="one"), call("gorge", "near"), call("echo", "near", text="two")]
    prepare(project, place, turns, limits=", resource_limits: {memory: 192M}")

    done, record = rehearse(project)

    killed = record["outcome"]
    if place == "gvisor":
        assert (done.code, killed["reason"]) == (1, "oom"), done.out + done.err
        return
    assert done.code == 0, done.out + done.err
    told = results(project)
    assert "has ended" in told[1]
    assert "two" in told[2]
    assert verdicts(record) == {"near echo answered": 2, "near gorge ended": 1}
    assert "out of memory" in done.out


@pytest.mark.parametrize(
    ("how", "place"),
    [
        pytest.param(how, place, marks=MARKS[place] if (how, place) in BY_DAY else [*MARKS[place], pytest.mark.nightly])
        for how in ("signal", "deadline", "kill")
        for place in MARKS
    ],
    indirect=["place"],
)
def test_it_ends_with_its_run_however_that_ends(how: str, place: str, project: Project) -> None:
    run = "timeout: 6s" if how == "deadline" else ""
    turns = [call("echo", "near", text="begun"), call("never", "near")]
    prepare(project, place, turns, more="env: {MODE: stubborn}", run=run)

    process = project.start("rehearse", str(project.folder), "--turns", "a.turns.yaml")
    if how != "deadline":
        until(lambda: [*project.home.glob("state/runs/*/logs/agent.stdout")] and "begun" in project.logs("agent"))
        os.kill(process.pid, signal.SIGKILL if how == "kill" else signal.SIGINT)
    out, err = process.communicate(timeout=60)

    assert process.returncode == {"signal": 130, "deadline": 124, "kill": -9}[how], out + err
    if how == "kill":
        (workspace,) = [one["id"] for one in project.json("workspace", "list")]
        assert project.runner("recover").code == 0
        assert place == "local" or dockerd.kept_of(workspace) == []
    assert project.json("workspace", "list") == project.json("lease", "list") == []
    assert project.record()["left_behind"] == []
