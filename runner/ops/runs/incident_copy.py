"""Copy what a run elsewhere has left into the directory of its incident here, as a run of this host does."""

from __future__ import annotations

from pathlib import Path

from runner.core.errors import HostRefused
from runner.core.sanitize import sanitize
from runner.ops.runs.history import StoredRun
from runner.plan.model import RunPlan
from runner.runtime.incident_files import PROMPT, Delivery
from runner.steps.save.plan import SaveBody


def incident_of(plan: RunPlan) -> Path | None:
    body = plan.body(SaveBody)
    return body.incident if body is not None else None


def bring_to_incident(plan: RunPlan, stored: StoredRun) -> list[str]:
    """Copy prompt, logs and output of a run whose files were fetched, and return what stays behind. Blocking."""
    body = plan.body(SaveBody)
    if body is None or body.incident is None:
        return []
    delivery = Delivery(body.incident, body.member)
    left: list[str] = []
    try:
        if (stored.directory / PROMPT).is_file():
            delivery.put_prompt(stored.directory)
        left += delivery.put_logs(stored.directory / "logs")
        left += delivery.put_output(stored.directory / "output", body.report)
    except HostRefused as error:
        left.append(error.message)
    except OSError as error:
        left.append(f"{error.filename}: {error.strerror}")
    return [sanitize(one) for one in left]
