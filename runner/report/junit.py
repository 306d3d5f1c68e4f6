"""Runs as JUnit XML: a suite for each run, a case for each step and for each thing that was verified.

Uses only what the schemas of Ant (windyroad) and Jenkins (junit-10) both allow: no attributes of ``testsuites``, at
most one child of a case, output as text of a failure. ``error`` is a run that has not ended; ``failure`` is everything
else that went wrong, a check and the step that it was in. Case names are the same in every run of a manifest, so that a
CI can follow them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from xml.sax.saxutils import escape, quoteattr

from runner.core.errors import Rejected, RunnerError
from runner.core.model import Check, Outcome, Reason, Status
from runner.core.sanitize import escape_unprintable
from runner.events.record import RunRecord, StepRecord
from runner.report.format import commands
from runner.report.run_files import Account, blamed, used
from runner.report.text import isolation_line, mcp_lines, network_line

HOST = "localhost"  # reports go where a host's name is nobody's business
_MOST = 4096  # characters of a message or line


def render(accounts: Sequence[Account], failure: RunnerError | None = None) -> str:
    """Render the document of some runs. ``failure`` is what stopped runs from starting: a suite of its own."""
    suites = [_suite(number, account) for number, account in enumerate(accounts)]
    if failure is not None:
        suites.append(_refusal(len(suites), failure))
    return '<?xml version="1.0" encoding="UTF-8"?>\n<testsuites>\n' + "".join(suites) + "</testsuites>\n"


def _suite(number: int, account: Account) -> str:
    record = account.record
    cases = list(_cases(account))
    properties = "".join(_element("property", {"name": name, "value": value}) for name, value in _properties(account))
    content = f"<properties>\n{properties}</properties>\n" + "".join(text for text, _ in cases)
    return _whole_suite(number, record.name or record.id, record, [kind for _, kind in cases], content)


def _whole_suite(number: int, name: str, record: RunRecord | None, kinds: Sequence[str], content: str) -> str:
    moment = datetime.fromtimestamp((record.started if record is not None else 0) / 1e6, UTC)
    attributes = {
        "name": name,
        "package": "runner",
        "id": str(number),
        "timestamp": moment.strftime("%Y-%m-%dT%H:%M:%S"),
        "hostname": HOST,
        "tests": str(len(kinds)),
        "failures": str(kinds.count("failure")),
        "errors": str(kinds.count("error")),
        "skipped": str(kinds.count("skipped")),
        "time": _seconds(record.seconds if record is not None else None),
    }
    streams = _element("system-out", {}) + _element("system-err", {})
    return _element("testsuite", attributes, "\n" + content + streams)


def _properties(account: Account) -> Iterator[tuple[str, str]]:
    record = account.record
    usage = used(record)
    reached = [
        sum(one.connections for one in record.network.values() if bool(one.refusal) is no) for no in (False, True)
    ]
    values = {
        "run": record.id,
        "status": record.status.value,
        "plan": record.plan,
        "provider": record.provider,
        "isolation": isolation_line(record),
        "rehearsal": record.rehearsal,
        "resumes": record.resumes,
        "agent": account.agent,
        "model": account.model,
        "incident": account.incident,
        "requests": usage.requests or None,
        "tokens": usage.tokens or None,
        "cost_usd": f"{usage.cost_usd:.4f}" if usage.tokens and usage.cost_usd is not None else None,
        "commands": commands(record.commands) if record.commands is not None else None,
        "open_network": ", ".join(record.open_network),
        "connections": reached[0] or None,
        "refused_connections": reached[1] or None,
        "network": network_line(record.network.values()) if record.network else None,
        "mcp": "; ".join(mcp_lines(record)),
        "snapshot": record.snapshot.commit if record.snapshot is not None else None,
        "exit_code": record.exit_code,
    }
    yield from ((name, escape_unprintable(str(value))) for name, value in values.items() if value not in (None, ""))


def _cases(account: Account) -> Iterator[tuple[str, str]]:
    """Yield each case, as an ``error``, a ``failure``, ``skipped`` or passed."""
    record = account.record
    for name, step in record.steps.items():
        checks = record.checks.get(name, ())
        tail = _lines(account.tails.get(name, ()))
        first = next((check for check in checks if not check.ok), None)
        yield _case(record.name, name, step.seconds, *_of_step(step, "" if first else tail))
        for check in checks:
            yield _case(record.name, f"{name}: {check.what}", None, *_of_check(check, tail if check is first else ""))
    if record.outcome is None:
        why = "its runner has died" if record.status is Status.LOST else "it has not ended"
        yield _case(record.name, "run", None, "error", _wrong("error", record.status.value, why, ""))
    elif blamed(record) is None and (not record.outcome.ok or not record.steps):
        yield _case(record.name, "run", record.seconds, *_of_outcome(record.outcome, ""))


def _of_step(step: StepRecord, tail: str) -> tuple[str, str]:
    if step.outcome is None:
        return _skipped("not reached" if step.started is None else "it has not ended")
    return _of_outcome(step.outcome, tail)


def _of_outcome(outcome: Outcome, tail: str) -> tuple[str, str]:
    if outcome.status is Status.SKIPPED:
        return _skipped(outcome.message)
    if outcome.ok:
        return "", ""
    reason = outcome.reason.value if outcome.reason is not None else outcome.status.value
    return "failure", _wrong("failure", reason, outcome.message, _with_tail(_lines(outcome.details), tail))


def _of_check(check: Check, tail: str) -> tuple[str, str]:
    if check.ok:
        return "", ""
    text = _with_tail(str(check), tail)
    return "failure", _wrong("failure", Reason.VERIFY.value, check.found or "it is not so", text)


def _skipped(message: str) -> tuple[str, str]:
    return "skipped", _element("skipped", {"message": _line(message)})


def _with_tail(text: str, tail: str) -> str:
    return f"{text}\n\nthe end of its output:\n{tail}" if tail else text


def _refusal(number: int, failure: RunnerError) -> str:
    """Return a suite with a case for each finding."""
    findings = failure.findings if isinstance(failure, Rejected) else (failure,)
    wrong = [finding for finding in findings if finding.severity == "error"]
    cases = [_case("runner", f"{one.code} {one.at or ''}".strip(), None, "failure", _finding(one)) for one in wrong]
    content = "<properties>\n</properties>\n" + "".join(text for text, _ in cases)
    return _whole_suite(number, "runner", None, [kind for _, kind in cases], content)


def _finding(finding: RunnerError) -> str:
    places = [str(place) for place in (finding.at, *finding.also) if place is not None]
    hint = [f"hint: {finding.hint}"] if finding.hint else []
    return _wrong("failure", finding.code, finding.message, _lines([finding.message, *places, *hint]))


def _case(classname: str, name: str, seconds: float | None, kind: str, child: str) -> tuple[str, str]:
    attributes = {"name": _line(name), "classname": classname or "runner", "time": _seconds(seconds)}
    return _element("testcase", attributes, child), kind


def _wrong(tag: str, reason: str, message: str, text: str) -> str:
    """Return a ``failure`` or an ``error``."""
    return _element(tag, {"type": reason, "message": _line(message)}, escape(text))


def _element(tag: str, attributes: dict[str, str], content: str = "") -> str:
    written = "".join(f" {name}={quoteattr(value)}" for name, value in attributes.items())
    return f"<{tag}{written}>{content}</{tag}>\n"


def _line(text: str) -> str:
    return escape_unprintable(text[:_MOST])


def _lines(lines: Sequence[str]) -> str:
    return "\n".join(_line(line.expandtabs()) for line in lines)


def _seconds(seconds: float | None) -> str:
    return f"{seconds or 0.0:.3f}"
