"""A plan is round-trip data: what a document holds of a run is the run that was compiled."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import runner.steps
from runner.compiler import compile_plan, read_runs, run_faults
from runner.core import plugins
from runner.core.codec import plain
from runner.core.errors import Cycle
from runner.plan.model import NoBody, RunPlan, Step, run_document
from runner.spec.model import Facts
from tests.support.arbitrary import values
from tests.support.manifest_text import resolved
from tests.support.small_plans import small_run, small_step


@pytest.mark.parametrize("kind", plugins.names(runner.steps))
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_run_is_read_as_it_was_written(kind: str, data: st.DataObject) -> None:
    body = getattr(import_module(f"runner.steps.{kind}.plan"), "BODY", NoBody)
    step = replace(data.draw(values(Step)), id="a", kind=kind, needs=(), body=data.draw(values(body)))
    run = replace(data.draw(values(RunPlan)), steps=(step,))

    assert read_runs([plain(run)]) == (run,)


def test_what_follows_from_a_run_is_not_read(small: RunPlan) -> None:
    assert read_runs([plain(run_document(small))]) == (small,)


@pytest.mark.parametrize("kind", ["unheard", "../lease", ""])
def test_a_step_of_no_known_kind_is_refused(small: RunPlan, kind: str) -> None:
    run = replace(small, steps=(replace(small.steps[0], kind=kind),))

    with pytest.raises(ValueError, match="is not a kind of step"):
        read_runs([plain(run)])


@pytest.fixture
def small() -> RunPlan:
    return small_run("a", small_step("lease"))


@pytest.fixture
def whole(tmp_path: Path) -> RunPlan:
    """A run with a step of most kinds."""
    spec, _ = resolved(tmp_path, {"setup_commands": ["true"]}, run={"verify": {"report": {"path": "report.md"}}})
    return compile_plan([spec], Facts({}, open=True), documents=[], settings={})[0].runs[0]


def edited(run: RunPlan, kind: str, **fields: object) -> RunPlan:
    """The run with another step of that kind."""
    return replace(run, steps=tuple(replace(step, **fields) if step.kind == kind else step for step in run.steps))


STEPS = "run `fix` does not have the steps of a run in their order"
NAMES = "its runs need each other by other names than theirs"


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        pytest.param(lambda run: [run], [], id="as it was compiled"),
        pytest.param(lambda run: [run, replace(run, name="fix.a-1", needs=("fix",))], [], id="a member that needs it"),
        pytest.param(lambda run: [run, run], [NAMES], id="twice"),
        pytest.param(lambda run: [replace(run, needs=("other",))], [NAMES], id="a need that is not there"),
        pytest.param(lambda run: [replace(run, group="Fix")], ["`fix` is not the name of a run"], id="its group"),
        pytest.param(lambda run: [replace(run, name="../x")], ["`../x` is not the name of a run"], id="its name"),
        pytest.param(lambda run: [replace(run, steps=run.steps[:-1])], [STEPS], id="a step less"),
        pytest.param(lambda run: [replace(run, steps=())], [STEPS], id="no step"),
        pytest.param(lambda run: [replace(run, steps=run.steps[::-1])], [STEPS], id="another order"),
        pytest.param(lambda run: [edited(run, "agent", id="x")], [STEPS], id="another id"),
        pytest.param(lambda run: [edited(run, "agent", needs=())], [STEPS], id="other needs"),
        pytest.param(lambda run: [edited(run, "agent", phase="finalize")], [STEPS], id="another phase"),
        pytest.param(
            lambda run: [replace(run, steps=tuple(step for step in run.steps if step.id != "setup"))],
            [STEPS],
            id="a need that is no step",
        ),
    ],
)
def test_runs_are_those_that_compiling_gives(
    whole: RunPlan, change: Callable[[RunPlan], list[RunPlan]], faults: list[str]
) -> None:
    assert [*run_faults(tuple(change(whole)))] == faults


def test_runs_that_wait_for_each_other_are_no_plan(whole: RunPlan) -> None:
    with pytest.raises(Cycle):
        next(run_faults((replace(whole, needs=("fix",)),)))
