"""Metrics of a server in the text format of Prometheus: what it has counted itself, and what the store has.

Labels take values of closed sets only, so that no client can make more series.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from runner import __version__
from runner.events.record import RunRecord
from runner.ops.workspaces.capacity import ACTIVE, PROVISIONING, SESSION
from runner.ops.workspaces.leases import list_leases
from runner.ops.workspaces.workspace_lease import WorkspaceEnv
from runner.server.provider_health import Providers

MEDIA = "text/plain; version=0.0.4; charset=utf-8"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"})
_REQUEST_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)  # seconds
_STEP_BOUNDS = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600)

Labels = tuple[tuple[str, str], ...]
Samples = Iterable[tuple[Labels, float]]


class Histogram:
    """Durations in seconds, counted by labels and by upper bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts: dict[Labels, list[int]] = {}
        self._sums: Counter[Labels] = Counter()

    def add(self, seconds: float, **labels: str) -> None:
        key = (*labels.items(),)
        counts = self._counts.setdefault(key, [0] * (len(self._bounds) + 1))
        counts[bisect_left(self._bounds, seconds)] += 1
        self._sums[key] += seconds  # type: ignore[assignment]  # it adds up floats as well

    def lines(self, name: str, text: str) -> Iterator[str]:
        yield from _head(name, "histogram", text)
        for labels, counts in self._counts.items():
            for bound, count in zip((*map(str, self._bounds), "+Inf"), accumulate(counts), strict=True):
                yield _sample(f"{name}_bucket", (*labels, ("le", bound)), count)
            yield _sample(f"{name}_sum", labels, self._sums[labels])
            yield _sample(f"{name}_count", labels, sum(counts))


class Metrics:
    """Counters of this process, from its start."""

    def __init__(self) -> None:
        self._requests: Counter[Labels] = Counter()
        self._request_seconds = Histogram(_REQUEST_BOUNDS)
        self._tool_calls: Counter[Labels] = Counter()
        self._step_seconds = Histogram(_STEP_BOUNDS)
        self._dropped = 0
        self.streams = 0

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request that its ``route`` has begun to answer after so many seconds."""
        known = method if method in _METHODS else "other"
        self._requests[("method", known), ("route", route), ("status", str(status))] += 1
        self._request_seconds.add(seconds, route=route)

    def called(self, tool: str, outcome: str) -> None:
        """Count a call of a tool; its outcome is ``ok``, or the code of an error."""
        self._tool_calls[("tool", tool), ("outcome", outcome)] += 1

    def ended(self, record: RunRecord) -> None:
        """Count the steps of a run."""
        for step in record.steps.values():
            if step.seconds is not None:
                self._step_seconds.add(step.seconds, kind=step.kind, status=step.status.value)

    def dropped(self) -> None:
        """Count a stream of events whose client did not keep up."""
        self._dropped += 1

    async def render(self, env: WorkspaceEnv, health: Providers) -> str:
        store = env.store
        workspaces = Counter(row.status.value for row in await store.workspaces())
        sessions = {state: len(await store.entries(SESSION, state=state)) for state in (PROVISIONING, ACTIVE)}
        leases = Counter(lease.state for lease in await list_leases(env))
        available = (((("provider", one.name),), int(one.available)) for one in health.providers)
        slots = Counter(slot.state.value for slot in await store.slots())
        claims = (
            ((("result", "hit" if what == "hit" else "miss"), ("reason", "" if what == "hit" else what)), float(count))
            for what, count in (await store.pool_counts()).items()
        )
        lines = [
            *_family("runner_build_info", "gauge", "Version of the server.", [((("version", __version__),), 1)]),
            *_family("runner_runs", "gauge", "Runs in the store.", _by("status", await store.run_counts())),
            *_family("runner_workspaces", "gauge", "Workspaces that exist.", _by("status", workspaces)),
            *_family("runner_sessions", "gauge", "Sessions that have not ended.", _by("status", sessions)),
            *_family("runner_leases", "gauge", "Leases of workspaces.", _by("state", leases)),
            *_family("runner_provider_available", "gauge", "1 for each provider that can be used here.", available),
            *_family("runner_pool_slots", "gauge", "Slots of warm pools.", _by("state", slots)),
            *_family("runner_pool_claims_total", "counter", "Workspaces asked of warm pools.", claims),
            *_family("runner_tool_calls_total", "counter", "Calls of tools.", self._tool_calls.items()),
            *_family("runner_http_requests_total", "counter", "Requests.", self._requests.items()),
            *self._request_seconds.lines("runner_http_request_duration_seconds", "Time to the start of an answer."),
            *self._step_seconds.lines("runner_step_duration_seconds", "Steps of runs that this server executed."),
            *_family("runner_event_streams", "gauge", "Clients that follow runs.", [((), self.streams)]),
            *_family(
                "runner_event_streams_dropped_total", "counter", "Clients that did not keep up.", [((), self._dropped)]
            ),
        ]
        return "\n".join([*lines, ""])


def _by(label: str, counts: Mapping[str, int]) -> Samples:
    return ((((label, value),), count) for value, count in counts.items())


def _family(name: str, kind: str, text: str, samples: Samples) -> Iterator[str]:
    yield from _head(name, kind, text)
    yield from (_sample(name, labels, value) for labels, value in samples)


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def _sample(name: str, labels: Labels, value: float) -> str:
    shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
    return f"{name}{{{shown}}} {value}" if shown else f"{name} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
