"""A collector of OpenTelemetry for tests: it takes OTLP over HTTP, and decodes it by the official package."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.http_servers import Handler, serving_http


class Collector:
    """What has arrived. ``status`` is the answer to each request, which comes after ``delay`` seconds."""

    def __init__(self, *, status: int = 200, delay: float = 0.0) -> None:
        self.spans: list[Any] = []
        self.logs: list[Any] = []
        self.metrics: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.requests = 0
        self.status, self.delay = status, delay
        self.port = 0

    @property
    def env(self) -> dict[str, str]:
        return {"RUNNER_TELEMETRY": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}"}

    def take(self, path: str, body: bytes) -> None:
        match path:
            case "/v1/traces":
                for one in ExportTraceServiceRequest.FromString(body).resource_spans:
                    self.resources.append(values(one.resource.attributes))
                    self.spans += [span for scope in one.scope_spans for span in scope.spans]
            case "/v1/metrics":
                for one in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                    self.metrics += [metric for scope in one.scope_metrics for metric in scope.metrics]
            case "/v1/logs":
                for one in ExportLogsServiceRequest.FromString(body).resource_logs:
                    self.logs += [record for scope in one.scope_logs for record in scope.log_records]

    def span(self, wanted: Callable[[Any], bool]) -> Any:
        (found,) = [span for span in self.spans if wanted(span)]
        return found


def values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextmanager
def collecting(**options: Any) -> Iterator[Collector]:
    collector = Collector(**options)

    class Receiver(Handler):
        def do_POST(self) -> None:
            body = self.heard()
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.requests += 1
            time.sleep(collector.delay)
            if collector.status == 200:
                collector.take(self.path, body)
            with suppress(OSError):
                self.tell(status=collector.status)

    with serving_http(Receiver) as collector.port:
        yield collector
