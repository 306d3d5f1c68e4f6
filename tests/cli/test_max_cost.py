"""``--max-cost``: a ceiling for all runs of a plan together, which the gateway keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.core.errors import Rejected
from runner.ops.planning.make_plan import Request, make_plan
from runner.ops.planning.plan_file import save
from runner.ops.planning.saved_plan import load_plan
from runner.ops.runs.history import find_run
from runner.ops.runs.resume import plan_resume
from tests.cli.test_models import KEYS, doubled, tools, write
from tests.support.runs import apply, resume
from tests.support.situations import Project, document, outcome_of

__all__ = ["tools"]  # a fixture


def two_kinds(project: Project, tools: Path, *, budget: str) -> None:
    worker = f"workspace: {{enabled: true, providers: [local], toolchains: [{tools}]}}"
    project.write(
        document("AgentType", "free", f"agent: goose\n{worker}"),
        document("AgentType", "bound", f"agent: goose\nbudget: {{cost_usd: {budget}}}\n{worker}"),
        document("IncidentRun", "a", "agent_type: free"),
        document("IncidentRun", "b", "agent_type: free"),
        document("IncidentRun", "c", "agent_type: bound"),
    )


@pytest.mark.scenario("BEY-16")
async def test_runs_without_a_budget_share_what_those_with_one_leave(project: Project, tools: Path) -> None:
    two_kinds(project, tools, budget="4")

    planned = await make_plan(project.folder, project.settings(**KEYS), Request(max_cost=10.0))

    assert {run.name: run.cost_usd for run in planned.plan.runs} == {"a": 3.0, "b": 3.0, "c": 4.0}
    assert planned.plan.document()["max_cost_usd"] == 10.0


@pytest.mark.parametrize(
    ("budget", "words"),
    [("11", "add up to $11.00, and --max-cost is $10.00"), ("10", "leave nothing of $10.00 for the 2 runs")],
)
async def test_budgets_that_come_to_more_are_refused_before_anything_starts(
    project: Project, tools: Path, budget: str, words: str
) -> None:
    two_kinds(project, tools, budget=budget)

    with pytest.raises(Rejected) as refused:
        await make_plan(project.folder, project.settings(**KEYS), Request(max_cost=10.0))

    (finding,) = refused.value.findings
    assert (finding.code, words in finding.message) == ("plan.over-cost", True)


async def test_an_agent_that_has_its_key_itself_has_no_ceiling_to_keep(project: Project, tools: Path) -> None:
    write(project, tools, "agent: goose\ncredentials: env", provider="process")

    with pytest.raises(Rejected, match="1 error"):
        await make_plan(project.folder, project.settings(**KEYS), Request(max_cost=1.0))


@pytest.mark.slow
@pytest.mark.scenario("BEY-16")
@pytest.mark.parametrize("ceiling", [0.05, 3.5])
async def test_all_runs_together_never_cost_more(project: Project, tools: Path, ceiling: float) -> None:
    """The double answers with as much as it is told; a request without a limit could cost a dollar of gpt-4.1."""
    write(project, tools, "agent: goose\nenv: {ASKS: '9'}", run="matrix: {model: [gpt-4.1, gpt-4.1-mini]}")

    async with doubled(project, [{"say": "ok", "usage": {"input": 300, "output": 60_000}}] * 18) as settings:
        planned = await make_plan(project.folder, settings, Request(max_cost=ceiling))
        records = await apply(planned, settings, [])

    spent = [sum(used.cost_usd or 0.0 for used in record.models.values()) for record in records]
    assert sum(spent) <= ceiling
    assert (sum(spent) > 0) is (ceiling > 1), spent
    assert "an answer can cost $" in outcome_of(records[0]).message


@pytest.mark.slow
async def test_a_saved_plan_keeps_the_ceiling_and_its_runs_record_their_shares(project: Project, tools: Path) -> None:
    write(project, tools, "agent: goose\nenv: {ASKS: '1'}")

    async with doubled(project, [{"say": "ok"}]) as settings:
        save(await make_plan(project.folder, settings, Request(max_cost=9.0)), project.folder / "plan.json")
        planned = await load_plan(project.folder / "plan.json", settings)
        (record,) = await apply(planned, settings, [])

    kept = json.loads((project.directory(record) / "plan.json").read_text())
    (agent,) = (step for step in kept["runs"][0]["steps"] if step["kind"] == "agent")
    assert agent["body"]["model"]["budget"] == {"tokens": None, "cost_usd": 9.0, "turns": None, "strict": True}
    assert (kept["inputs"]["request"]["max_cost"], kept["inputs"]["request"]["run_cost"]) == (None, 9.0)


@pytest.mark.slow
async def test_a_run_that_is_resumed_has_what_is_left_of_its_share(project: Project, tools: Path) -> None:
    write(project, tools, "agent: goose\nenv: {ASKS: '1'}")
    (tools / "bin" / "goose").write_text((tools / "bin" / "goose").read_text().replace("cat " + str(tools), "exit 3 #"))

    async with doubled(project, [{"say": "ok", "usage": {"input": 1000, "output": 1000}}] * 2) as settings:
        (record,) = await apply(await make_plan(project.folder, settings, Request(max_cost=2.0)), settings, [])
        spent = record.models["gpt-4.1"].cost_usd
        resuming = await plan_resume(await find_run(settings, record.id), None, settings)
        again = await resume(resuming, settings, [])

    assert (record.exit_code, spent) == (1, pytest.approx(0.01))
    assert "$1.99 are left of the $2.00 that it may cost" in resuming.notes
    kept = json.loads((project.directory(again) / "plan.json").read_text())
    (agent,) = (step for step in kept["runs"][0]["steps"] if step["kind"] == "agent")
    assert agent["body"]["model"]["budget"]["cost_usd"] == pytest.approx(1.99)


@pytest.mark.parametrize("sum", ["0", "-1", "ten", "nan", "inf", ""])
def test_what_is_no_sum_is_refused(project: Project, sum: str) -> None:
    project.script("true")

    done = project.runner("plan", ".", f"--max-cost={sum}")

    assert (done.code, f"--max-cost: `{sum}` is not a sum in dollars" in done.err) == (2, True), done.err


def test_the_last_line_of_a_plan_says_what_it_may_cost(project: Project, tools: Path) -> None:
    project.env |= KEYS
    two_kinds(project, tools, budget="4")
    last = project.runner("plan", ".").out.splitlines()[-1]
    bound = project.runner("plan", ".", "--max-cost", "$10").out.splitlines()[-1]

    assert ", 2 of them without a budget in dollars, the others up to $4.00, over after " in last
    assert ", up to $10.00, --max-cost $10.00, over after " in bound
