"""Triage as a person at 3 a.m. reads it: what is about to happen, what happens, and what came of it.

Pure over plan, record and files. Everything shown was written by others, an agent among them: it is escaped for
terminals, and cut where it is long.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import join

from msgspec import Struct, field

from runner.core.model import CheckKind, Reason, Status
from runner.core.sanitize import sanitize
from runner.events import events as ev
from runner.events.record import RunRecord, StepRecord
from runner.report.format import MARKS, commands, cost, count, duration, open_network, pull_line, wrapped
from runner.report.run_files import blamed, used
from runner.report.text import cluster_line, isolation_line, mcp_lines, network_line
from runner.triage.sections import section, sections_of

WIDEST = 1_000  # characters of a line
_WIDTH = 100  # columns of what is wrapped
_SAID = 4  # lines of what the agent concludes
_WORDS = 300  # characters of the last words
_LONGER = 1.5  # times the time that was not enough


class Header(Struct, frozen=True, kw_only=True):
    """Facts of a run before it starts. ``sections`` are required of its report; ``flags`` would start a triage like
    it.
    """

    agent: str = ""
    model: str = ""
    providers: tuple[str, ...] = ()
    incident: Path | None = None
    cluster: str = ""
    network: str = ""
    turns: int | None = None
    report: str = ""
    sections: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    version: str = ""  # of the agent's CLI


class Result(Struct, frozen=True):
    """Result of a run. ``report`` is the text of the report or its draft; ``place`` its path, also when it is too
    large to read.
    """

    report: str | None = None
    place: Path | None = None
    words: str = ""
    here: Path = field(default_factory=Path)  # what paths are shown from


def opening(record: RunRecord, header: Header, clock: Callable[[int], str]) -> Iterator[str]:
    """Yield the lines before anything happens; ``clock`` formats microseconds since the epoch in local time."""
    yield from open_network(record.open_network)
    if record.rehearsal is not None:
        yield f"REHEARSAL  no model is asked, {record.rehearsal} stands for it"
    agent = f"{header.agent} {header.version}" if header.version else header.agent
    who = f"{agent}/{header.model}" if header.model else agent
    stops = clock(record.started + int(record.deadline_seconds * 1e6))
    where = ", then ".join(header.providers)
    again = f"   resumes {record.resumes}" if record.resumes else ""
    yield f"run {record.id}   {who} in {where}   stops {stops} ({duration(record.deadline_seconds)}){again}"
    if header.incident is not None:
        yield f"cluster    {header.cluster or 'none: the files of the incident are all there is'}"
    if header.network != "none":
        key = "; the key stays outside" if header.network.startswith("model gateway") else ""
        ways = header.network.replace("cluster, read only", "API server (through the runner, read only)")
        yield f"network    {ways}, nothing else{key}"


def news(record: RunRecord, event: ev.Event) -> Iterator[str]:
    """Yield what an event that was just folded adds to the screen; nothing for most."""
    match event:
        case ev.IsolationObserved():
            yield f"   isolation  {isolation_line(record)}"
        case ev.ImagePullProgressed():
            yield f"   image      {pull_line(event)}"
        case ev.StepEnded(step=name, outcome=outcome):
            if not record.steps[name].routine or not outcome.ok:
                yield " " + step_line(name, record.steps[name])
            if record.preloaded is not None and record.preloaded.step == name and record.preloaded.headline:
                yield f"     baseline: {record.preloaded.headline}"
            yield from (f"     ! {text}" for text in outcome.warnings)
        case ev.CancelRequested(reason=reason):
            yield f" ! stopping: {reason}; what there is will be saved, unless you stop it again"
        case _:
            yield from trouble(record, event)


def trouble(record: RunRecord, event: ev.Event) -> Iterator[str]:
    """Yield the line of an event that tells what did not go as planned."""
    match event:
        case ev.ProviderRejected(provider=provider, reason=reason):
            yield f" ! provider {provider} refused: {reason}"
        case ev.FallbackStarted(step=name, provider=provider, reason=reason):
            yield f" ! falling back from {provider}: {name}: {reason}"
        case ev.RetryScheduled(step=name, operation=operation, reason=reason, pause_seconds=pause):
            yield f" ! {name}: {operation} failed, trying again in {duration(pause)}: {reason}"
        case ev.WarningIssued(message=message):
            yield f" ! {message}"
        case ev.OomKilled():
            yield f" ! {record.warnings[-1][1]}"


def step_line(name: str, step: StepRecord) -> str:
    message = step.outcome.message if step.outcome else ""
    return f"{MARKS[step.status]} {name:<10} {duration(step.seconds):>6}  {message}".rstrip()


def live_line(record: RunRecord, header: Header, now: int, doing: str = "") -> str:
    """Return the step under way, with what its model has used so far, and the latest thing that it does."""
    name = next(iter(record.unfinished()), "")
    step = record.steps.get(name)
    if step is None or step.started is None:
        return ""
    minutes, seconds = divmod((now - step.started) // 1_000_000, 60)
    line = f" {MARKS[Status.RUNNING]} {name:<10} {f'{minutes}:{seconds:02}':>6}"
    if step.kind != "agent":
        return line
    if record.models:
        spent = used(record)
        of = f"/{header.turns}" if header.turns is not None else ""
        line += f"  turn {spent.requests}{of}{_used(record)}"
    return sanitize(f"{line}   {doing}".rstrip(), WIDEST)


def _reached(record: RunRecord) -> Iterator[str]:
    """Yield what commands have asked of others."""
    if record.cluster is not None:
        yield from _labelled("Cluster", cluster_line(record.cluster))
    for line in mcp_lines(record):
        yield from _labelled("MCP", line)
    if record.network:
        yield from _labelled("Network", network_line(record.network.values()))


def closing(record: RunRecord, header: Header, found: Result) -> Iterator[str]:
    """Yield how it ended, and what a person does next."""
    yield from _headline(record, header)
    if record.status is Status.SUCCEEDED:
        yield from _conclusions(found)
    else:
        if record.preloaded is not None:
            yield from _labelled("Baseline", record.preloaded.headline)
        if header.sections:
            reached = sections_of(found.report or "", header.sections)
            draft = f"draft, {len(reached)} of {len(header.sections)} sections"
            yield f"  Report      {draft if found.report else _lacking(record, found)}"
        yield from _conclusions(found) if found.report else ()
        if found.words:
            yield from _labelled("Last words", f'"{found.words[-_WORDS:]}"')
    if record.commands is not None:
        yield from _labelled("Commands", commands(record.commands))
    yield from _reached(record)
    if found.report and found.place is not None:
        label = "Report" if record.status is Status.SUCCEEDED else "Draft"
        yield f"  {label:<10}  {shown_path(found.place, found.here)}"
    for left in record.left_behind:
        yield f"  LEFT BEHIND {left}"
    if record.left_behind:
        yield f"  Clean up    runner recover {record.id}"
    incident = shown_path(header.incident, found.here) if header.incident is not None else ""
    for label, command in actions(record, header, incident):
        yield f"  {label:<10}  {command}" if len(label) <= 10 else f"  {label}: {command}"


def _headline(record: RunRecord, header: Header) -> Iterator[str]:
    """Say how it ended, why, and what to do about it."""
    yield from open_network(record.open_network)
    if record.rehearsal is not None:
        yield f"REHEARSAL  no model was asked, {record.rehearsal} stood for it: this is no investigation"
    outcome, after = record.outcome, duration(record.seconds)
    if record.status is Status.SUCCEEDED:
        word = "REHEARSED" if record.rehearsal is not None else "INVESTIGATED" if header.incident else "SUCCEEDED"
        yield f"{word} in {after}{_used(record)}"
        return
    at = blamed(record)
    late = outcome is not None and outcome.reason is Reason.TIMEOUT
    word = "TIMED OUT" if late else "CANCELLED" if record.status is Status.CANCELLED else "FAILED"
    where = f" in {at}" if late and at else ""
    yield f"{word} after {after}{where} (exit {record.exit_code}){_used(record)}"
    yield from _labelled("Because", (outcome.message if outcome is not None else "") or "see the evidence")
    yield from (f"  = {hint}" for hint in _hints(record))


def _hints(record: RunRecord) -> Iterator[str]:
    """Yield what to do about the deciding step."""
    at = blamed(record)
    outcome = record.steps[at].outcome if at else None
    return (sanitize(line, WIDEST) for line in (outcome.details if outcome else ()) if line.startswith("hint: "))


def _lacking(record: RunRecord, found: Result) -> str:
    """Say why there is no report to show."""
    if found.report is None and found.place is not None:
        return f"too large, at {shown_path(found.place, found.here)}"
    reports = (check for checks in record.checks.values() for check in checks if check.kind is CheckKind.REPORT)
    return next((check.found for check in reports if not check.ok), "none was written")


def actions(record: RunRecord, header: Header, incident: str) -> Iterator[tuple[str, str]]:
    """Yield what a person does next after a triage of ``incident``, a path if any: labels with commands."""
    if record.status is Status.SUCCEEDED:
        if incident:
            other = "codex" if header.agent == "claude" else "claude"
            words = ("-w", incident, "-a", other, *header.flags)
            yield "Second opinion", f"runner triage {join(words)}"
        return
    if record.outcome is not None and record.outcome.reason in (Reason.TURNS, Reason.BUDGET):
        yield "More turns", "runner triage --max-turns N"
    if record.rehearsal is None:
        late = record.outcome is not None and record.outcome.reason is Reason.TIMEOUT
        longer = f" --timeout {math.ceil(record.deadline_seconds * _LONGER)}" if late else ""
        yield "Continue", f"runner resume {record.id}{longer}"
    yield "Evidence", f"runner runs show {record.id}"


def _used(record: RunRecord) -> str:
    if not record.models:
        return ""
    spent = used(record)
    price = f"  {cost(spent.cost_usd)}" if spent.cost_usd is not None else ""
    return f"  {count(spent.tokens)} tokens{price}{', not spent' if price and record.rehearsal is not None else ''}"


def _conclusions(found: Result) -> Iterator[str]:
    for label, text in conclusions(found.report or ""):
        yield from _labelled(label, text)


def conclusions(report: str) -> Iterator[tuple[str, str]]:
    """Yield what an agent concludes: labels with the start of a section, which may be empty."""
    for label, title in (("Agent says", "Root Cause"), ("Next", "Next Steps"), ("Unchecked", "Unchecked")):
        yield label, paragraph(section(report, title))


def _labelled(label: str, text: str) -> Iterator[str]:
    lines = list(wrapped(sanitize(text, WIDEST), _WIDTH)) if text else []
    if len(lines) > _SAID:
        lines = [*lines[: _SAID - 1], lines[_SAID - 1] + " ..."]
    for number, line in enumerate(lines):
        yield f"  {'' if number else label:<10}  {line}"


def paragraph(text: str) -> str:
    """Return the first paragraph or item in one line, without its marks."""
    block = text.split("\n\n", 1)[0].split("\n")
    end = next((n for n, line in enumerate(block) if n and re.match(r"\s*([-*]|\d+[.)])\s", line)), len(block))
    return " ".join(re.sub(r"^\s*([-*]|\d+[.)])\s+", "", " ".join(block[:end])).replace("**", "").split())


def shown_path(path: Path, here: Path) -> str:
    """Return a path as it can be typed from ``here``, if that is shorter."""
    relative = os.path.relpath(path, here)
    return sanitize(relative if not relative.startswith("../..") else str(path), WIDEST)
