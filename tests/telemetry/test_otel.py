"""What a collector of OpenTelemetry hears of runs, and that no run waits for it or fails by it."""

from __future__ import annotations

import json
import time

import pytest
import trio

from runner.core.model import ModelRefusal, Reason, Usage, failed
from runner.events import events as ev
from runner.telemetry import otel
from tests.ops.runs.test_recover import AGENT, kill, run_in_agent
from tests.support.collector import Collector, collecting, values
from tests.support.git_servers import free_port
from tests.support.situations import Project


def named(collector: Collector, name: str) -> object:
    return collector.span(lambda span: span.name == name)


def test_a_run_is_a_trace_of_its_steps_with_metrics_and_logs(project: Project) -> None:
    project.script("echo work > made")
    with collecting() as collector:
        project.env |= collector.env
        run = project.succeed()["id"]

    root, agent = named(collector, "run work"), named(collector, "step agent")
    steps = [span for span in collector.spans if span.name.startswith("step ")]
    assert root.parent_span_id == b""
    assert {span.parent_span_id for span in steps} == {root.span_id}
    assert {span.trace_id for span in collector.spans} == {root.trace_id}
    assert root.start_time_unix_nano <= agent.start_time_unix_nano < agent.end_time_unix_nano <= root.end_time_unix_nano
    assert values(root.attributes) | {"runner.run.id": run, "runner.run.status": "succeeded"} == values(root.attributes)
    assert values(agent.attributes)["runner.step.kind"] == "agent"
    assert collector.resources[0]["service.name"] == "runner"
    assert {"runner.runs", "runner.run.duration", "runner.step.duration"} <= {one.name for one in collector.metrics}
    assert {values(log.attributes)["runner.run.id"] for log in collector.logs} == {run}
    (ended,) = [log for log in collector.logs if log.event_name == "runner.RunEnded"]
    assert json.loads(ended.body.string_value)["exit_code"] == 0
    assert (ended.trace_id, ended.span_id) == (root.trace_id, root.span_id)


def test_calls_of_a_model_are_spans_by_the_conventions_for_genai(project: Project) -> None:
    """Events of the gateway, as it writes them, through the sink: a CLI is not needed for that."""
    from runner.events import events as ev

    def asked(**more: object) -> ev.ModelRequestFinished:
        call = {"step": "agent", "call": "messages", "model": "claude-x", "status": 200, "sent_bytes": 1}
        call |= {"received_bytes": 1, "first_byte_seconds": 0.5, "seconds": 2.0, "usage": Usage(requests=1)}
        return ev.ModelRequestFinished(**(call | more))  # type: ignore[arg-type]

    history = [
        ev.RunStarted(name="fix", plan="sha256:1", runner="1", steps={"agent": "agent"}, deadline_seconds=60.0),
        ev.StepStarted("agent"),
        ev.AgentStarted("agent", ("/usr/bin/claude", "-p"), "2.1"),
        asked(usage=Usage(requests=1, input_tokens=100, output_tokens=20, cached_tokens=60, cost_usd=0.5)),
        asked(status=429),
        asked(status=403, refusal=ModelRefusal.BUDGET, model=""),
        asked(call="models"),
        ev.StepEnded("agent", failed(Reason.BUDGET, "the budget is used up")),
        ev.RunEnded(failed(Reason.BUDGET, "the budget is used up"), 1),
    ]
    with collecting() as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.env["OTEL_EXPORTER_OTLP_ENDPOINT"])
        telemetry = otel.Telemetry("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
        for seq, event in enumerate(history, start=1):
            telemetry(ev.Recorded("r1", seq, 1_700_000_000_000_000 + seq * 1_000_000, event))
        assert trio.run(telemetry.flush) is None

    root, agent = named(collector, "run fix"), named(collector, "invoke_agent claude")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
    assert root.status.code == agent.status.code == 2
    assert values(agent.attributes)["error.type"] == "budget"
    calls = [span for span in collector.spans if span.kind == 3]
    assert [span.name for span in calls] == ["chat claude-x", "chat claude-x", "chat"]
    assert {span.parent_span_id for span in calls} == {agent.span_id}
    first, second, third = (values(span.attributes) for span in calls)
    assert (
        first
        | {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "anthropic",
            "gen_ai.request.model": "claude-x",
            "gen_ai.usage.input_tokens": 100,
            "gen_ai.usage.output_tokens": 20,
            "gen_ai.usage.cache_read.input_tokens": 60,
            "http.response.status_code": 200,
            "runner.cost_usd": 0.5,
        }
        == first
    )
    assert "error.type" not in first
    assert (second["error.type"], third["error.type"]) == ("429", "budget")
    assert calls[0].end_time_unix_nano - calls[0].start_time_unix_nano == 2_000_000_000
    tokens = next(one for one in collector.metrics if one.name == "gen_ai.client.token.usage")
    found = {values(p.attributes)["gen_ai.token.type"]: p.sum for p in tokens.histogram.data_points}
    assert found == {"input": 100, "output": 20}


@pytest.mark.parametrize(
    "fault",
    [pytest.param("away", marks=pytest.mark.nightly), pytest.param("refuses", marks=pytest.mark.nightly), "silent"],
)
def test_a_collector_that_takes_nothing_neither_fails_nor_holds_up_a_run(project: Project, fault: str) -> None:
    project.script("echo work > made")
    with collecting(status=503 if fault == "refuses" else 200, delay=60 if fault == "silent" else 0) as collector:
        project.env |= collector.env
        if fault == "away":
            project.env["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{free_port()}"
        done = project.runner("apply", str(project.folder))

    assert (done.code, "warning[telemetry.unsent]" in done.err) == (0, True), done.err
    assert "Traceback" not in done.err
    assert project.record()["status"] == "succeeded"


@pytest.mark.slow
def test_a_run_whose_runner_was_killed_is_told_by_its_recovery_in_the_same_trace(project: Project) -> None:
    project.script(AGENT)
    with collecting() as collector:
        project.env |= collector.env | {"OTEL_BSP_SCHEDULE_DELAY": "100"}
        with run_in_agent(project) as (runner, run):
            while not any(span.name == "step provision" for span in collector.spans):
                time.sleep(0.05)  # what the runner sends while it lives
            before = {span.span_id for span in collector.spans}
            kill(runner)
            project.runner("recover")

    root = named(collector, "run work")
    assert values(root.attributes)["runner.run.id"] == run
    assert {span.trace_id for span in collector.spans} == {root.trace_id}
    told_twice = [span for span in collector.spans if span.name == "step provision"]
    assert {span.span_id for span in told_twice} <= before
    assert values(named(collector, "step agent").attributes)["runner.step.status"] == "unknown"


def test_nothing_is_told_unless_it_is_asked_for(project: Project) -> None:
    project.script("echo work > made")
    with collecting() as collector:
        project.env["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector.env["OTEL_EXPORTER_OTLP_ENDPOINT"]
        project.succeed()

    assert collector.requests == 0


def test_an_unknown_kind_of_telemetry_is_refused(project: Project) -> None:
    project.env["RUNNER_TELEMETRY"] = "on"

    done = project.runner("runs", "list")

    assert (done.code, "write none or otlp" in done.err) == (2, True)
