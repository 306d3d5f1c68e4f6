"""Pauses before a crashed server is started anew."""

from __future__ import annotations

import pytest

from runner.lifecycle.restart import JITTER, Restarts


@pytest.mark.parametrize(
    ("crashes", "pauses"),
    [
        ([0, 10, 20], [0, 0, 0]),
        ([0, 10, 20, 30, 36, 52, 98, 144], [0, 0, 0, 5, 15, 45, 45, 45]),
        ([0, 10, 20, 60], [0, 0, 0, 5]),
        ([0, 10, 20, 61], [0, 0, 0, 0]),
        ([0, 1, 2, 3, 70, 71], [0, 0, 0, 5, 0, 0]),
        ([0, 1, 2, 3, 68], [0, 0, 0, 5, 15]),
    ],
    ids=[
        "three are free",
        "they grow",
        "60 s after the first",
        "61 s after the first",
        "after more than a minute of life",
        "after a minute of life",
    ],
)
def test_pauses_begin_with_the_fourth_crash_within_60_seconds(crashes: list[float], pauses: list[float]) -> None:
    restarts, started, found = Restarts(lambda: 0.0), 0.0, []
    for crash in crashes:
        found.append(restarts.pause(started, crash))
        started = crash + found[-1]

    assert found == pauses


def test_several_servers_are_not_started_at_once() -> None:
    restarts = Restarts(lambda: 1.0)

    assert [restarts.pause(0, 0) for _ in range(4)] == [0, 0, 0, 5 * (1 + JITTER)]
