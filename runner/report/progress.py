"""Progress of a run on the screen: what it is, each important step as it ends, and what to do at the end.

Pure over plan, record and the last output of failed steps. Each fact is shown once; successful housekeeping steps are
not shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from runner.core.model import Reason, Status, StopReason
from runner.core.plural import plural
from runner.events import events as ev
from runner.events.record import RunRecord, StepRecord
from runner.plan.model import DEFAULTS
from runner.report.format import (
    MARKS,
    brief,
    commands,
    cost,
    count,
    duration,
    open_network,
    pull_line,
    sandbox,
    stop_stage,
)
from runner.report.run_files import Account, blamed, used
from runner.report.symptoms import symptom
from runner.report.text import class_line, cluster_line, mcp_lines, network_line, status_word
from runner.report.triage import Header, trouble

NEWS = 5.0  # seconds that a live line shows what was done to a command whose step goes on
_NAMED = 20  # violations
_LONGER = 1.5  # times the time that was not enough


def opening(record: RunRecord, header: Header, clock: Callable[[int], str]) -> Iterator[str]:
    """Yield the lines before anything happens; ``clock`` formats microseconds since the epoch in local time."""
    yield from open_network(record.open_network)
    if record.rehearsal is not None:
        yield f"a rehearsal: no model is asked, {record.rehearsal} stands for it"
    stops = clock(record.started + int(record.deadline_seconds * 1e6))
    who = "/".join(filter(None, (header.agent, header.model)))
    where = ", then ".join(header.providers)
    network = "" if header.network in ("", "none") else f"network: {header.network}"
    resumes = f"resumes {record.resumes}" if record.resumes else ""
    parts = (
        record.name,
        f"run {record.id}",
        resumes,
        who,
        where,
        network,
        f"stops {stops} ({duration(record.deadline_seconds)})",
    )
    yield "   ".join(filter(None, parts))


def news(  # one arm an event type
    record: RunRecord, event: ev.Event
) -> Iterator[str]:
    """Yield what an event that was just folded adds to the screen; nothing for most."""
    match event:
        case ev.IsolationObserved(isolation=seen):
            yield f"  sandbox     {class_line(record)}, {sandbox(seen)}"
        case ev.ImagePullProgressed():
            yield f"  image       {pull_line(event)}"
        case ev.LogOpened(path=path):
            yield f"  log         {path}"
        case ev.StepEnded(step=name, outcome=outcome):
            if not ((outcome.ok and record.steps[name].routine) or outcome.status is Status.SKIPPED):
                yield f"  {step_line(name, record.steps[name], _did(record, name))}"
                yield from (f"      = {detail}" for detail in outcome.details if detail.startswith("hint: "))
            if record.preloaded is not None and record.preloaded.step == name and record.preloaded.headline:
                yield f"      baseline: {record.preloaded.headline}"
            yield from (f"      ! {text}" for text in outcome.warnings)
        case ev.StopStageReached(step=name):
            yield f"  ! {name}: {stop_stage(event, event.grace_seconds)}"
        case ev.CancelRequested(reason=reason):
            yield f"  ! stopping: {reason}; saving and cleaning up, a second Ctrl-C gives that up"
        case _:
            yield from (f" {line}" for line in trouble(record, event))


def step_line(name: str, step: StepRecord, did: str = "") -> str:
    """Return the line of a step that has ended, with what it ``did``, or how it ended."""
    return f"{MARKS[step.status]} {name:<10} {duration(step.seconds):>6}  {did or reason_of(step)}".rstrip()


def _did(record: RunRecord, name: str) -> str:
    """Return what a successful agent did; its words were shown before."""
    step = record.steps[name]
    if step.kind != "agent" or step.status is not Status.SUCCEEDED or record.commands is None:
        return ""
    return "   ".join(filter(None, (commands(record.commands), _used(record))))


def reason_of(step: StepRecord) -> str:
    """Say how a step ended, in one line. Paths that broke a policy are listed once, at the end of the run."""
    outcome = step.outcome
    if outcome is None:
        return ""
    if outcome.reason is Reason.POLICY:
        return "policy was broken"
    command = f": `{outcome.details[0]}`" if outcome.reason is Reason.SETUP and outcome.details else ""
    return brief(outcome.message + command)


def live_line(record: RunRecord, header: Header, now: int, doing: str = "") -> str:
    """Return the step under way, with what its model has used so far, and the latest thing that it does."""
    name = next(iter(record.unfinished()), "")
    step = record.steps.get(name)
    if step is None or step.started is None:
        return ""
    of = f"/{header.turns}" if header.turns is not None else ""
    spent = f"turn {used(record).requests}{of}  {_used(record)}" if step.kind == "agent" and record.models else ""
    said = "   ".join(filter(None, (spent, stopping(step, now) or doing)))
    return f"  {MARKS[Status.RUNNING]} {name:<10} {duration((now - step.started) // 1_000_000):>6}  {said}".rstrip()


def stopping(step: StepRecord, now: int) -> str:
    """Say what is done to stop a step's command. The step goes on if only a command is stopped."""
    if not step.stop_stages:
        return ""
    at, reached = step.stop_stages[-1]
    since = (now - at) / 1e6
    if reached.reason not in (StopReason.COMMAND_DEADLINE, StopReason.LEFT_RUNNING):
        return stop_stage(reached, reached.grace_seconds - since)
    return stop_stage(reached) if since < NEWS else ""


