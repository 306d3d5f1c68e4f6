"""Differences between a plan and an earlier one: a saved plan, or the last run of each name from these manifests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from runner.artifacts.stored_plan import PlanDocument, read_document, run_of
from runner.core.codec import typed
from runner.core.errors import BadPlanFile
from runner.core.home import run_directory
from runner.core.settings import Settings
from runner.ops.host.state import read_state
from runner.ops.planning.files import texts_of
from runner.ops.planning.make_plan import PlanResult
from runner.plan.diff import Change, diff
from runner.plan.model import RunPlan, run_document
from runner.report.plan import PlanComparison


class Compared(Struct, frozen=True):
    """Runs to compare with others, and the ``texts`` of their scripts and agents files by hash."""

    runs: tuple[RunPlan, ...]
    texts: Mapping[str, str]


class _Origin(Struct, frozen=True):
    """The part of ``PlanInputs`` that comparing needs."""

    manifests: Path
    texts: Mapping[str, str]


async def compare(planned: PlanResult, settings: Settings, against: Path | None) -> Sequence[PlanComparison]:
    """Compare a plan with the one in ``against``, or else with the last run of each of its runs.

    Runs of another folder's manifests do not count, since every repository may have a run of that name. A run that was
    never started is one change. Raises ``BadPlanFile`` for ``against``.
    """
    plan, manifests = planned.plan, planned.path.resolve()
    if against is not None:
        from runner.ops.planning.plan_file import read_compared

        old = Compared(*read_compared(against))
        new = Compared(plan.runs, texts_of(planned.facts, *(run.name for run in plan.runs)))
        return [PlanComparison(str(against), _changes(old, new))]
    async with read_state(settings) as store:
        runs = {run.name: [row.id for row in await store.runs(name=run.name)] for run in plan.runs}
    compared = []
    for run in plan.runs:
        new = Compared((run,), texts_of(planned.facts, run.name))
        earlier = ((id, _since(run_directory(settings.home, id), new, manifests)) for id in runs[run.name])
        last = next(((id, changes) for id, changes in earlier if changes is not None), None)
        if last is not None:
            id, changes = last
            compared.append(PlanComparison(f"run {id}", changes))
        else:
            compared.append(
                PlanComparison(None, (Change(sign="+", where=run.name, old=None, new=None, origin=run.origin),))
            )
    return compared


def _changes(old: Compared, new: Compared) -> tuple[Change, ...]:
    """Return the changes, those of files with both texts."""

    def text(file: object, texts: Mapping[str, str]) -> str | None:
        return texts.get(str(file["sha256"])) if isinstance(file, dict) else ""

    return tuple(
        replace(change, texts=(text(change.old, old.texts), text(change.new, new.texts)))
        if change.is_of_file
        else change
        for change in diff(old.runs, new.runs)
    )


def _since(directory: Path, new: Compared, manifests: Path) -> tuple[Change, ...] | None:
    """Compare a run with the one in a directory, if that one was made from these manifests, else return ``None``.

    So it was if the file or folder of one is that of the other, or inside it. A plan that is gone, or of another
    version, was not.
    """
    try:
        document = read_document(directory)
        origin = _origin(document)
        if not (origin.manifests.is_relative_to(manifests) or manifests.is_relative_to(origin.manifests)):
            return None
        if document.runs == tuple(map(run_document, new.runs)):
            return ()  # as most are: what is the same need not be understood
        return _changes(Compared((run_of(document, directory),), origin.texts), new)
    except BadPlanFile:
        return None


def _origin(document: PlanDocument) -> _Origin:
    try:
        return typed(document.inputs, _Origin)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadPlanFile("the plan does not say what it was made from") from error
