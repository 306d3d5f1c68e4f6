"""What a person sees of a triage: made of plan, record and files alone, and nothing in it that a terminal obeys."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from runner.core.model import (
    Check,
    CheckKind,
    Isolation,
    IsolationClass,
    Limits,
    Outcome,
    Reason,
    RunHolder,
    Status,
    failed,
    succeeded,
)
from runner.events import events as ev
from runner.events.record import RunRecord, StepRecord, fold
from runner.ops.runs.header import header_of
from runner.report.triage import Header, Result, closing, live_line, news, opening
from runner.triage.sections import section, sections_of
from tests.support.run_files import asked

SECTIONS = ("Summary", "Root Cause", "Next Steps", "Unchecked")
SCENE = Header(
    agent="claude",
    model="sonnet",
    providers=("docker",),
    incident=Path("/w/INC-4821"),
    cluster="prod-eu https://10.2.0.1:6443, namespace payments   READ ONLY (get list watch logs; secrets refused)",
    network="model gateway and cluster, read only",
    turns=50,
    report="investigation.md",
    sections=SECTIONS,
)
REPORT = """\
# checkout

## Summary

It restarts.

## Root Cause

Memory limit cut **512Mi** -> 256Mi by
rollout 118 [FACT-2].

More of it.

## Next Steps

1. `kubectl rollout undo deploy/checkout` (not run: read only)
2. something else

## Unchecked

