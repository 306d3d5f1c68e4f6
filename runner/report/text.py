"""Report of a run for people: how it ended, in what isolation, size, each step, and where everything is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from runner.core.model import IsolationClass, McpVerdict, Reason, Status
from runner.core.plural import plural
from runner.core.sanitize import sanitize
from runner.events.events import AgentCommitsImported
from runner.events.record import ClusterUse, HostUse, McpUse, RunRecord, StepRecord
from runner.report.format import MARKS, brief, commands, duration, isolation, open_network, size, stop_stage, usage
from runner.report.run_files import blamed
from runner.triage.budget import sizes

WIDEST = 1_000  # characters of a line
_NAMED = 4  # kinds of refused requests, and late violations, that are named


def render_run(record: RunRecord, directory: Path | None) -> str:
    """Render the report of one run, escaped for terminals, without a final line break.

    ``directory`` has its files; ``None`` when they are not on this host.
    """
    return "\n".join(sanitize(line, WIDEST) for line in _lines(record, directory))


def _lines(record: RunRecord, directory: Path | None) -> Iterator[str]:
    yield from open_network(record.open_network)
    if record.rehearsal is not None:
        yield f"REHEARSAL: no model was asked, {record.rehearsal} stood for it"
    taken = f" in {duration(record.seconds)}" if record.seconds is not None else ""
    yield f"{status_word(record)} {record.name}{taken}   run {record.id}"
    if record.resumes is not None:
        yield f"  resumes    run {record.resumes}"
    yield f"  isolation  {isolation_line(record)}"
    yield from (f"  refused    {provider}: {reason}" for provider, reason in record.rejected_providers)
    told = because(record) or (record.waits and f"it waits: {record.waits}")
    if told:
        yield f"  because    {brief(told)}"
    if record.status is Status.LOST:
        yield f"  because    its runner has died; `runner recover {record.id}` saves its work and cleans up"
    if record.preloaded is not None:
        yield f"  preloaded  {sizes(record.preloaded.parts)}"
        yield from (f"  baseline   {line}" for line in (record.preloaded.headline,) if line)
    if record.version:
        yield f"  agent      {record.argv[0]} {record.version}"
    yield from (f"  model      {line}" for line in usage_lines(record))
    if record.commands is not None:
        yield f"  agent ran  {commands(record.commands)}"
    if record.cluster is not None:
        yield f"  cluster    {cluster_line(record.cluster)}"
    yield from (f"  mcp        {line}" for line in mcp_lines(record))
    if record.network:
        yield f"  network    {network_line(record.network.values())}"
    for _, message in record.warnings:
        yield f"  warning    {message}"
    for name, step in record.steps.items():
        yield from _step(name, step, told)
    yield from _found_later(record)
    yield from _places(record, directory)
    yield from (f"  LEFT BEHIND  {left}" for left in record.left_behind)
    yield from [f"  clean up   runner recover {record.id}"] if record.left_behind else []


def status_word(record: RunRecord) -> str:
    """Return ``SUCCEEDED``, ``FAILED``, ``TIMED OUT``: how a run ended, or its state."""
    late = record.outcome is not None and record.outcome.reason is Reason.TIMEOUT
    return "TIMED OUT" if late else record.status.value.upper()


def isolation_line(record: RunRecord) -> str:
    """Return the isolation class that was used, and what was read back from inside."""
    if record.isolation is None:
        return "nothing was started"
    unseen = "; nothing was read back" if record.ended is not None else ""
    return class_line(record) + (f"; read back: {isolation(record.observed)}" if record.observed else unseen)


def class_line(record: RunRecord) -> str:
    """Return the isolation class, in capitals where there is none."""
    assert record.isolation is not None
    loud = " - NOT ISOLATED from this host" if record.isolation is IsolationClass.NONE else ""
    return f"{record.isolation.value} ({record.provider}){loud}"


def usage_lines(record: RunRecord) -> Iterator[str]:
    """Yield the usage of each model, and what nobody counted."""
    unspent = ", not spent" if record.rehearsal is not None else ""
    yield from (f"{name}: {usage(used)}{unspent}" for name, used in record.models.items())
    if record.reported_usage is not None:
        yield f"as the agent says, which had the key: {usage(record.reported_usage)}"


def cluster_line(used: ClusterUse) -> str:
    """Say how many requests commands sent to a cluster, and how many were refused here or failed there."""
    counts = [plural(used.requests, "request"), _counted(used.refused, "refused")]
    counts += [_counted(used.failed, "failed")] if used.failed else []
    return f"{used.context}: {', '.join(counts)}"


def mcp_lines(record: RunRecord) -> Iterator[str]:
    """Say of each MCP server how many calls its tools answered, and how many failed or were refused."""
    for server in dict.fromkeys([*record.mcp_servers, *(name for name, _, _ in record.mcp)]):
        uses = [one for one in record.mcp.values() if one.server == server]
        answered = [one for one in uses if one.verdict is McpVerdict.ANSWERED]
        others = sorted((one for one in uses if one.verdict is not McpVerdict.ANSWERED), key=_most_called)
        answered.sort(key=_most_called)
        text = f"{server}: {plural(sum(one.calls for one in answered), 'call')}"
        text += _named([f"{one.tool} {one.calls}" if one.tool else "" for one in answered])
        if others:
            told = [f"{one.tool} {one.verdict}".strip() for one in others]
            text += f"; {sum(one.calls for one in others)} failed or refused{_named(told)}"
        yield text


def mcp_uses(record: RunRecord) -> list[McpUse]:
    """Return the calls of each tool, by server, those that were answered and made most often first."""
    return sorted(record.mcp.values(), key=lambda one: (one.server, one.verdict.refused, *_most_called(one)))


def calls(use: McpUse) -> str:
    """Say what went to and came from a tool, and how long it took."""
    each = use.seconds / max(use.calls, 1)
    return f"{use.verdict}, {size(use.sent_bytes)} out, {size(use.received_bytes)} in, {each:.3f} s each"


def _most_called(use: McpUse) -> tuple[int, str]:
    return -use.calls, use.tool


def network_line(uses: Collection[HostUse]) -> str:
    """Say how many connections commands had to which hosts, and which were refused."""
    had = sorted((one for one in uses if one.refusal is None), key=_most)
    refused = sorted((one for one in uses if one.refusal is not None), key=_most)
    text = plural(sum(one.connections for one in had), "connection") + _named([one.place for one in had])
    if refused:
        named = _named([f"{one.place} {one.refusal}" if one.place else "" for one in refused])
        text += f"; {sum(one.connections for one in refused)} refused{named}"
    return text


def uses_of(record: RunRecord) -> list[HostUse]:
    """Return the hosts that commands reached, the most used first, and then those that were refused."""
    return sorted(record.network.values(), key=lambda one: (one.refusal is not None, *_most(one)))


def traffic(use: HostUse) -> str:
    """Say what went to and came from a host, or why it was refused."""
    text = f"refused: {use.refusal}" if use.refusal else f"{size(use.sent_bytes)} out, {size(use.received_bytes)} in"
    return text + (f", {plural(use.requests, 'request')} with {use.credential}" if use.requests else "")


def _named(places: Sequence[str]) -> str:
    named = [place for place in places[:_NAMED] if place] + ["..."] * (len(places) > _NAMED)
    return f" ({', '.join(named)})" if named else ""


def _most(use: HostUse) -> tuple[int, str]:
    return -use.connections, use.place


def _counted(requests: Mapping[str, int], what: str) -> str:
    most = sorted(requests, key=lambda each: (-requests[each], each))
    known = [each for each in most if " " in each]  # requests that were counted together have a verb only
    named = ", ".join(known[:_NAMED] + ["..."] * (len(most) > len(known[:_NAMED])))
    return f"{sum(requests.values())} {what}" + (f" ({named})" if known else "")


def because(record: RunRecord) -> str:
    """Yield why a run ended; every violation, also those that only a later step found."""
    outcome, found = record.outcome, record.violations
    if outcome is None or outcome.reason is not Reason.POLICY or not found:
        return outcome.message if outcome is not None else ""
    at = f"{step}: " if (step := blamed(record)) else ""
    return f"{at}{plural(len(found), 'violation')}: {'; '.join(map(str, found))}"


def _step(name: str, step: StepRecord, told: str) -> Iterator[str]:
    """Return the line of a step, without what was ``told`` before it."""
    message = step.outcome.message if step.outcome else ""
    said = message in told or (step.outcome is not None and step.outcome.reason is Reason.POLICY)
    message = "" if said else brief(message)
    yield f"  {MARKS[step.status]} {name:<10} {duration(step.seconds):>6}  {message}".rstrip()
    if step.stop_stages:
        yield f"      {', '.join(dict.fromkeys(stop_stage(reached) for _, reached in step.stop_stages))}"
    if step.outcome is not None and not step.outcome.ok:
        details = [brief(detail) for detail in step.outcome.details if detail not in told]
        yield from (f"      {detail}" for detail in details[:20])
        more = len(details) - 20
        if more > 0:
            yield f"      and {more} more"


def _found_later(record: RunRecord) -> Iterator[str]:
    """Yield violations that failed no step: those that only saving has found."""
    if record.outcome is not None and record.outcome.reason is Reason.POLICY:
        return
    told = {detail for step in record.steps.values() if step.outcome for detail in step.outcome.details}
    yield from [f"  violation  {each}" for each in record.violations if str(each) not in told][:_NAMED]


def _places(record: RunRecord, directory: Path | None) -> Iterator[str]:
    kept, there = directory or Path(), " on the host that it ran on" if directory is None else ""
    if record.snapshot is not None:
        named = f" for branch {record.snapshot.branch}, not pushed" if record.snapshot.branch else ""
        yield f"  snapshot   {record.snapshot.commit[:12]}{named}"
    if record.commits is not None:
        yield f"  commits    {_commits(record.commits, kept)}"
    saved_work = record.saved_work
    if saved_work is not None and saved_work.patch is not None:
        held = " (WITHHELD: policy was broken)" if saved_work.withheld else ""
        yield f"  patch      {kept / saved_work.patch}{held}"
    if saved_work is not None:
        yield from (f"  output     {path}" for path in saved_work.outputs[:10])
    if record.log is not None:
        yield f"  log        {record.log}{there}"
    if directory is not None:
        yield f"  evidence   {directory}"
    elif record.artifacts is not None:
        yield "  evidence   not on this host: name the store of its copy in RUNNER_ARTIFACTS"
    elif record.status not in (Status.PENDING, Status.SKIPPED):  # which leave none
        yield "  evidence   not on this host: the run was on another, or RUN_RETENTION is over"
    if (copied := record.artifacts) is not None:
        yield f"  copy       {copied.url}, {plural(copied.files, 'file')}, {size(copied.bytes)}"


def _commits(commits: AgentCommitsImported, directory: Path) -> str:
    if commits.bundle is None:
        return f"the agent's own are WITHHELD: {commits.withheld}"
    return f"{commits.count} of the agent's own: {directory / commits.bundle}"
