"""How long to wait before a call that failed is made again."""

from __future__ import annotations

import pytest

from runner.lifecycle.backoff import pauses


@pytest.mark.parametrize(
    ("chance", "seconds"),
    [(0.0, [0.2, 0.4, 0.8]), (0.5, [0.3, 0.6, 1.2]), (1.0, [0.4, 0.8, 1.6])],
    ids=["the least", "between", "the most"],
)
def test_each_pause_may_be_twice_as_long_and_is_at_least_half_of_that(chance: float, seconds: list[float]) -> None:
    assert [*pauses(lambda: chance)] == pytest.approx(seconds)
