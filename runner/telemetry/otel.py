"""Traces, metrics and logs of runs for a collector of OpenTelemetry, by the official SDK over OTLP and HTTP.

Everything is made of events, after they are durable. A span is made when it ends, with the times of its events and an
id that follows from run and step, so nothing is open when a runner dies, and a recovered run is told once more as the
same spans. The SDK sends in threads of its own; what its queues have no room for is dropped. Its settings are the
``OTEL_`` variables, which it reads itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from typing import Any

import trio

from runner import __version__
from runner.core.errors import TelemetryUnsent, TelemetryUnusable
from runner.core.model import Outcome, Status
from runner.events import events as ev

try:
    from opentelemetry import context as contexts
    from opentelemetry import trace
    from opentelemetry._logs import LogRecord, SeverityNumber
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, StatusCode, TraceFlags
    from opentelemetry.trace import Status as SpanStatus
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise TelemetryUnusable("OpenTelemetry is not installed", hint="pip install 'plan-runner[otel]'") from error

FLUSH = 5.0  # seconds for what is still to be sent when the last run has ended
SCOPE = "runner"
_SECONDS: tuple[float, ...] = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_GEN_AI_SECONDS: tuple[float, ...] = tuple(0.01 * 2**power for power in range(14))
_GEN_AI_TOKENS: tuple[float, ...] = tuple(4**power for power in range(14))  # both as the conventions for GenAI advise
_CALLS = {  # of the gateway's APIs: provider and operation by the conventions for GenAI
    "messages": ("anthropic", "chat"),
    "chat/completions": ("openai", "chat"),
    "responses": ("openai", "chat"),
    "generateContent": ("gcp.gemini", "generate_content"),
    "streamGenerateContent": ("gcp.gemini", "generate_content"),
}
_SHELLS = ("bash", "sh")
_Attributes = dict[str, str | int | float | bool]


class Telemetry:
    """A sink of the events of runs; one for a process."""

    def __init__(self, traceparent: str = "") -> None:
        logging.getLogger("opentelemetry").addHandler(logging.NullHandler())  # what it cannot send is told by ``flush``
        logging.getLogger("opentelemetry").propagate = False
        self._failures: list[str] = []
        resource = Resource.create({SERVICE_NAME: "runner", SERVICE_VERSION: __version__})
        self._ids = _Ids()
        self._tracers = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._tracers.add_span_processor(BatchSpanProcessor(_told(OTLPSpanExporter(), self._failures)))
        reader = PeriodicExportingMetricReader(_told(OTLPMetricExporter(), self._failures))
        self._meters = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        self._loggers = LoggerProvider(resource=resource, shutdown_on_exit=False)
        self._loggers.add_log_record_processor(BatchLogRecordProcessor(_told(OTLPLogExporter(), self._failures)))
        self._tracer = self._tracers.get_tracer(SCOPE, __version__)
        self._logger = self._loggers.get_logger(SCOPE, __version__)
        self._instruments = _Instruments(self._meters)
        self._outer = TraceContextTextMapPropagator().extract({"traceparent": traceparent}) if traceparent else None
        self._runs: dict[str, _Run] = {}

    def __call__(self, recorded: ev.Recorded) -> None:
        run, at = self._runs.get(recorded.run), recorded.at * 1_000
        match recorded.event:
            case ev.RunStarted() as started:
                run = self._runs[recorded.run] = _Run(started, at)
            case ev.ProviderChosen(provider=provider, isolation=isolation) if run is not None:
                run.attributes |= {"runner.provider": provider, "runner.isolation": isolation.value}
            case ev.StepStarted(step=step) if run is not None:
                run.steps[step] = at
            case ev.AgentStarted(step=step, argv=(program, *_), version=version) if run is not None:
                name = program.rpartition("/")[2]
                run.agents |= {step: (name, version)} if name not in _SHELLS else {}  # a script is no agent to them
            case ev.ModelRequestFinished() as asked if run is not None:
                self._model_request(recorded.run, run, asked, at)
            case ev.StepEnded(step=step, outcome=outcome) if run is not None:
                self._step(recorded.run, run, step, outcome, at)
            case ev.RunEnded() as ended if run is not None:
                self._run(recorded.run, run, ended, at)
        self._log(recorded, run, at)
        if isinstance(recorded.event, ev.RunEnded):
            self._runs.pop(recorded.run, None)

    def _step(self, id: str, run: _Run, step: str, outcome: Outcome, at: int) -> None:
        kind = run.started.steps.get(step, "")
        attributes: _Attributes = {
            "runner.run.id": id,
            "runner.step.id": step,
            "runner.step.kind": kind,
            "runner.step.status": outcome.status.value,
        }
        name = f"step {step}"
        if (agent := run.agents.get(step)) is not None:
            name = f"invoke_agent {agent[0]}"
            attributes |= {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": agent[0]}
            attributes |= {"gen_ai.agent.version": agent[1]} if agent[1] else {}
        begun = run.steps.pop(step, at)
        times = (begun, at)
        self._span(name, self._ids_of(id, (step, begun)), self._within(id), attributes, times, outcome=outcome)
        measured = {"runner.step.kind": kind, "runner.step.status": outcome.status.value}
        self._instruments.step_seconds.record((at - begun) / 1e9, measured)

    def _run(self, id: str, run: _Run, ended: ev.RunEnded, at: int) -> None:
        attributes = run.attributes | {"runner.run.id": id, "runner.run.exit_code": ended.exit_code}
        attributes |= _ending(ended.outcome)
        links = []
        if run.started.resumes is not None:
            links = [Link(SpanContext(*_ids_of(run.started.resumes, ()), is_remote=True, trace_flags=TraceFlags(1)))]
        name = f"run {run.started.name}"
        ids, times = self._ids_of(id, ()), (run.at, at)
        self._span(name, ids, self._outer, attributes, times, outcome=ended.outcome, links=links)
        measured = {"runner.run.name": run.started.name, **_ending(ended.outcome)}
        self._instruments.runs.add(1, measured)
        self._instruments.run_seconds.record((at - run.at) / 1e9, measured)

    def _model_request(self, id: str, run: _Run, asked: ev.ModelRequestFinished, at: int) -> None:
        if asked.call not in _CALLS:
            return
        provider, operation = _CALLS[asked.call]
        common: _Attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": provider}
        common |= {"gen_ai.request.model": asked.model} if asked.model else {}
        failure = asked.refusal.value if asked.refusal is not None else str(asked.status)
        failed = asked.refusal is not None or not 200 <= asked.status < 300
        common |= {"error.type": failure} if failed else {}
        used = asked.usage
        attributes = common | {
            "runner.run.id": id,
            "runner.step.id": asked.step,
            "http.response.status_code": asked.status,
            "gen_ai.usage.input_tokens": used.input_tokens,
            "gen_ai.usage.output_tokens": used.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": used.cached_tokens,
            "gen_ai.usage.cache_creation.input_tokens": used.cache_write_tokens,
        }
        attributes |= {"runner.cost_usd": used.cost_usd} if used.cost_usd is not None else {}
        run.requests += 1
        begun = at - round(asked.seconds * 1e9)
        parent = self._within(id, asked.step, run.steps.get(asked.step, begun))
        name = f"{operation} {asked.model}".rstrip()
        ids = self._ids_of(id, (asked.step, "model", run.requests))
        self._span(name, ids, parent, attributes, (begun, at), kind=SpanKind.CLIENT, failure=failure * failed)
        self._instruments.model_seconds.record(asked.seconds, common)
        for direction, tokens in (("input", used.input_tokens), ("output", used.output_tokens)):
            if tokens:
                self._instruments.tokens.record(tokens, common | {"gen_ai.token.type": direction})

    def _within(self, id: str, *place: object) -> contexts.Context:
        """Return the context of a run's own span, or of one below it."""
        trace_id, span_id = self._ids_of(id, place)
        parent = SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(1))
        return trace.set_span_in_context(NonRecordingSpan(parent), contexts.Context())

    def _ids_of(self, id: str, place: Sequence[object]) -> tuple[int, int]:
        trace_id, span_id = _ids_of(id, place)
        outer = trace.get_current_span(self._outer).get_span_context() if self._outer is not None else None
        return outer.trace_id if outer is not None and outer.is_valid else trace_id, span_id

    def _span(
        self,
        name: str,
        ids: tuple[int, int],
        parent: contexts.Context | None,
        attributes: Mapping[str, Any],
        times: tuple[int, int],
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        outcome: Outcome | None = None,
        failure: str = "",
        links: Sequence[Link] = (),
    ) -> None:
        """Make a span that has ended."""
        self._ids.following = ids
        within = parent if parent is not None else contexts.Context()
        span = self._tracer.start_span(name, within, kind, attributes, links, times[0])
        if outcome is not None and not outcome.ok and outcome.status is not Status.SKIPPED:
            span.set_attribute("error.type", _reason(outcome))
            span.set_status(SpanStatus(StatusCode.ERROR, outcome.message))
        elif failure:
            span.set_status(SpanStatus(StatusCode.ERROR, failure))
        span.end(times[1])

    def _log(self, recorded: ev.Recorded, run: _Run | None, at: int) -> None:
        event = recorded.event
        document = ev.as_json(recorded)
        step = str(document.get("step") or "")
        begun = run.steps.get(step) if run is not None else None
        place = (step, begun) if begun is not None else ()
        severity = _severity(event)
        attributes: _Attributes = {"runner.run.id": recorded.run, "runner.event.seq": recorded.seq}
        attributes |= {"runner.step.id": step} if step else {}
        attributes |= {"runner.run.name": run.started.name} if run is not None else {}
        self._logger.emit(
            LogRecord(
                timestamp=at,
                observed_timestamp=at,
                context=self._within(recorded.run, *place),
                severity_number=severity,
                severity_text=severity.name,
                body=json.dumps(document, ensure_ascii=False, default=str),
                event_name=f"runner.{type(event).__name__}",
                attributes=attributes,
            )
        )

    async def flush(self) -> TelemetryUnsent | None:
        """Send what waits, for ``FLUSH`` seconds at most; return what was not sent since the last time as a warning."""
        done = False

        def send() -> None:
            for provider in (self._tracers, self._meters, self._loggers):
                provider.force_flush(round(FLUSH * 1_000))

        with trio.move_on_after(FLUSH, shield=True):
            await trio.to_thread.run_sync(send, abandon_on_cancel=True)
            done = True
        failures, self._failures[:] = [*self._failures], []
        if done and not failures:
            return None
        why = failures[-1] if failures else f"no answer for {FLUSH:.0f} s"
        warning = TelemetryUnsent(f"the collector of OpenTelemetry did not take all of it: {why}", hint=_HINT)
        warning.severity = "warning"
        return warning


