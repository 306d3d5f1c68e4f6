"""The state that the events of a run add up to. Store, console and report all use this one fold."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address

from msgspec import Struct

from runner.core.hosts import is_address, is_public
from runner.core.model import (
    Check,
    ClusterRefusal,
    Isolation,
    IsolationClass,
    McpVerdict,
    NetworkRefusal,
    Outcome,
    PoolMissReason,
    SavedWork,
    Status,
    Usage,
    Violation,
)
from runner.events import events as ev


class StepRecord(Struct, kw_only=True):
    """``stop_stages`` are the times and stages of stopping the step's commands.

    ``reused`` is the run whose result the step reuses. ``failure`` locates the output of the first command that failed
    the step.
    """

    kind: str
    status: Status = Status.PENDING
    outcome: Outcome | None = None
    started: int | None = None
    ended: int | None = None
    stop_stages: list[tuple[int, ev.StopStageReached]] = []
    reused: str | None = None
    failure: ev.CommandFailed | None = None
    routine: bool = False

    @property
    def seconds(self) -> float | None:
        if self.started is None or self.ended is None:
            return None
        return (self.ended - self.started) / 1e6


class HostUse(Struct, frozen=True, kw_only=True):
    """Connections of commands to a host and port; ``place`` is empty for those that were only counted.

    ``origin`` is the manifest line that allows them; ``requests`` got the ``credential`` of that name. ``private`` says
    that an address was not public.
    """

    place: str
    refusal: NetworkRefusal | None
    origin: str = ""
    connections: int = 0
    requests: int = 0
    credential: str = ""
    sent_bytes: int = 0
    received_bytes: int = 0
    steps: tuple[str, ...] = ()
    private: bool = False

    def with_one(self, ended: ev.ConnectionEnded) -> HostUse:
        known = ended.host if ended.address.startswith("proxy ") else ended.address  # to which a proxy led nobody knows
        return HostUse(
            place=self.place,
            refusal=self.refusal,
            origin=ended.origin or self.origin,
            connections=self.connections + ended.count,
            requests=self.requests + ended.requests,
            credential=ended.credential or self.credential,
            sent_bytes=self.sent_bytes + ended.sent_bytes,
            received_bytes=self.received_bytes + ended.received_bytes,
            steps=self.steps if ended.step in self.steps else (*self.steps, ended.step),
            private=self.private or (is_address(known) and not is_public(ip_address(known))),
        )


class ClusterUse(Struct, kw_only=True):
    """Requests of commands to a cluster, counted by verb and resource: answered, refused here, failed there."""

    context: str
    server: str
    namespace: str
    answered: dict[str, int] = {}
    refused: dict[str, int] = {}
    failed: dict[str, int] = {}

    @property
    def requests(self) -> int:
        return sum(sum(each.values()) for each in (self.answered, self.refused, self.failed))

    def add(self, what: str, refusal: ClusterRefusal | None, count: int) -> None:
        of_cluster = refusal is ClusterRefusal.CLUSTER
        counts = self.answered if refusal is None else self.failed if of_cluster else self.refused
        counts[what] = counts.get(what, 0) + count


class McpUse(Struct, frozen=True, kw_only=True):
    """Calls of an agent to a tool of an MCP server that ended alike; ``tool`` is empty for those only counted."""

    server: str
    tool: str
    verdict: McpVerdict
    calls: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0

    def with_one(self, ended: ev.McpCallEnded) -> McpUse:
        return McpUse(
            server=self.server,
            tool=self.tool,
            verdict=self.verdict,
            calls=self.calls + ended.count,
            sent_bytes=self.sent_bytes + ended.sent_bytes,
            received_bytes=self.received_bytes + ended.received_bytes,
            seconds=self.seconds + ended.seconds,
        )


class RunRecord(Struct, kw_only=True):
    """A run so far. ``resources`` maps (kind, name) of what exists, or may exist, outside the store to its place.

    ``log`` is the file with the agent's output. ``attempt`` counts the run's workspaces, of which it has one at a
    time. ``placed`` says where its Job is, and ``waits`` for what a pending one waits. ``models`` is usage counted by
    the gateway, by model; ``reported_usage`` and ``commands`` are the agent's own account; ``argv`` and ``version`` are
    those of its CLI. ``mcp_servers`` are those that it could use, with the number of tools of each.
    """

    id: str
    name: str = ""
    plan: str = ""
    key: str | None = None
    resumes: str | None = None
    rehearsal: str | None = None
    attempt: int = 1
    status: Status = Status.PENDING
    phase: str = ""
    deadline_seconds: float = 0.0
    started: int = 0
    ended: int | None = None
    placed: ev.RunPlaced | None = None
    waits: str = ""
    steps: dict[str, StepRecord] = {}
    provider: str | None = None
    isolation: IsolationClass | None = None
    observed: Isolation | None = None
    models: dict[str, Usage] = {}
    reported_usage: Usage | None = None
    argv: tuple[str, ...] = ()
    version: str = ""
    commands: ev.CommandsReportedByAgent | None = None
    log: str | None = None
    preloaded: ev.ContextPreloaded | None = None
    cluster: ClusterUse | None = None
    network: dict[tuple[str, NetworkRefusal | None], HostUse] = {}
    mcp: dict[tuple[str, str, McpVerdict], McpUse] = {}
    mcp_servers: dict[str, int] = {}
    open_network: tuple[str, ...] = ()
    rejected_providers: list[tuple[str, str]] = []
    warnings: list[tuple[str, str]] = []
    violations: list[Violation] = []
    checks: dict[str, tuple[Check, ...]] = {}
    injected_files: dict[str, str] = {}
    protected: dict[str, str] = {}
    base: str | None = None
    snapshot: ev.SnapshotPublished | None = None
    commits: ev.AgentCommitsImported | None = None
    slot: str | None = None
    pool_miss: PoolMissReason | None = None
    saved_work: SavedWork | None = None
    resources: dict[tuple[str, str], str] = {}
    cancelled_by: str | None = None
    outcome: Outcome | None = None
    exit_code: int | None = None
    artifacts: ev.ArtifactsCopied | None = None

    @property
    def seconds(self) -> float | None:
        return None if self.ended is None or not self.started else (self.ended - self.started) / 1e6

    @property
    def workspace(self) -> str:
        """The id of the run's workspace, created or not."""
        return f"{self.id}-{self.attempt}"

    @property
    def left_behind(self) -> tuple[str, ...]:
        """The resources that the run has ended without removing: kind, name and place of each."""
        found = () if self.ended is None else self.resources.items()
        return tuple(f"{kind} {name} {place}".rstrip() for (kind, name), place in found)

    def unfinished(self) -> list[str]:
        """The steps that have started and not ended."""
        return [name for name, step in self.steps.items() if step.status is Status.RUNNING]

    def begin_attempt(self, attempt: int, repeated: Iterable[str]) -> None:
        """Forget what is known of the workspace that was given up, and the steps that are repeated in the next."""
        self.attempt = attempt
        self.steps |= {
            name: StepRecord(kind=self.steps[name].kind, routine=self.steps[name].routine) for name in repeated
        }
        self.provider = self.isolation = self.observed = self.base = None
        self.injected_files, self.protected = {}, {}
        self.slot = self.pool_miss = self.preloaded = None


