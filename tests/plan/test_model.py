"""How long a plan may take at most, and what its document says."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import Struct

from runner.core.codec import plain
from runner.core.hosts import NetworkSpec
from runner.plan.model import FORMAT, Plan, RunPlan, Step, network_of, run_document
from tests.support.small_plans import small_run, small_step


def step(id: str, seconds: float, *needs: str, **more: Any) -> Step:
    return small_step(id, *needs, deadline_seconds=seconds, **more)


def run(name: str, *steps: Step, deadline: float = 100.0, stop: float = 100.0, **more: Any) -> RunPlan:
    given = {"providers": ("local", "process"), "deadline_seconds": deadline, "stop_budget_seconds": stop, **more}
    return small_run(name, *steps, **given)


STEPS = (
    step("a", 5, repeated_on_fallback=True),
    step("b", 7, "a"),
    step("c", 3, "a"),
    step("d", 4, "b", phase="finalize", repeated_on_fallback=True),
    step("e", 2, "d", phase="finalize"),
)


@pytest.mark.parametrize(
    ("deadline", "stop", "seconds"), [(100.0, 100.0, 23.0), (15.0, 100.0, 21.0), (100.0, 5.0, 22.0)]
)
def test_a_run_takes_at_most_its_longest_path_with_each_provider_and_its_deadlines(
    deadline: float, stop: float, seconds: float
) -> None:
    whole = run("r", *STEPS, deadline=deadline, stop=stop)

    assert whole.worst_case() == (("a", "b", "d", "e"), seconds)
    known = {"critical_path": ["a", "b", "d", "e"], "worst_seconds": seconds}
    assert run_document(whole) == {**plain(whole), **known}


def members(most: int | None) -> list[RunPlan]:
    """Three of a matrix, and one that needs the last."""
    matrix = [run(f"m{n}", step("a", n), group="m", max_parallel=most) for n in (10, 20, 5)]
    return [*matrix, run("x", step("a", 1), needs=("m5",))]


@pytest.mark.parametrize(
    ("most", "path", "seconds"),
    [
        pytest.param(None, ("m20",), 20.0, id="all at once"),
        pytest.param(3, ("m5", "x"), 21.0, id="room for all, of which each may be the slowest"),
        pytest.param(2, ("m10", "m5", "x"), 41.0, id="two at once"),
        pytest.param(1, ("m10", "m20", "m5", "x"), 61.0, id="one at a time"),
    ],
)
def test_members_of_a_matrix_wait_for_room(most: int | None, path: tuple[str, ...], seconds: float) -> None:
    plan = Plan("sha256:1", tuple(members(most)), max_cost_usd=2.0)

    assert plan.worst_case() == (path, seconds)
    assert plan.document() == {
        "format": FORMAT,
        "digest": "sha256:1",
        "open": False,
        "worst_seconds": seconds,
        "max_cost_usd": 2.0,
        "runs": [run_document(run) for run in plan.runs],
    }


class Opened(Struct, frozen=True):
    network: NetworkSpec


def test_a_body_is_found_by_its_type_and_what_it_may_reach_with_it() -> None:
    opened = Opened(NetworkSpec(open=True))
    whole = run("r", step("plain", 1), step("open", 1, body=opened))

    assert whole.body(Opened) is opened
    assert run("r", step("plain", 1)).body(Opened) is None
    assert [network_of(step) for step in whole.steps] == [NetworkSpec(), opened.network]