_HINT = "look at OTEL_EXPORTER_OTLP_ENDPOINT"


class _Run:
    """State of a run that has not ended, for its later spans."""

    def __init__(self, started: ev.RunStarted, at: int) -> None:
        self.started, self.at = started, at
        self.steps: dict[str, int] = {}
        self.agents: dict[str, tuple[str, str]] = {}
        self.requests = 0
        self.attributes: _Attributes = {
            "runner.run.name": started.name,
            "runner.plan.digest": started.plan,
            "runner.project": started.project,
        }


class _Ids(IdGenerator):
    """Ids that were decided before their span is made."""

    following = (1, 1)

    def generate_trace_id(self) -> int:
        return self.following[0]

    def generate_span_id(self) -> int:
        return self.following[1]


class _Instruments:
    def __init__(self, meters: MeterProvider) -> None:
        meter = meters.get_meter(SCOPE, __version__)
        self.runs = meter.create_counter("runner.runs", "{run}", "Runs that have ended")
        histogram = meter.create_histogram
        buckets = {"explicit_bucket_boundaries_advisory": _SECONDS}
        self.run_seconds = histogram("runner.run.duration", "s", "Duration of runs", **buckets)
        self.step_seconds = histogram("runner.step.duration", "s", "Duration of steps", **buckets)
        buckets = {"explicit_bucket_boundaries_advisory": _GEN_AI_SECONDS}
        self.model_seconds = histogram("gen_ai.client.operation.duration", "s", "Duration of model calls", **buckets)
        buckets = {"explicit_bucket_boundaries_advisory": _GEN_AI_TOKENS}
        self.tokens = histogram("gen_ai.client.token.usage", "{token}", "Tokens of model calls", **buckets)


