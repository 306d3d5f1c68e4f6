"""Accounts of runs that never were: made of the events that they would have written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from runner.core.model import (
    Check,
    CheckKind,
    IsolationClass,
    Outcome,
    Reason,
    Status,
    Usage,
    Violation,
    failed,
    succeeded,
)
from runner.events import events as ev
from runner.events.record import RunRecord, fold
from runner.report.run_files import Account

SECOND = 1_000_000
BEGAN = 1_700_000_000 * SECOND
STEPS = {"provision": "provision", "agent": "agent", "verify": "verify", "save": "save"}
CHECKS = (
    Check(kind=CheckKind.REPORT, what="report r.md", ok=True, found="120 bytes of at least 100", size_bytes=120),
    Check(kind=CheckKind.SECTION, what="report section `Cause`", ok=True),
    Check(kind=CheckKind.SECTION, what="report section `Fix`", ok=False),
    Check(kind=CheckKind.COMMAND, what="`make check`", ok=False, found="exited 2"),
)
NASTY = "\x1b[31m\x00\x0b\ud800\ufffe]]> <b a='1'>&amp; | `x` ``` ::error::x ##[error]y\r\n# h\u202e\x85 \U0001f600"


def begin(name: str, run: str) -> list[ev.Event]:
    return [
        ev.RunStarted(name=name, plan="sha256:4b1f", runner="1", steps=STEPS, deadline_seconds=60.0),
        ev.ProviderChosen("local", IsolationClass.NAMESPACES),
        ev.StepStarted("provision"),
        ev.StepEnded("provision", succeeded("local, isolation namespaces")),
        ev.StepStarted("agent"),
    ]


def asked(
    input_tokens: int = 40_000, output_tokens: int = 8_000, cost_usd: float = 0.31, *, requests: int = 1
) -> ev.ModelRequestFinished:
    """A request of the agent to its model that has ended, with the usage of so many ``requests``."""
    usage = Usage(requests=requests, input_tokens=input_tokens, output_tokens=output_tokens, cost_usd=cost_usd)
    return ev.ModelRequestFinished(
        step="agent",
        call="1",
        model="sonnet",
        status=200,
        sent_bytes=1,
        received_bytes=1,
        first_byte_seconds=0.1,
        seconds=1.0,
        usage=usage,
    )


def good(checks: Sequence[Check] = CHECKS[:2]) -> list[ev.Event]:
    return [
        asked(),
        ev.CommandsReportedByAgent("agent", 17, 1, 2),
        ev.StepEnded("agent", succeeded("turn completed")),
        ev.StepStarted("verify"),
        ev.ChecksFinished("verify", tuple(checks)),
        ev.StepEnded("verify", succeeded("2 of 2 checks")),
        ev.StepStarted("save"),
        ev.StepEnded("save", succeeded("no change")),
        ev.RunEnded(Outcome(status=Status.SUCCEEDED), 0),
    ]


def bad(message: str = "exited 3", details: tuple[str, ...] = ()) -> list[ev.Event]:
    return [
        ev.StepEnded("agent", failed(Reason.EXIT, message, details=details)),
        ev.StepEnded("verify", Outcome(status=Status.SKIPPED, message="agent failed")),
        ev.WarningIssued("lease.refresh-failed", message),
        ev.ViolationsFound("scan", (Violation("src/.env", "forbidden:**/.env"),)),
        ev.RunEnded(Outcome(status=Status.FAILED, reason=Reason.EXIT, message=f"agent: {message}"), 1),
    ]


def record(events: Sequence[ev.Event], *, run: str = "r1") -> RunRecord:
    """Each event comes a second after the one before."""
    made = RunRecord(id=run)
    for seq, event in enumerate(events, start=1):
        fold(made, ev.Recorded(run, seq, BEGAN + seq * SECOND, event))
    return made


def account(
    end: Sequence[ev.Event],
    *,
    name: str = "work",
    run: str = "r1",
    group: str = "work",
    tails: Mapping[str, Sequence[str]] | None = None,
) -> Account:
    return Account(
        record=record([*begin(name, run), *end], run=run),
        directory=Path("/runs") / run,
        group=group,
        agent="claude",
        model="sonnet",
        incident="/INC-1",
        origins={"": "a.runner.yaml:9", "agent": "a.runner.yaml:5", "verify": "defaults"},
        tails=tails or {},
    )
