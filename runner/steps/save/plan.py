"""Keep the work before anything is torn down: the patch and the snapshot's name."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from runner.plan.model import Step
from runner.spec.model import Facts, PolicySpec, RunSpec

NEEDS: tuple[tuple[str, ...], ...] = ()


class SaveBody(Struct, frozen=True, kw_only=True):
    """The run's output is delivered to the folder ``output`` of ``incident``; ``None`` keeps it in the run.

    ``report`` is the one that is verified, of which an earlier one is kept; ``member`` is as in ``RunSpec``.
    """

    message: str
    policies: tuple[PolicySpec, ...]
    incident: Path | None
    member: str = ""
    report: str = ""


BODY = SaveBody


def plan(spec: RunSpec, facts: Facts, needs: tuple[str, ...]) -> Step:
    report = spec.verify.report if spec.verify is not None else None
    return Step(
        id="save",
        kind="save",
        routine=True,
        what="patch and outputs",
        phase="finalize",
        needs=needs,
        deadline_seconds=spec.stop_budget_seconds,
        origin=spec.origins["finalize"],
        body=SaveBody(
            message=spec.message,
            policies=spec.policies,
            incident=spec.incident,
            member=spec.member,
            report=report.path if report is not None else "",
        ),
        when="ended",
    )