def _ids_of(id: str, place: Sequence[object]) -> tuple[int, int]:
    """Return the trace of a run, and the span of a place in it; none of them is zero."""
    trace_digest, span_digest = (sha256(repr(key).encode()).digest() for key in (id, (id, *place)))
    return int.from_bytes(trace_digest[:16]) or 1, int.from_bytes(span_digest[:8]) or 1


def _reason(outcome: Outcome) -> str:
    return outcome.reason.value if outcome.reason is not None else outcome.status.value


def _ending(outcome: Outcome) -> _Attributes:
    found: _Attributes = {"runner.run.status": outcome.status.value}
    return found | ({"error.type": _reason(outcome)} if not outcome.ok else {})


def _severity(event: ev.Event) -> SeverityNumber:
    match event:
        case ev.WarningIssued() | ev.RetryScheduled() | ev.OomKilled() | ev.ViolationsFound() | ev.ProviderRejected():
            return SeverityNumber.WARN
        case ev.StepEnded(outcome=outcome) | ev.RunEnded(outcome=outcome) if not outcome.ok:
            return SeverityNumber.ERROR
        case ev.ProcessEscaped():
            return SeverityNumber.ERROR
    return SeverityNumber.INFO


def _told(exporter: Any, failures: list[str]) -> Any:
    """Return an exporter whose failures are noted."""
    send: Callable[..., Any] = exporter.export

    def export(*arguments: Any, **options: Any) -> Any:
        result = send(*arguments, **options)
        if result.name != "SUCCESS" and len(failures) < 1_000:
            failures.append(f"{type(exporter).__name__.removeprefix('OTLP')} failed")
        return result

    exporter.export = export
    return exporter


@cache
def telemetry(traceparent: str) -> Telemetry:
    """Return that of this process. Raises ``TelemetryUnusable`` for settings that the SDK does not take."""
    try:
        return Telemetry(traceparent)
    except ValueError as error:
        raise TelemetryUnusable(f"settings of OpenTelemetry cannot be used: {error}") from error
