"""Which steps of a resumed run are taken over: pure, on runs that are written down as a line of letters."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from runner.core.model import Outcome, Reason, Status, failed, succeeded
from runner.events.record import StepRecord
from runner.lifecycle.resume import Earlier, decide
from runner.plan.keys import parts
from runner.plan.model import RunPlan
from tests.support.small_plans import small_run, small_step

ORDER = ("provision", "clone", "setup", "agent", "post_hook", "scan", "snapshot", "verify")


def plan_of(*names: str) -> RunPlan:
    """Steps in a chain, as they follow each other."""
    return small_run("r", *(small_step(name, *names[max(i - 1, 0) : i]) for i, name in enumerate(names)))


PLAN = plan_of(*ORDER)
KEYS = {name: parts({"x": 1}) for name in ORDER}
DONE = {name: StepRecord(kind=name, status=Status.SUCCEEDED, outcome=succeeded()) for name in ORDER}


def ended(name: str, outcome: Outcome) -> dict[str, StepRecord]:
    return {**DONE, name: StepRecord(kind=name, status=outcome.status, outcome=outcome)}


def reasons(plan: RunPlan, earlier: Earlier, **changed: int) -> dict[str, str]:
    keys = {step.id: KEYS["agent"] for step in plan.steps if step.id != "lease"}
    keys |= {name: parts({"x": x}) for name, x in changed.items()}
    decided = decide(plan, keys, {"lease", "provision"}, earlier)
    assert all(d.reason == f"as in run {d.run}" for d in decided if d.reason.startswith("as in run"))
    return {d.step: d.reason for d in decided}


def ran(told: dict[str, str]) -> list[str]:
    return [name for name, reason in told.items() if not reason.startswith("as in run")]


OLD = Earlier("old", KEYS, DONE)


def test_what_succeeded_and_is_the_same_is_taken_over_and_the_workspace_made_anew() -> None:
    told = reasons(PLAN, OLD)

    assert ran(told) == ["provision"]
    assert told["provision"] == "its workspace is gone"
    assert told["agent"] == "as in run old"


@pytest.mark.parametrize(
    ("name", "first"),
    [
        *((name, "clone") for name in ("clone", "setup", "agent", "post_hook")),
        *((name, name) for name in ("scan", "snapshot", "verify")),
    ],
)
@pytest.mark.parametrize("how", ["failed", "changed", "skipped", "never reached"])
def test_a_step_that_has_to_run_takes_along_what_needs_it_and_all_that_is_saved_with_it(
    name: str, first: str, how: str
) -> None:
    outcomes = {"failed": failed(Reason.EXIT, "exited 3"), "skipped": Outcome(status=Status.SKIPPED)}
    steps = ended(name, outcomes[how]) if how in outcomes else {**DONE, name: StepRecord(kind=name)}
    told = reasons(PLAN, OLD, **{name: 2}) if how == "changed" else reasons(PLAN, replace(OLD, steps=steps))

    assert ran(told) == ["provision", *ORDER[ORDER.index(first) :]]
    words = {"failed": "it did not succeed: exited 3", "changed": "x changed from 1 to 2"}
    assert told[name] == words.get(how, "it did not run")
    for earlier in ORDER[ORDER.index(first) : ORDER.index(name)]:
        assert told[earlier] == f"{name} runs again, and needs it"
    for before, later in zip(ORDER[ORDER.index(name) :], ORDER[ORDER.index(name) + 1 :], strict=False):
        assert told[later] == f"its need {before} runs again"


def test_another_workspace_is_another_start_for_everything() -> None:
    told = reasons(PLAN, OLD, provision=2)

    assert ran(told) == list(ORDER)
    assert (told["provision"], told["clone"]) == ("x changed from 1 to 2", "its need provision is not the same")


def test_work_that_lacks_something_is_done_again() -> None:
    told = reasons(PLAN, replace(OLD, lacking="its work was not saved"))

    assert ran(told) == list(ORDER)
    assert told["agent"] == "its work was not saved"
    assert told["scan"] == "its need post_hook runs again"


@pytest.mark.parametrize("name", ["setup", "post_hook"])
def test_a_step_that_is_gone_is_in_the_saved_work(name: str) -> None:
    told = reasons(plan_of(*(other for other in ORDER if other != name)), OLD)

    assert told["agent"] == f"{name} is gone, and the saved work has what it did"


@pytest.mark.parametrize("name", ["verify", "snapshot"])
def test_a_step_after_the_scan_that_is_gone_changes_nothing_before_it(name: str) -> None:
    told = reasons(plan_of(*(other for other in ORDER if other != name)), OLD)

    assert "agent" not in ran(told)


def test_a_new_step_runs_and_what_was_saved_without_it_is_done_again() -> None:
    keys = {name: parts for name, parts in KEYS.items() if name != "post_hook"}
    told = reasons(PLAN, replace(OLD, keys=keys))

    assert told["post_hook"] == "it is new"
    assert told["agent"] == "post_hook runs again, and needs it"


def test_a_step_without_content_is_done_anew_and_changes_nothing() -> None:
    told = reasons(plan_of("lease", *ORDER), OLD)

    assert ran(told) == ["lease", "provision"]
    assert told["lease"] == "its workspace is gone"


def test_a_step_that_was_taken_over_before_is_as_in_the_run_that_did_it() -> None:
    steps = {**DONE, "agent": replace(DONE["agent"], reused="older")}

    assert reasons(PLAN, replace(OLD, steps=steps))["agent"] == "as in run older"