def why(account: Account, name: str, tail: Sequence[str], *, seen: bool) -> Iterator[str]:
    """Yield what follows the line of a failed step: the end of its output, what it lacked, and where the rest is.

    ``tail`` is the end of the output, which is left out when it was ``seen``.
    """
    outcome = account.record.steps[name].outcome
    assert outcome is not None
    yield from [] if seen else (f"   | {line}" for line in tail)
    offline = account.networks.get(name, "none") != "host"
    hinted = any(detail.startswith("hint: ") for detail in outcome.details)
    if not hinted and (found := symptom(tail, outcome.message, offline=offline)):
        what, way = found
        yield f"      {what}"
        yield f"      = hint: {way}"
    all_of_it = f"all of it: runner runs logs {account.record.id} {name}" if tail else ""
    origin = account.origins.get(name, "")
    if place := "   ".join(filter(None, ("" if origin == DEFAULTS else origin, all_of_it))):
        yield f"      {place}"


def others(record: RunRecord, name: str) -> Iterator[str]:
    """Yield the other causes of a failed step."""
    bad = [check for check in record.checks.get(name, ()) if not check.ok]
    yield from (f"      also: {brief(str(check))}" for check in bad[1:])


def after(account: Account, tail: Sequence[str]) -> Iterator[str]:
    """Yield what follows the report of a failed run: ``why``, and what a person does next."""
    at = blamed(account.record)
    if at is not None and account.record.ended is not None:
        yield f"{at} failed:"
        yield from why(account, at, tail, seen=False)
        yield from _again(account.record)


def ending(account: Account, *, several: bool = False) -> Iterator[str]:
    """Yield how a run ended, what broke policy, and what a person does next; shorter for one of ``several``."""
    record = account.record
    yield from _headline(record)
    yield from _violations(account)
    if record.cluster is not None:
        yield f"  cluster    {cluster_line(record.cluster)}"
    yield from (f"  mcp        {line}" for line in mcp_lines(record))
    if record.network:
        yield f"  network    {network_line(record.network.values())}"
    yield from (f"  LEFT BEHIND  {left}" for left in record.left_behind)
    if record.left_behind:
        yield f"  clean up   runner recover {record.id}"
    yield from (
        f"  output     {path}" for path in (record.saved_work.outputs[:10] if record.saved_work is not None else ())
    )
    yield from _next(record, several)


def _headline(record: RunRecord) -> Iterator[str]:
    if record.rehearsal is not None:
        yield f"REHEARSAL: no model was asked, {record.rehearsal} stood for it"
    at = blamed(record)
    where = f" at {at}" if at else ""
    taken = f" in {duration(record.seconds)}" if record.seconds is not None else ""
    because = record.outcome.message if record.outcome is not None and not at else ""
    parts = (f"{status_word(record)} {record.name}{where}{taken}", brief(because), _work(record), _used(record))
    yield "   ".join(filter(None, parts))


def _work(record: RunRecord) -> str:
    saved_work = record.saved_work
    if saved_work is None or saved_work.patch is None:
        return "nothing changed" if saved_work is not None and record.snapshot is not None else ""
    files = plural(saved_work.changed, "file")
    if saved_work.withheld:
        return f"{files} changed, the work is WITHHELD"
    return f"{files} changed" if record.status is Status.SUCCEEDED else f"its work is kept: {files}"


def _used(record: RunRecord) -> str:
    spent = used(record)
    price = f" {cost(spent.cost_usd)}" if spent.cost_usd is not None else ""
    unspent = ", not spent" if price and record.rehearsal is not None else ""
    return f"{count(spent.tokens)} tokens{price}{unspent}" if record.models else ""


def _violations(account: Account) -> Iterator[str]:
    found = account.record.violations
    if found:
        yield f"  {plural(len(found), 'violation')} of policy: {', '.join(one.path for one in found)}"
    for violation in found[:_NAMED]:
        rule = account.rule_of(violation)
        yield f"    {violation}{f'   {rule}' if rule else ''}"
    yield from [f"    and {len(found) - _NAMED} more: runner runs show {account.record.id}"] * (len(found) > _NAMED)


def _next(record: RunRecord, several: bool) -> Iterator[str]:
    show = [] if several else [f"runner runs show {record.id}"]
    if record.status is Status.SKIPPED:
        return
    if record.status is not Status.SUCCEEDED:
        yield from _again(record)
        yield from (f"  evidence          {words}" for words in show)
        return
    found = dict(actions(record))
    if "look" not in found:
        yield from (f"  evidence   {words}" for words in show)
        return
    yield "     evidence  ".join([f"  look       {found['look']}", *show])
    if "deliver" in found:
        push = "" if several else f"     or  {found['or']}"
        yield f"  deliver    {found['deliver']}{push}"


def _again(record: RunRecord) -> Iterator[str]:
    return (f"  {label}   {command}" for label, command in actions(record))


def actions(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield what a person does next with a run that has ended: labels with commands."""
    id, saved_work = record.id, record.saved_work
    if record.status is not Status.SUCCEEDED:
        late = record.outcome is not None and record.outcome.reason is Reason.TIMEOUT
        longer = f" --timeout {math.ceil(record.deadline_seconds * _LONGER)}" if late else ""
        yield from [("again from here", f"runner resume {id}{longer}")] if record.rehearsal is None else []
    elif saved_work is not None and saved_work.patch is not None:
        yield "look", f"runner runs patch {id}"
        if record.snapshot is not None:
            doubt = "" if any(step.kind == "verify" for step in record.steps.values()) else " --unverified"
            yield "deliver", f"runner runs branch {id}{doubt}"
            yield "or", f"runner runs push {id} --to origin{doubt}"
