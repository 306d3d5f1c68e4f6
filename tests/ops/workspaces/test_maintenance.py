"""Whoever works on a workspace may die at each commit of its store: nothing stays half-done and no work is lost."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from tests.support import effects
from tests.support.situations import leftovers

POINTS = ("before", "torn", "after")

Ask = Callable[..., int]
VERBS = ("create", "exec", "stop", "destroy")


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    words = [sys.executable, "-m", "tests.support.dying_workspaces"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        stdin, stdout = program.stdin, program.stdout
        assert stdout.readline() == "ready\n"

        def answer(**request: object) -> int:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            code, answer.calls = json.loads(stdout.readline())  # type: ignore[attr-defined]
            return int(code)

        yield answer
        stdin.close()


def rows(home: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(home / "state" / "state.db")) as store:
        assert store.execute("SELECT count(*) FROM leases WHERE id <> ''").fetchone() == (0,)
        return list(store.execute("SELECT id, status FROM agent_workspaces"))


def dies(ask: Ask, tmp_path: Path, verb: str, at: int, point: str, *, adopted: bool = False) -> bool:
    """``dies_of`` at a commit of the store."""
    return dies_of(ask, tmp_path / f"{verb}-{at}-{point}", verb, adopted=adopted, at=at, point=point)


def dies_of(ask: Ask, home: Path, verb: str, *, adopted: bool = False, **why: object) -> bool:
    """Let a verb die and recover, after which nothing is left; whether it has died."""
    theirs = home / "theirs"
    theirs.mkdir(parents=True)
    state, path = str(home / "state"), str(theirs) if adopted else None
    if verb != "create":
        assert ask(home=state, do="create", path=path) == 0
        assert ask(home=state, do="exec") == 0
    died = ask(home=state, do=verb, path=path, **why) == -signal.SIGKILL
    assert ask(home=state, do="recover") == 0
    settled = {"create": {"ready"}, "exec": {"ready"}, "stop": {"ready", "stopped"}, "destroy": {"ready"}}[verb]
    left = rows(home)
    assert {status for _, status in left} <= settled
    if verb != "create" and not adopted:
        kept = (home / "state").glob("projects/*/workspaces/*/made" if left else "saved/*/work.patch")
        assert len(list(kept)) == 1, "the work is in the workspace, or it is saved"
    assert not left or ask(home=state, do="destroy") == 0
    assert rows(home) == []
    assert leftovers(home) == []
    assert [path for path in (home / "state").rglob("*") if path.name.endswith(".part")] == []
    assert list((home / "state" / "workspaces").glob("*")) == []
    assert not adopted or verb == "create" or (theirs / "made").exists()
    return died


@pytest.mark.scenario("BEY-10", only="local")
@pytest.mark.parametrize(("verb", "at"), [("create", 2), ("destroy", 3)])
def test_dying_at_a_commit_loses_and_leaves_nothing(ask: Ask, tmp_path: Path, verb: str, at: int) -> None:
    assert dies(ask, tmp_path, verb, at, "after")


@pytest.mark.nightly
@pytest.mark.parametrize("adopted", [False, True])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("verb", VERBS)
def test_dying_at_any_commit_loses_and_leaves_nothing(
    ask: Ask, tmp_path: Path, verb: str, point: str, adopted: bool
) -> None:
    at = next(at for at in count(1) if not dies(ask, tmp_path, verb, at, point, adopted=adopted))

    assert at > 3, "it has begun with that many commits"


@effects.WATCHER.mark
@pytest.mark.parametrize(
    ("verb", "kills"),
    [pytest.param(verb, 60, marks=pytest.mark.nightly) for verb in VERBS],
)
def test_dying_at_an_effect_loses_and_leaves_nothing(ask: Ask, tmp_path: Path, verb: str, kills: int) -> None:
    total = effects_of(ask, tmp_path / "counted", verb)

    for at in range(1 + total // kills // 2, total, max(1, total // kills)):
        assert dies_of(ask, tmp_path / f"{verb}-{at}", verb, call=at), at


def effects_of(ask: Ask, home: Path, verb: str) -> int:
    home.mkdir()
    state = str(home / "state")
    for before in ("create", "exec") if verb != "create" else ():
        assert ask(home=state, do=before) == 0
    assert ask(home=state, do=verb, call=0) == 0
    calls: int = ask.calls  # type: ignore[attr-defined]
    assert verb == "destroy" or ask(home=state, do="destroy") == 0
    return calls
