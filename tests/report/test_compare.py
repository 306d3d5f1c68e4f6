"""Runs beside each other: each cell is what the record of one run says."""

from __future__ import annotations

from runner.events import events as ev
from runner.report import compare
from runner.report.format import columns
from runner.report.run_files import Account
from runner.report.text import render_run
from tests.support.run_files import CHECKS, account, asked, bad, good


def members() -> list[Account]:
    return [
        account(good(CHECKS), name="triage.claude", run="r1", group="triage"),
        account(bad(), name="triage.codex", run="r2", group="triage"),
    ]


def test_a_table_has_a_line_for_each_member() -> None:
    rows = [compare.row_of(member) for member in members()]

    head, first, second = compare.text(rows).splitlines()
    assert head.split() == ["member", "outcome", "time", "tokens", "cost", "commands", "sections", "report"]
    assert [cell.strip() for cell in first.split("  ") if cell.strip()] == [
        "triage.claude",
        "✓ succeeded",
        "13s",
        "48k",
        "$0.31",
        "19, 2 of them cut, 1 refused",
        "1 of 2",
        "120B",
    ]
    assert second.split() == ["triage.codex", "✗", "failed:", "exit", "9.0s"]
    assert head.index("outcome") == first.index("✓") == second.index("✗")


def test_the_document_has_the_numbers() -> None:
    first, _ = compare.document([compare.row_of(member) for member in members()])["members"]  # type: ignore[index,call-overload]

    assert first == {
        "run": "r1",
        "name": "triage.claude",
        "agent": "claude",
        "model": "sonnet",
        "incident": "/INC-1",
        "status": "succeeded",
        "reason": None,
        "seconds": 13.0,
        "tokens": 48_000,
        "cost_usd": 0.31,
        "executed": 17,
        "denied": 1,
        "unfinished": 2,
        "sections": 1,
        "sections_wanted": 2,
        "report_bytes": 120,
        "rehearsal": False,
    }


def test_markdown_has_the_same_cells() -> None:
    lines = compare.markdown([compare.row_of(member) for member in members()]).splitlines()

    cells = ["triage.claude", "✓ succeeded", "13s", "48k", "$0.31", "19, 2 of them cut, 1 refused", "1 of 2", "120B"]
    assert lines[2] == f"| {' | '.join(cells)} |"
    assert {line.count("|") for line in lines} == {9}


def test_runs_of_one_name_are_told_apart_by_their_ids() -> None:
    rows = [compare.row_of(account(good(), run=run)) for run in ("r1", "r2")]

    assert [line.split("  ")[0] for line in compare.text(rows).splitlines()[1:]] == ["work r1", "work r2"]


def test_only_what_has_several_members_is_compared() -> None:
    several, alone = members(), account(good(), name="fix", group="fix")

    assert compare.groups([*several, alone]) == {"triage": several}


def test_commands_that_were_refused_are_none_that_ran_and_a_small_price_is_not_nothing() -> None:
    one = account([asked(40, 8, 0.004), ev.CommandsReportedByAgent("agent", 0, 2, 0), *bad()])

    cells = [cell.strip() for cell in compare.text([compare.row_of(one)]).splitlines()[1].split("  ") if cell.strip()]

    assert cells[-2:] == ["less than $0.01", "0, 2 refused"]
    assert "  agent ran  0 commands, 2 refused" in render_run(one.record, one.directory).splitlines()


def test_no_line_is_wider_than_its_cells_may_be() -> None:
    long = account(bad(), name="x" * 200)

    assert columns(compare.text([compare.row_of(long)]).splitlines()[1]) < 100
