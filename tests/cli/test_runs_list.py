"""``runner runs list``: which runs are shown, and what is said of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from runner.core.clock import now_microseconds
from runner.core.model import Outcome, Reason, Status
from runner.events import events as ev
from runner.store.sqlite import open_store
from tests.support.bad_input import called
from tests.support.run_files import asked
from tests.support.situations import Project

HOUR = 3_600_000_000


class EarlierRuns:
    """A home with runs in it, and the repository that we stand in."""

    def __init__(self, home: Path, here: Path) -> None:
        self.home, self.here = home, here
        self.began = now_microseconds()

    def add(
        self, id: str, name: str, outcome: Outcome, *, hours: float = 0.0, at: Path | None = None, cost: bool = False
    ) -> None:
        """A run that began ``hours`` ago, took 75 s, and ended so."""
        moments = iter([self.began - int(hours * HOUR), self.began - int(hours * HOUR) + 75_000_000])
        code = {Status.SUCCEEDED: 0, Status.CANCELLED: 130}.get(outcome.status, 1)
        code = 124 if outcome.reason is Reason.TIMEOUT else code
        manifests = str((at or self.here) / ".runner")

        async def write() -> None:
            now = next(moments)
            store = open_store(self.home / "state.db", now=lambda: now, entropy=bytes, must_exist=False)
            async with store as opened:
                started = ev.RunStarted(
                    name=name,
                    plan="sha256:0",
                    runner="1",
                    steps={"agent": "agent"},
                    deadline_seconds=60.0,
                    manifests=manifests,
                )
                await opened.append(id, [started, *([asked(1_000, 10)] if cost else [])])
                now = next(moments)
                await opened.append(id, [ev.RunEnded(outcome, code)])

        trio.run(write)


@pytest.fixture
def past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EarlierRuns:
    here, home = tmp_path / "shop", tmp_path / "home"
    (here / ".git").mkdir(parents=True)
    (here / "src").mkdir()
    home.mkdir()
    monkeypatch.chdir(here / "src")
    monkeypatch.setenv("RUNNER_HOME", str(home))
    past = EarlierRuns(home, here)
    past.add("aaaa", "check", Outcome(status=Status.SUCCEEDED), hours=50, cost=True)
    past.add(
        "bbbb",
        "check",
        Outcome(status=Status.FAILED, reason=Reason.VERIFY, message="verify: 1 of 1 checks failed"),
        hours=20,
    )
    past.add(
        "cccc",
        "triage.claude",
        Outcome(status=Status.FAILED, reason=Reason.TIMEOUT, message="agent: time is over"),
        hours=3,
    )
    past.add(
        "dddd",
        "other",
        Outcome(status=Status.CANCELLED, reason=Reason.CANCELLED, message="Ctrl-C"),
        hours=1,
        at=tmp_path / "else",
    )
    return past


def listed(*arguments: str) -> list[str]:
    done = called("runs", "list", *arguments)
    assert done.code == 0, done.err
    return done.out.splitlines()


def ids(lines: Sequence[str]) -> list[str]:
    return [line[:4] for line in lines[1:] if line[4:6] == "  "]


def test_a_listing_says_what_each_run_was_and_why_it_ended(past: EarlierRuns) -> None:
    assert listed() == [
        "RUN   NAME           STATUS     AGE  TIME   COST   WHY",
        "cccc  triage.claude  timed-out  3h   1m15s         agent: time is over",
        "bbbb  check          failed     20h  1m15s         verify: 1 of 1 checks failed",
        "aaaa  check          succeeded  2d   1m15s  $0.31",
        "1 of other repositories: --all",
    ]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ([], "cccc bbbb aaaa"),
        (["--all"], "dddd cccc bbbb aaaa"),
        (["--name", "check"], "bbbb aaaa"),
        (["--name", "triage.*"], "cccc"),
        (["--status", "failed"], "bbbb"),
        (["--status", "timed-out"], "cccc"),
        (["--status", "cancelled", "--all"], "dddd"),
        (["--since", "1d"], "cccc bbbb"),
        (["--since", "2000-01-01"], "cccc bbbb aaaa"),
        (["--since", "2000-01-01T10:00Z", "--name", "check", "--status", "succeeded"], "aaaa"),
        (["--limit", "1"], "cccc"),
    ],
    ids=" ".join,
)
def test_only_what_is_asked_for_is_shown(past: EarlierRuns, arguments: list[str], found: str) -> None:
    assert ids(listed(*arguments)) == found.split()
    assert [row["id"] for row in json.loads("\n".join(listed(*arguments, "--output", "json")))] == found.split()


def test_outside_of_a_repository_all_runs_are_shown(
    past: EarlierRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert ids(listed()) == ["dddd", "cccc", "bbbb", "aaaa"]


def test_a_long_listing_says_that_there_are_more(past: EarlierRuns) -> None:
    for number in range(24):
        past.add(f"e{number:03}", "check", Outcome(status=Status.SUCCEEDED))

    assert len(ids(listed())) == 25
    assert listed()[-2] == "2 more: --limit 27"
    assert len(ids(listed("--limit", "27"))) == 27
    assert len(json.loads("\n".join(listed("--output", "json")))) == 27


def test_nothing_found_is_said(past: EarlierRuns) -> None:
    assert listed("--name", "nothing") == ["no runs"]


def test_programs_get_the_stored_state_its_reason_and_times_of_iso_8601(past: EarlierRuns) -> None:
    rows: list[dict[str, Any]] = json.loads("\n".join(listed("--output", "json")))

    assert {key: rows[0][key] for key in ("status", "reason", "message", "exit_code", "seconds", "cost_usd")} == {
        "status": "failed",
        "reason": "timeout",
        "message": "agent: time is over",
        "exit_code": 124,
        "seconds": 75.0,
        "cost_usd": None,
    }
    assert rows[0]["manifests"] == str(past.here / ".runner")
    assert rows[2]["cost_usd"] == 0.31
    assert all(len(row[key]) == len("2026-11-30T08:00:00Z") and row[key][-1] == "Z" for row in rows for key in TIMES)


TIMES = ("created", "ended")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--status", "faild"], "did you mean `failed`?"),
        (["--since", "yesterday"], "such as 90m or 2d"),
        (["--limit", "0"], "write 1 or more"),
    ],
)
def test_a_filter_that_is_none_is_bad_input(past: EarlierRuns, arguments: list[str], told: str) -> None:
    done = called("runs", "list", *arguments)

    assert (done.code, told in done.err) == (2, True)


def test_a_real_run_knows_the_repository_of_its_manifests(project: Project) -> None:
    project.script("echo hello")
    (project.folder / ".git").mkdir()
    assert project.apply()[0].code == 0

    (row,) = project.json("runs", "list")

    assert (row["manifests"], row["name"]) == (str(project.folder), "work")
    assert row["seconds"] > 0
