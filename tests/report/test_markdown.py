"""Markdown: a summary that says what happened, in which nothing that an agent wrote is more than text."""

from __future__ import annotations

import re

import pytest

from runner.core.errors import BadValue, Place, Rejected
from runner.report import markdown
from tests.support.run_files import CHECKS, NASTY, account, bad, good

SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")


def outside_code(document: str) -> str:
    """What a renderer takes for Markdown: all but fences and code spans."""
    kept, fence = [], ""
    for line in document.splitlines():
        ticks = re.fullmatch("(`{3,})[^`]*", line)
        if fence:
            fence = "" if line == fence else fence
        elif ticks is not None:
            fence = ticks[1]
        else:
            kept.append(SPAN.sub("", line))
    assert not fence
    return "\n".join(kept)


def test_a_summary_says_how_each_run_ended_what_each_step_did_and_what_was_verified() -> None:
    document = markdown.render([account(good(CHECKS)), account(bad(), name="other", group="other")])

    assert "### ✓ `work` succeeded in 13s" in document
    assert "| agent | ✓ succeeded | 3.0s | `turn completed` |" in document
    assert "- ✗ `` `make check` exited 2 ``" in document
    assert "### ✗ `other` failed in 9.0s\n\n`agent: exited 3`" in document
    assert "- `src/.env: forbidden:**/.env`" in document
    assert "members of" not in document


def test_a_matrix_is_compared_first() -> None:
    document = markdown.render([account(good(), name="work.a"), account(bad(), name="work.b")])

    assert document.startswith("### 2 members of `work`\n\n| member | outcome |")


@pytest.mark.parametrize("text", [NASTY, "[x](javascript:1)", "<script>", "![](http://x/?leak)", "``` \n# head", "|a|"])
def test_what_an_agent_wrote_stands_in_code_only(text: str) -> None:
    whole = markdown.render([account(bad(text, (text,)), tails={"agent": [text, "```"]})])
    harmless = markdown.render([account(bad("x", ("x",)), tails={"agent": ["x"]})])

    assert outside_code(whole) == outside_code(harmless)


def test_findings_that_kept_runs_from_starting_are_listed() -> None:
    findings = [BadValue("`4X` is not a size", at=Place("a.yaml", 7, 3)), BadValue("other")]

    document = markdown.render([], Rejected(findings))

    assert "- error `manifest.bad-value` at `a.yaml:7:3`: `` `4X` is not a size ``\n" in document


@pytest.mark.parametrize("room", [0, 50, 400, 3_000])
def test_a_summary_keeps_within_its_room_and_says_what_is_cut(room: int) -> None:
    accounts = [account(bad(), name=f"work.{n}", tails={"agent": ["x" * 400] * 50}) for n in range(9)]

    document = markdown.render(accounts, room=room)

    assert len(document.encode()) <= room
    assert document.endswith("no more than 1 MiB of a step._\n") is (room >= 100)
