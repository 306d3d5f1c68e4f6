"""Of any number of processes that want one workspace, one has it."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import trio

from runner.events.events import LeaseAcquired, LeaseReleased, ResourceIntended, RunStarted, WarningIssued
from tests.support.needs import POSTGRES
from tests.support.store_race import open_at

PROCESSES = 50
STARTED = RunStarted(name="fix", plan="sha256:1", runner="0.1.0", steps={}, deadline_seconds=60.0)


@pytest.mark.slow
@pytest.mark.scenario("WSM-09")
@pytest.mark.parametrize(
    ("scheme", "rounds"),
    [
        ("sqlite", 20),
        pytest.param("sqlite", 1_000, marks=pytest.mark.nightly),
        pytest.param("postgresql", 3, marks=POSTGRES.mark),
        pytest.param("postgresql", 200, marks=[POSTGRES.mark, pytest.mark.nightly]),
    ],
)
async def test_of_fifty_processes_one_has_the_workspace_each_time(tmp_path: Path, scheme: str, rounds: int) -> None:
    url = f"sqlite://{tmp_path / 'state.db'}"
    if scheme == "postgresql":
        from tests.support.postgres import fresh_url

        url = fresh_url()
    async with open_at(url, lambda: 0) as store:
        await store.append("a", [STARTED, ResourceIntended("provision", "workspace", "w", "local")])
    command = [sys.executable, "-m", "tests.support.store_race", url, str(rounds), str(PROCESSES)]

    done = await trio.run_process(
        command, capture_stdout=True, check=False, cwd=Path(__file__).parents[2], stderr=subprocess.STDOUT
    )

    assert done.returncode == 0, done.stdout[-3000:].decode()
    answers = Counter(tuple(line.split(" ", 1)) for line in done.stdout.decode().splitlines())
    tries: Counter[str] = Counter()
    for number in range(rounds):
        of_round = {
            answer: answers[str(number), answer] for answer in ("owner", "held", "held refused", "owner refused")
        }
        tries.update(of_round)
        assert sum(of_round.values()) == PROCESSES, "each one tried, and nobody wrote with an old lease"
        assert of_round["owner"] + of_round["owner refused"] == 1, number
        assert of_round["held refused"] + of_round["owner refused"] == number % 2
    async with open_at(url, lambda: 0) as store:
        history = [recorded.event for recorded in await store.workspace_events("w")]
    taken = [event.fence for event in history if isinstance(event, LeaseAcquired)]
    assert all(before < after for before, after in itertools.pairwise(taken))
    assert [event.code for event in history if isinstance(event, WarningIssued)] == ["x.owner"] * rounds
    assert sum(isinstance(event, LeaseReleased) for event in history) == rounds // 2
