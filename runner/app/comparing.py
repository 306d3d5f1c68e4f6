"""What differs between a plan and an earlier one: a saved plan, or the last run of each name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.app.history import list_runs
from runner.app.saved import read_document
from runner.errors import BadPlanFile
from runner.plan.diff import Change, diff
from runner.plan.model import Plan, run_document
from runner.report.plan import Compared
from runner.settings import Settings


async def compare(plan: Plan, settings: Settings, against: Path | None) -> Sequence[Compared]:
    """The changes since the plan in ``against``, or else since the last run of each of the plan's runs.

    A run that has never been carried out is one change. Raises ``BadPlanFile`` for ``against``.
    """
    if against is not None:
        return [Compared(str(against), tuple(diff(read_document(against), plan.document())))]
    last: dict[str, str] = {}
    for row in await list_runs(settings):
        last.setdefault(row.name, row.id)
    compared = []
    for run in plan.runs:
        if run.name in last:
            old = _last(settings, last[run.name])
            compared.append(Compared(f"run {last[run.name]}", tuple(diff(old, {"runs": [run_document(run)]}))))
        else:
            compared.append(Compared(None, (Change("+", run.name, None, None, run.origin),)))
    return compared


def _last(settings: Settings, run: str) -> dict[str, object]:
    """The plan of a run; one whose directory is gone or of another format had nothing."""
    try:
        return read_document(settings.home / "runs" / run / "plan.json")
    except BadPlanFile:
        return {"runs": []}
