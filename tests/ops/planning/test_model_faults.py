"""What a manifest says of its model is judged before anybody is asked, at its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.core.errors import Rejected
from runner.core.settings import Settings
from runner.ops.planning.make_plan import make_plan
from runner.ops.planning.validate import validate
from tests.support.situations import document

WORKSPACE = "workspace: {enabled: true, providers: [process]}"


def findings_of(folder: Path, spec: str) -> list[str]:
    """Code, line, message and hint of each finding."""
    run = document("IncidentRun", "work", "agent_type: worker\nprompt: x")
    worker = document("AgentType", "worker", f"{spec}\n{WORKSPACE}")
    (folder / "all.runner.yaml").write_text(f"{worker}---\n{run}")
    _, found = validate(folder, Settings.from_env({}))
    errors = [one for one in found if one.severity == "error"]
    return [f"{one.code} {one.at.line if one.at else 0} {one.message}\n{one.hint}" for one in errors]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        pytest.param(
            "agent: claude\nmodel: claude-next\nbudget: {cost_usd: 1}",
            "gateway.unpriced 7 the model `claude-next` has no known price",
            id="no price beside a budget in dollars",
        ),
        pytest.param(
            "agent: claude\nmodel: claude-sonnet\nbudget: {cost_usd: 1}",
            "gateway.unpriced 7 the model `claude-sonnet` has no known price, so `budget.cost_usd` cannot be kept\n"
            "write `budget.tokens`, or name a model with a price, such as `claude-sonnet-5-5`",
            id="a family without a price",
        ),
        pytest.param(
            "agent: claude\nenv:\n  ANTHROPIC_BASE_URL: http://x",
            "manifest.bad-value 7 `ANTHROPIC_BASE_URL`",
            id="a variable that is set",
        ),
        pytest.param("agent: codex\nenv: {CODEX_HOME: /x}", "manifest.bad-value 6 `CODEX_HOME`", id="a CLI's home"),
        pytest.param("agent: goose\nenv: {OPENAI_HOST: x}", "manifest.bad-value 6 `OPENAI_HOST`", id="another place"),
        pytest.param("agent: claude\nmodel: son net", "manifest.bad-value 6", id="a blank in a model's name"),
        pytest.param(f"agent: claude\nmodel: {'x' * 201}", "manifest.bad-value 6", id="a name without end"),
    ],
)
async def test_what_cannot_be_kept_is_an_error_at_its_line(tmp_path: Path, spec: str, words: str) -> None:
    (found,) = findings_of(tmp_path, spec)
    with pytest.raises(Rejected) as refused:
        await make_plan(tmp_path, Settings.from_env({"RUNNER_HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin"}))

    assert found.startswith(words)
    assert [finding.code for finding in refused.value.findings if finding.severity == "error"] == [words.split()[0]]


@pytest.mark.parametrize(
    "spec",
    [
        "agent: claude\nmodel: claude-next\nbudget: {tokens: 1000}",
        "agent: claude\nbudget: {cost_usd: 1}\nenv: {CI: 'true', MY_ANTHROPIC_URL: x}",
        "agent: goose\nmodel: us.anthropic.claude-3-5-sonnet-20241022-v2:0",
        "agent: goose\nmodel: ft:gpt-4.1:team::8x[1m]",
        "agent: script\nscript: {path: all.runner.yaml}\nenv: {OPENAI_HOST: x}",
    ],
)
def test_what_can_be_kept_is_none(tmp_path: Path, spec: str) -> None:
    assert findings_of(tmp_path, spec) == []


async def test_what_several_runs_rest_on_is_said_once(tmp_path: Path) -> None:
    run = document("IncidentRun", "other", "agent_type: worker\nprompt: x")
    findings_of(tmp_path, "agent: claude\nenv: {CODEX_HOME: /x}")
    (tmp_path / "other.runner.yaml").write_text(run)
    with pytest.raises(Rejected) as refused:
        await make_plan(tmp_path, Settings.from_env({"RUNNER_HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin"}))

    assert len(refused.value.findings) == 1
