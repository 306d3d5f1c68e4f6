"""When a workspace has had its time, and whether the clock may be believed."""

from __future__ import annotations

import pytest

from runner.core.model import ClockReference
from runner.lifecycle.ttl import expired, expiry, why_unsteady

SECOND = 1_000_000


@pytest.mark.parametrize(
    ("most", "moment"),
    [(None, 110), (200.0, 110), (105.0, 105), (5.0, 5)],
    ids=["no greatest age", "later", "sooner", "over already"],
)
def test_a_workspace_ends_after_its_last_use_or_at_its_greatest_age(most: float | None, moment: int) -> None:
    assert expiry(0, 100 * SECOND, ttl_seconds=10.0, max_age_seconds=most) == moment * SECOND


@pytest.mark.parametrize(("expires", "over"), [(None, False), (9, True), (10, True), (11, False)])
def test_what_ends_now_is_over(expires: int | None, over: bool) -> None:
    assert expired(expires, 10) is over


@pytest.mark.parametrize(
    ("before", "seen", "newest", "why"),
    [
        pytest.param(None, 0, 0, None, id="the first look"),
        pytest.param(0, 300, 0, None, id="adjusted a little"),
        pytest.param(0, 300.0001, 0, "set forward by 300 s", id="set forward"),
        pytest.param(0, -1_000_000, 0, "set back by 1,000,000 s", id="set back"),
        pytest.param(100, 401, 0, "set forward by 301 s", id="set forward since an earlier look"),
        pytest.param(100, 400, 0, None, id="adjusted since an earlier look"),
        pytest.param(0, 0, 1_002, "is 2 s behind the newest event", id="behind the journal"),
    ],
)
def test_a_clock_that_was_set_is_not_believed(before: int | None, seen: float, newest: int, why: str | None) -> None:
    anchor = None if before is None else ClockReference("boot", before * SECOND)

    found = why_unsteady(
        anchor, ClockReference("boot", round(seen * SECOND)), newest=newest * SECOND, now=1_000 * SECOND
    )

    assert (found is None) == (why is None)
    assert why is None or why in str(found)


def test_another_boot_tells_nothing_about_the_clock() -> None:
    assert why_unsteady(ClockReference("one", 0), ClockReference("two", 10**12), newest=0, now=0) is None
