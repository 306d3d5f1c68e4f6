"""``runner plan`` says all that ``runner apply`` would refuse here, behind the plan, and ends as that would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.ops.planning.facts import cli_label
from tests.support import dockerd
from tests.support.situations import Project, document

WORKER = """
agent: {agent}
{more}
workspace:
  enabled: true
  providers: [{providers}]
  repo_source: {{type: none}}
  {workspace}
"""


def write(
    project: Project, *, agent: str = "claude", more: str = "", providers: str = "local", workspace: str = ""
) -> None:
    spec = WORKER.format(agent=agent, more=more, providers=providers, workspace=workspace)
    project.write(document("AgentType", "worker", spec), document("IncidentRun", "work", "agent_type: worker"))
    project.env["COLUMNS"] = "300"


@pytest.mark.scenario("BEY-02")
def test_a_plan_is_shown_whole_and_then_all_that_apply_would_refuse(project: Project) -> None:
    secrets = [
        {"name": "UNSET", "from": {"env": "NOBODY_SETS_IT"}, "steps": ["setup"]},
        {"name": "GONE", "from": {"file": "/opt/no-such-secret"}, "steps": ["setup"]},
        {"name": "PRINTED", "from": {"command": ["no-such-vault", "read"]}, "steps": ["setup"]},
    ]
    workspace = "setup_commands: ['true']\n  toolchains: [/opt/no-such-tools]"
    write(project, more=f"secrets: {json.dumps(secrets)}", workspace=workspace)

    planned = project.runner("plan", ".")
    applied = project.runner("apply", ".")

    assert "  agent" in planned.out
    assert "claude sonnet" in planned.out
    assert " warnings, 6 errors, " in planned.out.splitlines()[-1]
    assert sorted(planned.errors) == [
        "agent.cli-missing",
        "gateway.key-missing",
        "provider.toolchain-missing",
        *["secret.missing"] * 3,
    ]
    assert planned.err.count("= hint: ") >= 3
    assert (planned.code, sorted(planned.errors)) == (applied.code, sorted(applied.errors))
    assert not (project.home / "state" / "runs").exists()


def test_a_command_that_prints_a_secret_is_not_started_by_a_plan(project: Project) -> None:
    printed = {"name": "TOKEN", "from": {"command": ["touch", f"{project.home}/started"]}, "steps": ["setup"]}
    write(project, agent="script", more=f"script: {{files: []}}\nsecrets: [{json.dumps(printed)}]",
          workspace="setup_commands: ['true']")  # fmt: skip

    assert project.runner("plan", ".").code == 0
    assert not (project.home / "started").exists()


def test_json_has_what_is_missing_and_stays_one_value(project: Project) -> None:
    write(project)

    done = project.runner("plan", ".", "--output", "json")

    document = json.loads(done.out)
    assert sorted(one["code"] for one in document["missing"]) == ["agent.cli-missing", "gateway.key-missing"]
    assert [run["name"] for run in document["runs"]] == ["work"]
    assert done.code == 2


def test_the_first_provider_that_is_there_is_named_with_why_the_others_are_not(project: Project) -> None:
    project.env["DOCKER_HOST"] = "unix:///opt/no-such.sock"
    write(project, agent="script", more="script: {files: []}", providers="docker, local, process")

    planned = project.runner("plan", ".")

    assert planned.code == 0, planned.err
    (row,) = (line for line in planned.out.splitlines() if line.startswith("  provision"))
    assert "local, then process (docker is not available: " in row
    assert "local, then process (docker" in project.runner("plan", ".", "--summary").out
    (agent,) = (line for line in planned.out.splitlines() if line.startswith("  agent"))
    assert "none (not enforced by process)" in agent


def test_the_network_of_a_provider_that_leaves_the_hosts_is_not_called_none(project: Project) -> None:
    write(project, agent="script", more="script: {files: []}", providers="process")

    rows = project.runner("plan", ".").out.splitlines()

    (agent,) = (row for row in rows if row.startswith("  agent"))
    assert "none (not enforced)" in agent
    assert any("network none (not enforced)" in row for row in rows)
    (lease,) = (row for row in rows if row.startswith("  lease"))
    assert "not enforced" not in lease  # it runs no command


def test_without_any_provider_there_is_a_plan_to_look_at_and_none_to_save(project: Project) -> None:
    project.env["DOCKER_HOST"] = "unix:///opt/no-such.sock"
    write(project, agent="script", more="script: {files: []}", providers="docker",
          workspace="base_image: python:3")  # fmt: skip
    saved = project.folder / "plan.json"

    done = project.runner("plan", ".", "--save", str(saved))

    assert (done.code, sorted(done.errors)) == (4, ["provider.unavailable"])
    assert "  agent" in done.out
    assert "start the daemon that listens there" in done.err
    assert "Not saved: " in done.out
    assert not saved.exists()


def test_a_plan_is_saved_where_only_keys_and_programs_are_missing(project: Project) -> None:
    """Another host may have them, such as the runner of a CI."""
    write(project)
    saved = project.folder / "plan.json"

    done = project.runner("plan", ".", "--save", str(saved))

    assert (done.code, saved.exists()) == (2, True)
    again = project.runner("apply", str(saved))
    assert (again.code, sorted(again.errors)) == (2, ["agent.cli-missing", "gateway.key-missing"])


async def test_with_everything_at_hand_nothing_is_missing(project: Project, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    (tools / "bin").mkdir(parents=True)
    (tools / "bin" / "claude").touch(mode=0o755)
    write(project, workspace=f"toolchains: [{tools}]")
    project.env["ANTHROPIC_API_KEY"] = "sk-ant-0123456789"

    done = project.runner("plan", ".")

    assert (done.code, sorted(done.errors)) == (0, [])
    assert "errors" not in done.out


@pytest.fixture
def labelled() -> Iterator[str]:
    """An image that says, as those of `runner image build` do, that it has Goose and nothing else."""
    name = "runner-tests-labelled:1"
    with dockerd.session().client() as client:
        container = client.create_container(dockerd.IMAGE, ["true"])
        repository, _, tag = name.partition(":")
        client.commit(container["Id"], repository, tag, conf={"Labels": {cli_label("goose"): "1.52.0"}})
        client.remove_container(container["Id"])
        yield name
        client.remove_image(name)


def test_an_image_that_says_what_it_has_is_taken_at_its_word(project: Project, labelled: str) -> None:
    keys = {"ANTHROPIC_API_KEY": "sk-ant-0123456789", "OPENAI_API_KEY": "sk-0123456789"}
    project.env |= {"DOCKER_HOST": dockerd.host(), **keys}

    write(project, providers="docker", workspace=f"base_image: {labelled}")
    claude = project.runner("plan", ".")
    write(project, agent="goose", providers="docker", workspace=f"base_image: {labelled}")
    goose = project.runner("plan", ".")
    write(project, providers="docker", workspace=f"base_image: {dockerd.IMAGE}")
    unknown = project.runner("plan", ".")

    assert (claude.code, sorted(claude.errors)) == (4, ["agent.cli-missing"])
    assert f"`claude` is not in image `{labelled}`" in claude.err
    assert ": runner image build\n" in claude.err
    assert (goose.code, "CLI 1.52.0" in goose.out) == (0, True), goose.err
    assert (unknown.code, "whether the image has its CLI is not known" in unknown.out) == (0, True), unknown.err


def test_an_image_that_is_not_there_is_said_behind_the_plan(project: Project) -> None:
    project.env |= {"DOCKER_HOST": dockerd.host(), "ANTHROPIC_API_KEY": "sk-ant-0123456789"}
    write(project, providers="docker", workspace="base_image: no-such-image:7")

    done = project.runner("plan", ".")

    assert (done.code, sorted(done.errors)) == (4, ["provider.registry-unreachable"])  # of a daemon without a network
    assert "  agent" in done.out
    assert "all.runner.yaml:" in done.err
    assert "docker pull no-such-image:7" in done.err
