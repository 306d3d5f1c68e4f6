"""What each real CLI knows of the skill before it has read a line of it, as its model's provider hears it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from runner.core.settings import shipped
from runner.fake_model.script import Turn
from tests.cli.test_agent_clis import PLACES, toolchain, work_off
from tests.support import dockerd
from tests.support.situations import Project, document

__all__ = ["toolchain"]

CONTEXT = shipped("runners") / "context"
SKILL = shipped("skills") / "k8s-troubleshooter"
FILES = {"gemini": "GEMINI.md", "goose": ".goosehints"}
ANNOUNCED = "Investigate Kubernetes incidents read only"  # the beginning of its description
PROJECT = "A word of the project: 4711."
LOOK = """
cd /skills/k8s-troubleshooter
for place in ~/.claude ~/.agents; do cmp $place/skills/k8s-troubleshooter/SKILL.md SKILL.md; done
cp ~/GEMINI.md ~/.goosehints ~/.config/goose/config.yaml $RUNNER_OUTPUT; echo "keyring $GOOSE_DISABLE_KEYRING"
"""


def requests(heard: bytearray) -> list[str]:
    """Each request to a model, with its head."""
    return ["POST " + text for text in heard.decode(errors="replace").split("POST ")[1:]]


async def run_with_skill(
    project: Project, toolchain: Path, name: str, provider: str, prompt: str
) -> tuple[Path, list[str]]:
    """The directory of a run with the skill, which has succeeded, and the requests of its agent."""
    (project.folder / "incident").mkdir()
    (project.folder / "incident" / "GEMINI.md").write_text(PROJECT)
    if provider != "local":
        project.env["DOCKER_HOST"] = dockerd.host()
    place = PLACES[provider].format(toolchain)
    spec = f"agent: {name}\nskills: [k8s-troubleshooter]\nworkspace: {{enabled: true, {place}}}"
    run = f"agent_type: worker\nincident: {{directory: incident}}\nprompt: {prompt}"
    project.write(document("AgentType", "worker", spec), document("IncidentRun", "work", run))
    heard = bytearray()
    record = await work_off(project, name, [Turn(run=LOOK), Turn(say="All done.")], heard)
    directory = project.directory(record)
    said = [path.read_text()[-3000:] for path in (directory / "logs").glob("agent.*")]
    assert record.exit_code == 0, (record.outcome, *said)
    assert record.log is not None
    assert Path(record.log).read_text().count("All done.") >= 1
    return directory, requests(heard)


by_provider = pytest.mark.parametrize("provider", ["local", pytest.param("docker", marks=pytest.mark.nightly)])


@pytest.mark.slow
@pytest.mark.scenario("TRI-08")
@by_provider
async def test_claude_has_the_skill_and_loads_it_when_the_prompt_names_it(
    project: Project, toolchain: Path, provider: str
) -> None:
    directory, asked = await run_with_skill(
        project, toolchain, "claude", provider, "/k8s-troubleshooter checkout restarts"
    )

    lines = (directory / "logs" / "agent.stdout").read_text().splitlines()
    (init,) = (value for value in map(json.loads, lines) if value.get("subtype") == "init")
    assert "k8s-troubleshooter" in init["skills"]
    assert "k8s-troubleshooter" in init["slash_commands"]
    body = SKILL.joinpath("SKILL.md").read_text().split("---\n", 2)[2].strip().splitlines()[0]
    assert json.dumps(body)[1:-1] in asked[0]


@pytest.mark.slow
@by_provider
async def test_codex_announces_the_skill(project: Project, toolchain: Path, provider: str) -> None:
    _, asked = await run_with_skill(project, toolchain, "codex", provider, "go")

    assert asked[0].count(ANNOUNCED) == 1


@pytest.mark.slow
@pytest.mark.scenario("TRI-20")
@pytest.mark.scenario("TRI-21")
@by_provider
async def test_gemini_announces_the_skill_and_loads_each_of_its_files_once(
    project: Project, toolchain: Path, provider: str
) -> None:
    directory, asked = await run_with_skill(project, toolchain, "gemini", provider, "go")

    check_context(directory, asked, "gemini")
    assert asked[0].count(PROJECT) == 1
    assert asked[0].index("You investigate one incident") < asked[0].index(PROJECT)  # the user's before the project's
    assert asked[0].count(ANNOUNCED) == 1


@pytest.mark.slow
@pytest.mark.scenario("TRI-22")
@pytest.mark.scenario("TRI-23")
@by_provider
async def test_goose_announces_the_skill_and_loads_its_hints_once(
    project: Project, toolchain: Path, provider: str
) -> None:
    directory, asked = await run_with_skill(project, toolchain, "goose", provider, "go")

    check_context(directory, asked, "goose")
    assert asked[0].count(ANNOUNCED) == 1
    config = (directory / "output" / "config.yaml").read_text().splitlines()
    assert {"GOOSE_PROVIDER: openai", 'GOOSE_MODEL: "gpt-4.1"'} <= {*config}
    assert "keyring 1" in (directory / "logs" / "agent.stdout").read_text()


def check_context(directory: Path, asked: list[str], name: str) -> None:
    """The file is in the home directory, and its text was sent once; every script that it names is there."""
    text = (CONTEXT / FILES[name]).read_text()
    assert (directory / "output" / FILES[name]).read_text() == text
    words = next(line for line in text.splitlines() if line.startswith("You investigate one incident"))
    assert [request.count(words) for request in asked if "k8s-troubleshooter" in request][:1] == [1]
    scripts = set(re.findall(r"`/skills/k8s-troubleshooter/(scripts/\w+\.sh)", text))
    assert len(scripts) >= 5
    assert all((SKILL / script).is_file() for script in scripts)
