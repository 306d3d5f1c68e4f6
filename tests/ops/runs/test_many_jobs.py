"""What a run costs that is a Job, when there are many: no more than when there are few, on a simulated cluster."""

from __future__ import annotations

from tests.benchmarks.bench_jobs import Size, measure


def test_runs_that_a_quota_has_no_room_for_ask_and_write_no_more_when_they_are_many() -> None:
    """Half of the Jobs wait for a node, and most runs for a Job."""
    size = Size(nodes=2, pods=2, jobs=8)

    few, many = measure(20, size), measure(80, size)

    assert many.requests / 80 <= 1.2 * few.requests / 20
    assert many.rows / 80 <= 1.2 * few.rows / 20