def fold(record: RunRecord, recorded: ev.Recorded) -> None:
    """Advance a record by one event, in place."""
    for part in (_fold_pending, _fold_course, _fold_place, _fold_work, _fold_use, _fold_warning):
        part(record, recorded)


def _fold_pending(record: RunRecord, recorded: ev.Recorded) -> None:
    """Take what happens to a run before it begins."""
    match recorded.event:
        case ev.RunSubmitted() as submitted:
            record.name, record.plan, record.key = submitted.name, submitted.plan, submitted.key
        case ev.RunPlaced() as placed:
            record.placed = placed
        case ev.RunWaits(reason=reason):
            record.waits = reason


def _fold_course(record: RunRecord, recorded: ev.Recorded) -> None:
    """Take what says how far the run and its steps are."""
    match recorded.event:
        case ev.RunStarted() as started:
            record.waits = ""
            record.name, record.plan, record.key = started.name, started.plan, started.key
            record.resumes, record.rehearsal = started.resumes, started.rehearsal
            record.deadline_seconds, record.open_network = started.deadline_seconds, started.open_network
            record.status, record.started = Status.RUNNING, recorded.at
            record.steps = {
                step: StepRecord(kind=kind, routine=step in started.routine) for step, kind in started.steps.items()
            }
        case ev.PhaseStarted(phase=phase):
            record.phase = phase
        case ev.StepStarted(step=step):
            record.steps[step].status = Status.RUNNING
            record.steps[step].started = recorded.at
        case ev.StepReused(step=step, from_run=run):
            record.steps[step].reused = run
        case ev.StepEnded(step=step, outcome=outcome):
            record.steps[step].status, record.steps[step].outcome = outcome.status, outcome
            record.steps[step].ended = recorded.at
            record.warnings += (("step.warning", f"{step}: {text}") for text in outcome.warnings)
        case ev.CommandFailed(step=step) as failure:
            record.steps[step].failure = record.steps[step].failure or failure
        case ev.StopStageReached(step=step) as reached:
            record.steps[step].stop_stages.append((recorded.at, reached))
        case ev.CancelRequested(reason=reason):
            record.cancelled_by = reason
        case ev.RunEnded(outcome=outcome, exit_code=exit_code):
            record.status, record.outcome, record.exit_code = outcome.status, outcome, exit_code
            record.ended = recorded.at
        case ev.ChecksFinished(step=step, checks=checks):
            record.checks[step] = checks


