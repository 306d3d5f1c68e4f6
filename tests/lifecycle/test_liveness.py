"""Which runner process is dead."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from runner.lifecycle.liveness import BEAT, DEAD_AFTER, is_dead, place
from runner.ports.store import RunnerRow

HERE = RunnerRow(id="here", host="one", boot="boot-1", home="8:1", pid=7, ticks=70)
NOW = 1_000_000_000


def heard(seconds: float, runner: RunnerRow) -> RunnerRow:
    """The runner, last heard of so many seconds ago."""
    return replace(runner, heartbeat=NOW - round(seconds * 1e6))


SAME = replace(HERE, id="a")
OTHER_HOST = RunnerRow(id="a", host="two", boot="boot-2", home="8:9", pid=7, ticks=70)
OTHER_HOME = replace(SAME, home="8:2")


@pytest.mark.parametrize(
    ("runner", "locked", "dead"),
    [
        pytest.param(heard(0, SAME), True, False, id="locked here"),
        pytest.param(heard(0, SAME), False, True, id="lets go here"),
        pytest.param(heard(0, replace(SAME, boot="boot-0")), False, True, id="before this host's restart"),
        pytest.param(heard(0, replace(SAME, host="c0ffee")), False, True, id="in another container of this home"),
        pytest.param(heard(0, replace(SAME, host="two", boot="boot-2")), False, False, id="a home of the same number"),
        pytest.param(heard(BEAT, OTHER_HOST), False, False, id="heard of elsewhere"),
        pytest.param(heard(DEAD_AFTER, OTHER_HOST), False, False, id="not yet silent for long"),
        pytest.param(heard(DEAD_AFTER + 1e-6, OTHER_HOST), False, True, id="silent"),
        pytest.param(heard(-DEAD_AFTER - 1, OTHER_HOST), False, False, id="heard of in the future"),
        pytest.param(heard(DEAD_AFTER + 1, OTHER_HOST), True, False, id="silent, and being recovered here"),
        pytest.param(heard(0, OTHER_HOME), False, False, id="another home of this host"),
        pytest.param(heard(0, replace(SAME, home="")), False, False, id="no home"),
        pytest.param(None, False, True, id="ended"),
        pytest.param(None, True, False, id="ended, and taken up again"),
    ],
)
def test_a_runner_is_dead_by_its_lock_here_and_by_its_silence_elsewhere(
    runner: RunnerRow | None, locked: bool, dead: bool
) -> None:
    assert is_dead(runner, HERE, NOW, locked=locked) is dead


def test_without_a_home_nothing_is_local() -> None:
    assert not is_dead(heard(0, replace(SAME, home="")), replace(HERE, home=""), NOW, locked=False)


def test_a_runner_is_named_by_process_host_and_silence() -> None:
    seconds = 2_500_000

    found = place(replace(OTHER_HOST, heartbeat=NOW), NOW + seconds * 1_000_000)

    assert found == f"process 7 of host `two`, last heard of {seconds} s ago"
