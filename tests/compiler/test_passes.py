"""Which steps a run has, in which order, and what each of them waits for."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.core.settings import Settings
from runner.ops.planning.make_plan import Request, make_plan
from tests.support.situations import document

SCRIPT = "script: {files: [{path: run.sh, content: 'true'}]}"
CLONE = "repo_source: {type: local, path: .}"
SETUP = "setup_commands: ['true']"
HOOKS = "post_hooks: ['true']"


@pytest.mark.parametrize(
    ("agent", "workspace", "run", "steps"),
    [
        pytest.param(
            "",
            "",
            "",
            "lease provision<lease agent<provision scan<agent save teardown<save release<teardown",
            id="the least",
        ),
        pytest.param(
            HOOKS,
            f"{CLONE}, {SETUP}",
            "verify: {commands: [{run: 'true'}]}",
            "lease provision<lease clone<provision setup<clone agent<setup post_hook<agent"
            " scan<agent,post_hook snapshot<scan"
            " verify<snapshot save teardown<save release<teardown",
            id="all",
        ),
        pytest.param(
            "",
            SETUP,
            "verify: {report: {path: report.md}}",
            "lease provision<lease setup<provision agent<setup scan<agent verify<scan save teardown<save"
            " release<teardown",
            id="no repository",
        ),
        pytest.param(
            "",
            CLONE,
            "",
            "lease provision<lease clone<provision agent<clone scan<agent snapshot<scan save teardown<save"
            " release<teardown",
            id="no setup",
        ),
        pytest.param(
            "",
            SETUP,
            "incident: {directory: .}\ncontext: {preload: [incident]}",
            "lease provision<lease setup<provision preload<setup agent<preload scan<agent save teardown<save"
            " release<teardown",
            id="an incident",
        ),
    ],
)
async def test_each_step_stands_after_the_best_that_is_there_of_what_it_can_wait_for(
    tmp_path: Path, agent: str, workspace: str, run: str, steps: str
) -> None:
    fields = ", ".join(filter(None, ["enabled: true", workspace]))
    types = document("AgentType", "fixer", f"agent: script\n{SCRIPT}\n{agent}\nworkspace: {{{fields}}}")
    runs = document("IncidentRun", "fix", f"agent_type: fixer\n{run}")
    (tmp_path / "all.runner.yaml").write_text(f"{types}---\n{runs}")

    planned = await make_plan(tmp_path, Settings.from_env({}), Request(offline=True))

    (only,) = planned.plan.runs
    assert steps.split() == [step.id + "<" * bool(step.needs) + ",".join(step.needs) for step in only.steps]