- configmaps (no right)
- nodes
"""
START = ev.RunStarted(
    name="triage",
    plan="sha256:0",
    runner="1",
    steps={"provision": "provision", "agent": "agent"},
    deadline_seconds=600.0,
)
ASKED = asked(requests=9)
SECOND = 1_000_000


def clock(moment: int) -> str:
    return f"{moment // SECOND}s"


def told(*events: ev.Event) -> RunRecord:
    """The record of a run whose events come a second after each other."""
    record = RunRecord(id="7k3q")
    for seq, event in enumerate(events, start=1):
        fold(record, ev.Recorded("7k3q", seq, seq * SECOND, event))
    return record


def ended(outcome: Outcome, code: int, *before: ev.Event) -> RunRecord:
    return told(START, ev.StepStarted("agent"), *before, ev.RunEnded(outcome, code))


def test_the_first_lines_say_who_where_until_when_and_what_can_be_reached() -> None:
    assert list(opening(told(START), SCENE, clock)) == [
        "run 7k3q   claude/sonnet in docker   stops 601s (10m)",
        f"cluster    {SCENE.cluster}",
        "network    model gateway and API server (through the runner, read only), nothing else; the key stays outside",
    ]


def test_without_a_cluster_the_first_lines_say_so() -> None:
    header = Header(
        agent="goose", model="gpt-4.1", providers=("local",), incident=Path("/w/x"), network="model gateway"
    )

    assert list(opening(told(START), header, clock))[1:] == [
        "cluster    none: the files of the incident are all there is",
        "network    model gateway, nothing else; the key stays outside",
    ]


def test_the_live_line_has_turns_tokens_money_and_what_is_done() -> None:
    record = told(START, ev.StepStarted("agent"), ASKED)

    line = live_line(record, SCENE, 153 * SECOND, "$ kubectl describe deploy/checkout\x1b[2J")

    assert line == " ▸ agent        2:31  turn 9/50  48k tokens  $0.31   $ kubectl describe deploy/checkout\\x1b[2J"


def test_what_was_found_is_the_last_block() -> None:
    record = ended(succeeded("1 of 1"), 0, ASKED)

    assert list(
        closing(record, SCENE, Result(REPORT, Path("/w/INC-4821/output/investigation.md"), "", Path("/w")))
    ) == [
        "INVESTIGATED in 3.0s  48k tokens  $0.31",
        "  Agent says  Memory limit cut 512Mi -> 256Mi by rollout 118 [FACT-2].",
        "  Next        `kubectl rollout undo deploy/checkout` (not run: read only)",
        "  Unchecked   configmaps (no right)",
        "  Report      INC-4821/output/investigation.md",
        "  Second opinion: runner triage -w INC-4821 -a codex",
    ]


def test_a_time_out_shows_what_there_is() -> None:
    timed_out = failed(Reason.TIMEOUT, "stopped at its deadline")
    record = ended(timed_out, 124, ASKED, ev.StepEnded("agent", timed_out))
    draft = REPORT[: REPORT.index("## Next Steps")]

    assert list(closing(record, SCENE, Result(draft, Path("/w/INC-4821/x.md"), "I look deeper.", Path("/w")))) == [
        "TIMED OUT after 4.0s in agent (exit 124)  48k tokens  $0.31",
        "  Because     stopped at its deadline",
        "  Report      draft, 2 of 4 sections",
        "  Agent says  Memory limit cut 512Mi -> 256Mi by rollout 118 [FACT-2].",
        '  Last words  "I look deeper."',
        "  Draft       INC-4821/x.md",
        "  Continue    runner resume 7k3q --timeout 900",
        "  Evidence    runner runs show 7k3q",
    ]


def test_a_failure_says_why_and_that_there_is_no_report() -> None:
    lines = list(closing(ended(failed(Reason.AUTH, "the key is refused"), 1), SCENE, Result(here=Path("/w"))))

    assert lines[:3] == [
        "FAILED after 2.0s (exit 1)",
        "  Because     the key is refused",
        "  Report      none was written",
    ]


def test_a_report_that_cannot_be_shown_says_where_it_is_or_what_it_is() -> None:
    """It was told as `none was written` while the file lay there."""
    missing = Check(kind=CheckKind.REPORT, what="report investigation.md", ok=False, found="is a link")
    record = ended(failed(Reason.NO_EVIDENCE, "no report"), 1, ev.ChecksFinished("verify", (missing,)))
    large = Result(None, Path("/w/INC-4821/x.md"), here=Path("/w"))

    assert "  Report      is a link" in closing(record, SCENE, Result(here=Path("/w")))
    assert "  Report      too large, at INC-4821/x.md" in closing(record, SCENE, large)
    assert "  Continue    runner resume 7k3q" in closing(record, SCENE, large)


def test_a_second_opinion_is_asked_for_in_the_same_place() -> None:
    header = replace(SCENE, incident=Path("/w/INC 4821"), flags=("--kubeconfig", "my kubeconfig"))
    *_, last = closing(ended(succeeded("1 of 1"), 0), header, Result(here=Path("/w")))

    assert last == "  Second opinion: runner triage -w 'INC 4821' -a codex --kubeconfig 'my kubeconfig'"


def test_what_the_baseline_found_stands_below_the_step_that_asked() -> None:
    start = replace(START, steps={"preload": "preload"})
    record = told(
        start,
        ev.StepStarted("preload"),
        ev.ContextPreloaded(step="preload", parts={"baseline": 4900}, tokens=4900, cut=0, headline="oom"),
    )
    last = ev.StepEnded("preload", succeeded("baseline 4.9k"))
    fold(record, ev.Recorded("7k3q", 4, 4 * SECOND, last))

    assert list(news(record, last)) == [" ✓ preload      2.0s  baseline 4.9k", "     baseline: oom"]


def test_what_is_left_behind_is_said_with_what_removes_it() -> None:
    held = ev.LeaseAcquired(workspace="7k3q-1", lease="1", holder=RunHolder("7k3q"), fence=1, ttl_seconds=60.0)

    lines = list(closing(told(START, held, ev.RunEnded(failed(Reason.CANCELLED, "signal"), 130)), SCENE, Result()))

    assert lines[lines.index("  LEFT BEHIND lease 7k3q-1 1") + 1] == "  Clean up    runner recover 7k3q"


def test_whoever_ran_out_of_turns_is_told_the_flag() -> None:
    assert "  More turns  runner triage --max-turns N" in closing(ended(failed(Reason.TURNS, "9"), 1), SCENE, Result())


def test_a_rehearsal_is_said_first_and_last_and_is_neither_continued_nor_an_investigation() -> None:
    start = replace(START, rehearsal="a.turns.yaml")
    failed_one = told(start, ev.RunEnded(failed(Reason.EXIT, "x"), 1))
    whole = list(closing(told(start, asked(900, 100, 0.02), ev.RunEnded(succeeded("fine"), 0)), SCENE, Result(REPORT)))

    assert next(opening(failed_one, SCENE, clock)) == "REHEARSAL  no model is asked, a.turns.yaml stands for it"
    assert not [line for line in closing(failed_one, SCENE, Result()) if "Continue" in line]
    assert whole[0] == "REHEARSAL  no model was asked, a.turns.yaml stood for it: this is no investigation"
    assert (whole[1].startswith("REHEARSED in "), whole[1].endswith("1k tokens  $0.02, not spent")) == (True, True)


def test_an_agents_conclusion_is_cut_and_cannot_command_the_terminal() -> None:
    report = "## Root Cause\n\n" + "word " * 400 + "\x1b]0;x\x07"

    lines = list(closing(ended(succeeded("fine"), 0), SCENE, Result(report, here=Path("/w"))))

    assert len(lines) < 9
    assert all(len(line) <= 120 for line in lines)
    assert "\x1b" not in "".join(lines)


def test_housekeeping_is_quiet_until_it_fails() -> None:
    record = told(START, ev.StepStarted("provision"))
    good, bad = ev.StepEnded("provision", succeeded("local")), ev.StepEnded("agent", failed(Reason.EXIT, "exited 1"))
    for event in (good, bad):
        fold(record, ev.Recorded("7k3q", 9, 9 * SECOND, event))
    record.steps["save"] = StepRecord(kind="save", routine=True)

    assert list(news(record, good)) == [" ✓ provision    7.0s  local"]
    assert list(news(record, bad)) == [" ✗ agent              exited 1"]
    assert list(news(record, ev.StepEnded("save", succeeded("no change")))) == []
    assert list(news(record, ev.StepEnded("save", succeeded("no change", warnings=("left a link",))))) == [
        "     ! left a link"
    ]


@pytest.mark.parametrize(("filtered", "more"), [(True, ""), (False, ", system calls not filtered")])
def test_what_was_read_back_is_shown(filtered: bool, more: str) -> None:
    limits = Limits(2.0, 2 << 30)
    seen = Isolation(
        isolation=IsolationClass.NAMESPACES,
        provider="docker",
        uid=1000,
        capabilities="none",
        no_new_privileges=True,
        shared_namespaces=(),
        interfaces=(),
        read_only=(),
        limits=limits,
        filtered=filtered,
    )
    chosen, observed = ev.ProviderChosen("docker", IsolationClass.NAMESPACES), ev.IsolationObserved("agent", seen)

    (line,) = news(told(START, chosen, observed), observed)

    assert line == "   isolation  namespaces (docker); read back: uid 1000, no interface, 2 CPU, 2G" + more


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ()),
        ("## summary\n\nx", ("Summary",)),
        ("## Summary\n\n## Root Cause ##\ny", ("Root Cause",)),
        ("Summary\n", ()),
        ("# Summary\nx\n###### Unchecked\nz", ("Summary", "Unchecked")),
    ],
    ids=["nothing", "lower case", "an empty one", "no heading", "any level"],
)
def test_a_section_counts_when_something_stands_in_it(text: str, found: tuple[str, ...]) -> None:
    assert sections_of(text, SECTIONS) == found


def test_a_section_ends_with_the_next_heading() -> None:
    assert section(REPORT, "summary") == "It restarts."
    assert section(REPORT, "Unchecked").endswith("- nodes")


def test_a_plan_that_is_gone_gives_an_empty_scene() -> None:
    assert header_of(None) == Header(network="none")
    assert list(opening(told(START), header_of(None), clock)) == ["run 7k3q    in    stops 601s (10m)"]


def test_a_run_without_an_incident_has_investigated_nothing() -> None:
    assert list(closing(ended(succeeded("fine"), 0), header_of(None), Result())) == ["SUCCEEDED in 2.0s"]


def test_a_cancelled_run_is_no_failure() -> None:
    lines = list(
        closing(
            ended(Outcome(status=Status.CANCELLED, reason=Reason.CANCELLED, message="signal"), 130), SCENE, Result()
        )
    )

    assert lines[0] == "CANCELLED after 2.0s (exit 130)"
