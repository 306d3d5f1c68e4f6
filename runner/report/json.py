"""JSON of a run's record: ``run.json`` and ``runs show --output json``."""

from __future__ import annotations

from runner.core.codec import plain
from runner.events.record import RunRecord, StepRecord
from runner.plan.model import Json

FORMAT = "runner/run/v1"


def record_document(record: RunRecord) -> Json:
    """Convert a record to JSON; times are microseconds since the epoch, UTC."""
    snapshot = record.snapshot
    return {
        "format": FORMAT,
        "id": record.id,
        "name": record.name,
        "open_network": list(record.open_network),
        "plan": record.plan,
        "key": record.key,
        "resumes": record.resumes,
        "rehearsal": record.rehearsal,
        "status": record.status.value,
        "exit_code": record.exit_code,
        "outcome": plain(record.outcome),
        "job": plain(record.placed),
        "waits": record.waits,
        "attempt": record.attempt,
        "provider": record.provider,
        "isolation": plain(record.isolation),
        "observed": plain(record.observed),
        "pool": {"slot": record.slot, "miss": plain(record.pool_miss)},
        "models": {name: plain(usage) for name, usage in record.models.items()},
        "reported_usage": plain(record.reported_usage),
        "cluster": plain(record.cluster),
        "network": plain(list(record.network.values())),
        "mcp_servers": dict(record.mcp_servers),
        "mcp_calls": plain(list(record.mcp.values())),
        "argv": list(record.argv),
        "version": record.version,
        "commands": plain(record.commands),
        "log": record.log,
        "preloaded": plain(record.preloaded),
        "deadline_seconds": record.deadline_seconds,
        "started": record.started,
        "ended": record.ended,
        "cancelled_by": record.cancelled_by,
        "steps": [_step(name, step) for name, step in record.steps.items()],
        "rejected_providers": [
            {"provider": provider, "reason": reason} for provider, reason in record.rejected_providers
        ],
        "warnings": [{"code": code, "message": message} for code, message in record.warnings],
        "violations": plain(record.violations),
        "checks": {step: plain(checks) for step, checks in record.checks.items()},
        "snapshot": plain(snapshot),
        "commits": plain(record.commits),
        "saved_work": plain(record.saved_work),
        "artifacts": plain(record.artifacts),
        "left_behind": list(record.left_behind),
    }


def _step(name: str, step: StepRecord) -> Json:
    return {
        "id": name,
        "kind": step.kind,
        "status": step.status.value,
        "reused": step.reused,
        "started": step.started,
        "ended": step.ended,
        "outcome": plain(step.outcome),
        "stopped": [
            {"at": at, "stage": reached.stage.value, "reason": reached.reason.value} for at, reached in step.stop_stages
        ],
    }