def _fold_place(record: RunRecord, recorded: ev.Recorded) -> None:
    """Take what says where the run is, and what it holds."""
    match recorded.event:
        case ev.ResourceIntended(kind=kind, name=name, place=place):
            record.resources[kind, name] = place
        case ev.ResourceRemoved(kind=kind, name=name):
            record.resources.pop((kind, name), None)
        case ev.LeaseAcquired(workspace=workspace, lease=lease):
            record.resources["lease", workspace] = lease
        case ev.LeaseReleased(workspace=workspace):
            record.resources.pop(("lease", workspace), None)
        case ev.ProviderChosen(provider=provider, isolation=isolation):
            record.provider, record.isolation = provider, isolation
        case ev.ProviderRejected(provider=provider, reason=reason):
            record.rejected_providers.append((provider, reason))
        case ev.FallbackStarted(step=step, provider=provider, reason=reason, attempt=attempt, repeated=repeated):
            record.rejected_providers.append((provider, f"{step}: {reason}"))
            record.begin_attempt(attempt, repeated)
        case ev.SlotClaimed(slot=slot):
            record.slot, record.pool_miss = slot, None
        case ev.PoolMissed(reason=reason):
            record.slot, record.pool_miss = None, reason
        case ev.IsolationObserved(isolation=observed):
            record.observed = observed
        case ev.LogOpened(path=path):
            record.log = path


def _fold_work(record: RunRecord, recorded: ev.Recorded) -> None:
    """Take what the agent was given and what it made."""
    match recorded.event:
        case ev.FileInjected(path=path, sha256=sha256):
            record.injected_files[path] = sha256
        case ev.ProtectedPathsHashed(digests=digests):
            record.protected = digests
        case ev.BaseCommitRecorded(commit=commit):
            record.base = commit
        case ev.ContextPreloaded() as preloaded:
            record.preloaded = preloaded
        case ev.AgentStarted(argv=argv, version=version):
            record.argv, record.version = argv, version
        case ev.CommandsReportedByAgent() as seen:
            record.commands = seen
        case ev.ViolationsFound(violations=violations):
            record.violations += violations
        case ev.SnapshotPublished() as snapshot:
            record.snapshot = snapshot
        case ev.AgentCommitsImported() as commits:
            record.commits = commits
        case ev.WorkSaved(saved_work=saved_work):
            record.saved_work = saved_work
        case ev.ArtifactsCopied() as copied:
            record.artifacts = copied


def _fold_use(record: RunRecord, recorded: ev.Recorded) -> None:
    """Take what was used of models, clusters, hosts and MCP servers."""
    match recorded.event:
        case ev.ModelRequestFinished(model=model, usage=usage):
            if model:
                record.models[model] = record.models.get(model, Usage()) + usage
        case ev.UsageReportedByAgent(usage=usage):
            record.reported_usage = usage
        case ev.ClusterAccessOpened(context=context, server=server, namespace=namespace):
            record.cluster = record.cluster or ClusterUse(context=context, server=server, namespace=namespace)
        case ev.ClusterRequestFinished(verb=verb, resource=resource, refusal=refusal, count=count) if (
            record.cluster is not None
        ):
            record.cluster.add(f"{verb} {resource}".rstrip(), refusal, count)
        case ev.ConnectionEnded() as ended:
            key = (f"{ended.host}:{ended.port}" if ended.host else "", ended.refusal)
            record.network[key] = record.network.get(key, HostUse(place=key[0], refusal=key[1])).with_one(ended)
        case ev.McpServerStarted(server=server, tools=tools) if server:
            record.mcp_servers[server] = tools
        case ev.McpCallEnded(server=server, tool=tool, verdict=verdict) as call:
            known_use = record.mcp.get((server, tool, verdict), McpUse(server=server, tool=tool, verdict=verdict))
            record.mcp[server, tool, verdict] = known_use.with_one(call)


def _fold_warning(record: RunRecord, recorded: ev.Recorded) -> None:
    """Take what somebody should look at."""
    match recorded.event:
        case ev.McpServerEnded(server=server, how=how, pause_seconds=pause) if server:
            again = "" if pause is None else "; it was started anew" if not pause else f"; again after {pause:.0f} s"
            record.warnings.append(("mcp.ended", f"MCP server {server}: {how}{again}"))
        case ev.RetryScheduled(step=step, operation=operation, code=code, reason=reason):
            record.warnings.append((code, f"{step}: {operation} failed and was tried again: {reason}"))
        case ev.WarningIssued(code=code, message=message):
            record.warnings.append((code, message))
        case ev.OomKilled(step=step, count=count):
            killed = "a process" if count == 1 else f"{count} processes"
            record.warnings.append(("step.oom", f"{step}: out of memory, the kernel killed {killed}"))
        case ev.ProcessEscaped(step=step, detail=detail):
            record.warnings.append(("provider.escaped", f"{step}: {detail}"))


def replay(run: str, history: Iterable[ev.Recorded]) -> RunRecord:
    """Fold a whole history."""
    record = RunRecord(id=run)
    for recorded in history:
        fold(record, recorded)
    return record
