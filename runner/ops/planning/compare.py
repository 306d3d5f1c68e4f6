"""Differences between a plan and an earlier one: a saved plan, or the last run of each name from these manifests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from runner.core.errors import BadPlanFile
from runner.core.home import run_directory
from runner.core.settings import Settings
from runner.ops.host.state import read_state
from runner.ops.planning.files import texts_of
from runner.ops.planning.make_plan import PlanResult
from runner.ops.planning.plan_file import read_document
from runner.plan.diff import Change, diff
from runner.plan.model import run_document
from runner.report.plan import PlanComparison


async def compare(planned: PlanResult, settings: Settings, against: Path | None) -> Sequence[PlanComparison]:
    """Compare a plan with the one in ``against``, or else with the last run of each of its runs.

    Runs of another folder's manifests do not count, since every repository may have a run of that name. A run that was
    never started is one change. Raises ``BadPlanFile`` for ``against``.
    """
    plan, manifests = planned.plan, planned.path.resolve()
    if against is not None:
        old = read_document(against)
        new = texts_of(planned.facts, *(run.name for run in plan.runs))
        return [PlanComparison(str(against), _changes(old, old.get("texts"), plan.document(), new))]
    async with read_state(settings) as store:
        runs = {run.name: [row.id for row in await store.runs(name=run.name)] for run in plan.runs}
    compared = []
    for run in plan.runs:
        last = next(_plans(settings, runs[run.name], manifests), None)
        if last is not None:
            id, old = last
            new = texts_of(planned.facts, run.name)
            changes = _changes(old, old["inputs"].get("texts"), {"runs": [run_document(run)]}, new)
            compared.append(PlanComparison(f"run {id}", changes))
        else:
            compared.append(PlanComparison(None, (Change("+", run.name, None, None, run.origin),)))
    return compared


def _changes(
    old: Mapping[str, Any], old_texts: object, new: Mapping[str, Any], new_texts: Mapping[str, str]
) -> tuple[Change, ...]:
    """Return the changes, those of files with both texts; the old texts come from a file and may be anything."""
    known = old_texts if isinstance(old_texts, dict) else {}

    def text(file: object, texts: Mapping[str, Any]) -> str | None:
        found = texts.get(str(file["sha256"])) if isinstance(file, dict) else ""
        return found if isinstance(found, str) else None

    return tuple(
        replace(change, texts=(text(change.old, known), text(change.new, new_texts))) if change.is_of_file else change
        for change in diff(old, new)
    )


def _plans(settings: Settings, runs: Iterable[str], manifests: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the runs' plans that were made from these manifests: the same file or folder, or one inside the other."""
    for id in runs:
        try:
            document = read_document(run_directory(settings.home, id) / "plan.json")
            made_from = Path(document["inputs"]["manifests"])
        except (BadPlanFile, KeyError, TypeError):
            continue  # gone, or of another version
        if made_from.is_relative_to(manifests) or manifests.is_relative_to(made_from):
            yield id, document
