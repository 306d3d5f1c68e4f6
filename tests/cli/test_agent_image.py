"""The image k8s-triage-agent as people get at it: looked into, built, and missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from runner.fake_model.script import Turn
from runner.ops.host.image import DISTRIBUTED, INPUTS, digest, pins
from runner.sandbox.docker_api import Engine
from tests.cli.test_agent_clis import CLIS, work_off, write
from tests.support import agent_image, dockerd
from tests.support.situations import Project

pytestmark = pytest.mark.timeout(1800)  # the first one may build it


@pytest.mark.slow
@pytest.mark.scenario("TRI-01")
@pytest.mark.scenario("TRI-07")
def test_the_image_has_each_tool_of_its_version_the_skill_and_the_sub_runners(project: Project) -> None:
    """kubectl 1.31, helm 3, rg, fd, fzf, the CLIs, `/skills/k8s-troubleshooter` and `runners/`."""
    project.env["DOCKER_HOST"] = agent_image.session().host

    done = project.runner("image", "check", "--output", "json")

    assert done.code == 0, done.out + done.err
    checked = json.loads(done.out)
    found = {one["what"]: one["told"] for one in checked["found"] if one["is_right"]}
    assert {tool: found[tool] for tool in pins()} == pins()
    assert found.keys() > {*DISTRIBUTED, "places", "user", "skill k8s-troubleshooter and sub-runners"}
    assert found.keys() > {"kubectl", "helm", "rg", "fd", "fzf", "claude", "codex", "gemini", "goose"}
    assert found["kubectl"].startswith("1.31.")
    assert found["helm"].startswith("3.")
    assert (checked["user"], checked["is_right"]) == ("agent", True)
    assert 1e9 < checked["size_bytes"] < 1.7e9
    assert project.json("workspace", "list") == []
    with agent_image.session().client() as client:
        assert client.inspect_image("k8s-triage-agent")["Config"]["Labels"][INPUTS] == digest()
        assert client.containers(all=True, filters={"label": "runner.looking"}) == []


@pytest.mark.nightly
def test_an_image_of_another_kind_is_told_what_it_lacks_and_is_no_success(project: Project) -> None:
    project.env["DOCKER_HOST"] = dockerd.host()

    done = project.runner("image", "check", dockerd.IMAGE)

    lines = done.out.splitlines()
    assert done.code == 4, done.err
    assert lines[0].startswith(f"{dockerd.IMAGE}  sha256:")
    assert {line.split()[1] for line in lines[1:] if line.startswith("✓")} == {"bash", "places"}
    assert any(line.startswith("✗ claude") for line in lines)
    assert any(line.startswith("✗ /home/agent/GEMINI.md") and line.endswith("not there") for line in lines)
    assert lines[-1] == "= hint: runner image build"


def test_an_image_that_is_not_there_is_said_with_what_builds_it(project: Project) -> None:
    project.env["DOCKER_HOST"] = dockerd.host()

    done = project.runner("image", "check")

    assert done.code == 4
    assert "provider.image-missing" in done.err
    assert "= hint: runner image build" in done.err


@pytest.mark.parametrize("what", ["build", "check"])
def test_without_a_daemon_nothing_is_built_or_checked(project: Project, what: str) -> None:
    project.env["DOCKER_HOST"] = "unix:///nowhere/docker.sock"

    done = project.runner("image", what)

    assert done.code == 4
    assert "provider.failed" in done.err
    assert "start the daemon that listens there" in done.err


@pytest.mark.parametrize("words", [["check", "Bad Name"], ["build", "--base", "Bad Name"], ["build", "--tag", "a b"]])
def test_what_is_no_name_of_an_image_is_bad_input(project: Project, words: list[str]) -> None:
    done = project.runner("image", *words)

    assert done.code == 2
    assert "is not the name of an image" in done.err


def test_doctor_says_that_there_is_none_and_what_builds_it(project: Project) -> None:
    project.env["DOCKER_HOST"] = dockerd.host()

    assert "- image      none for triage: `runner image build`" in project.runner("doctor").out.splitlines()
    assert project.json("doctor")["image"] is None


def test_a_builder_that_is_not_this_hosts_docker_gets_the_context(project: Project, tmp_path: Path) -> None:
    done = project.runner("image", "build", "--save-context", str(tmp_path / "context.tar"))

    assert (done.code, done.out) == (0, f"{tmp_path / 'context.tar'}: build it with `-f image/Dockerfile`\n")
    assert (tmp_path / "context.tar").stat().st_size > 100_000


@pytest.mark.nightly
def test_the_image_is_built_from_nothing_and_is_as_it_should_be(project: Project, tmp_path: Path) -> None:
    agent_image.make(tmp_path)
    assert agent_image.built(tmp_path)

    with dockerd.shared(agent_image.name(tmp_path), tmp_path / "data") as daemon:
        project.env["DOCKER_HOST"] = daemon.host
        done = project.runner("image", "check")
        with daemon.client() as client:
            of_host = trio.run(Engine(daemon.host).files, "k8s-triage-agent", "/run/host", 1000)
            history = json.dumps([client.history("k8s-triage-agent"), client.inspect_image("k8s-triage-agent")])

    assert done.code == 0, done.out + done.err
    assert of_host == b""
    assert "/run/host" not in history
    assert str(agent_image.CA) not in history


@pytest.mark.nightly
@pytest.mark.parametrize("name", CLIS)
async def test_each_cli_of_the_image_works_off_a_turn_with_a_tool(project: Project, name: str) -> None:
    project.env["DOCKER_HOST"] = agent_image.session().host
    write(project, f"agent: {name}", "providers: [docker], base_image: k8s-triage-agent", "snapshot: {message: made}")

    record = await work_off(project, name, [Turn(run="fd --version > made.txt"), Turn(say="All done.")], bytearray())

    assert record.exit_code == 0, record.outcome
    assert "fdfind 8" in (project.directory(record) / "work.patch").read_text()
