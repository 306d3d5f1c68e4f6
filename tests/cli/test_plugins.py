"""Providers and agents of another distribution: they are used by name, and proved by the suite that proves ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import runner
from tests.support.distribution import install
from tests.support.situations import REPO, Project, document

BOXED = """
from msgspec.structs import replace
from runner.ports.provider import STOP_GRACE
from runner.providers.local import LocalProvider

SHOWS_HOST = True


def provider(settings, *, grace=STOP_GRACE):
    return Boxed(settings.home, grace=grace)


class Boxed(LocalProvider):
    name = "boxed"

    async def probe(self):
        return replace(await super().probe(), provider=self.name)
"""
FORGETS = (
    BOXED
    + """
    async def destroy(self, handle):
        pass
"""
)
GREETER = """
from runner.agents.script import ScriptAgent

agent = ScriptAgent()
"""
LINE = 'emit_command sh -c \'cat "$1" >answer.txt\' sh "$PROMPT_FILE"\n'
GROUPS = {"runner.providers": {"boxed": "boxed"}, "runner.agents": {"greeter": "greeter"}}
GREET = document(
    "AgentType", "greeter", f"agent: greeter\nworkspace: {{enabled: true, providers: [boxed], {REPO}}}"
) + document("IncidentRun", "greet", "agent_type: greeter\nprompt: Hello.").join(["---\n", ""])
ROOT = Path(runner.__file__).parents[1]
PROVIDER = "own_status or nonce or cannot_be_seen"


@pytest.fixture
def site(tmp_path: Path, project: Project) -> Path:
    """A directory where the command finds distributions."""
    folder = tmp_path / "site"
    folder.mkdir()
    project.env["PYTHONPATH"] = f"{folder}:{ROOT}"
    return folder


def install_boxed(site: Path, boxed: str = BOXED) -> None:
    install(site, "boxed", GROUPS, boxed=boxed, greeter=GREETER)
    (site / "greeter.sh").write_text(LINE)


def conform(site: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the shipped suite as another distribution does, from a folder without any configuration."""
    folder.mkdir()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    env = {**os.environ, "PYTHONPATH": f"{site}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [*command, "--pyargs", "runner.testing.conformance"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.scenario("BEY-26", only="provider and agent are used")
def test_a_run_uses_provider_and_agent_of_another_distribution(project: Project, repository: Path, site: Path) -> None:
    """The sub-runner is the distribution's, whatever the repository has at that place."""
    install_boxed(site)
    for place in ("greeter.sh", "runners/greeter.sh"):
        (repository / place).parent.mkdir(exist_ok=True)
        (repository / place).write_text("emit_command touch pwned\n")
    project.write(GREET)

    record = project.succeed()

    assert record["provider"] == "boxed"
    assert project.runner("runs", "patch", "last").out.count("+Hello.") == 1
    assert "plug-in    provider `boxed` of boxed 1.0" in project.runner("doctor").out
    assert "plug-in    agent `greeter` of boxed 1.0" in project.runner("doctor").out


@pytest.mark.slow
@pytest.mark.scenario("BEY-26", only="broken ones are named")
def test_one_that_is_broken_is_named_and_disturbs_nobody_else(project: Project, repository: Path, site: Path) -> None:
    install(site, "boxed", GROUPS, version="2.0", boxed="import boxes", greeter=GREETER)
    install(site, "evil", {"runner.providers": {"local": "evil"}}, evil="raise SystemExit")
    project.write(GREET)

    done = project.runner("apply", str(project.folder))
    doctor = project.runner("doctor")

    assert done.errors == ["plugin.broken"], done.err
    assert "`boxed` of boxed 2.0 cannot be imported: ModuleNotFoundError: No module named 'boxes'" in done.err
    assert "Traceback" not in done.err
    assert "✗ plug-in    provider `boxed` of boxed 2.0" in doctor.out
    assert "✗ plug-in    provider `local` of evil 1.0\n    a built-in plug-in has this name" in doctor.out
    assert "✓ local" in doctor.out


def test_an_unknown_name_is_compared_with_registered_ones(project: Project, site: Path) -> None:
    install_boxed(site)
    project.write(GREET.replace("[boxed]", "[boxd]").replace("agent: greeter", "agent: greter"))

    said = project.runner("validate", str(project.folder)).err

    assert '"greeter",' in project.runner("schema", "AgentType").out
    assert "did you mean `greeter`?" in said
    project.edit("agent: greter", "agent: greeter")
    assert "did you mean `boxed`?" in project.runner("validate", str(project.folder)).err


@pytest.mark.slow
@pytest.mark.scenario("BEY-26", only="the suite proves them")
@pytest.mark.parametrize("chosen", [PROVIDER, pytest.param("", marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])])
def test_they_pass_the_shipped_suite(tmp_path: Path, site: Path, chosen: str) -> None:
    install_boxed(site)

    provider = conform(site, tmp_path / "provider", *(["-k", f"boxed and ({chosen})"] if chosen else ["-k", "boxed"]))
    agent = conform(site, tmp_path / "agent", "-k", "greeter")

    assert provider.returncode == 0, provider.stdout
    assert " passed" in provider.stdout
    assert agent.returncode == 0, agent.stdout
    assert " passed" in agent.stdout


@pytest.mark.slow
@pytest.mark.scenario("BEY-26", only="the suite proves them")
def test_one_that_does_not_keep_the_contract_fails_the_suite(tmp_path: Path, site: Path) -> None:
    install(site, "boxed", GROUPS, boxed=FORGETS, greeter=GREETER.replace("= ScriptAgent()", "= None"))
    (site / "greeter.sh").write_text("echo 'touch $(hostname)'\n")

    provider = conform(site, tmp_path / "provider", "-k", "boxed and own_status")
    agent = conform(site, tmp_path / "agent", "-k", "greeter and prints_one_line")

    assert provider.returncode == 1, provider.stdout
    assert agent.returncode == 1, agent.stdout
