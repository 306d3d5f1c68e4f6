"""A plan is round-trip data: what a document holds of a run is the run that was compiled."""

from __future__ import annotations

from importlib import import_module

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import runner.steps
from runner.compiler import read_runs
from runner.core import plugins
from runner.core.codec import plain
from runner.plan.model import NoBody, RunPlan, Step, run_document
from tests.support.arbitrary import values
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
