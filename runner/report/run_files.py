"""Account of a run: its record and the facts from its directory that reports use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from runner.core.model import CheckKind, Status, Usage, Violation
from runner.events.record import RunRecord
from runner.policy.paths import PathPolicy


class Ceiling(Struct, frozen=True):
    """One of a run's policies, with the line that defines it."""

    name: str
    origin: str
    paths: PathPolicy


class Account(Struct, frozen=True, kw_only=True):
    """A run as reports see it. Unknown values are empty.

    ``group`` is shared by the members of a matrix; ``incident`` is a directory. ``origins`` maps the run (the empty
    name) and its steps to the ``file:line`` of the manifest. ``tails`` has the last output lines of steps that did not
    succeed. ``networks`` is what each step may reach.
    """

    record: RunRecord
    directory: Path
    group: str = ""
    agent: str = ""
    model: str = ""
    incident: str = ""
    origins: Mapping[str, str] = {}
    tails: Mapping[str, Sequence[str]] = {}
    networks: Mapping[str, str] = {}
    ceilings: Sequence[Ceiling] = ()

    def rule_of(self, violation: Violation) -> str:
        """Return the policy that a violation breaks, and the line of its rule; empty when no policy decided."""
        for one in self.ceilings:
            allowed = ", ".join(one.paths.allowed)
            verdict = one.paths.judge(violation.path)
            if violation.rule == verdict.rule:
                says = f" allows {allowed}" if verdict.rule == "not-allowed" else ""
                return f"policy {one.name}{says}, {one.origin}"
        return ""


def blamed(record: RunRecord) -> str | None:
    """Return the first step that went wrong, which decided that the run failed."""
    wrong = (name for name, step in record.steps.items() if step.outcome is not None and not step.outcome.ok)
    return next(wrong, None) if record.status is not Status.SUCCEEDED else None


def used(record: RunRecord) -> Usage:
    """Return the usage of all models that the gateway counted; else what the agent reports."""
    if record.models:
        return sum(record.models.values(), Usage())
    return record.reported_usage or Usage()


def sections(record: RunRecord) -> tuple[int, int] | None:
    """Count the required sections that the report has; ``None`` when none is required."""
    wanted = [check.ok for checks in record.checks.values() for check in checks if check.kind is CheckKind.SECTION]
    return (sum(wanted), len(wanted)) if wanted else None


def report_bytes(record: RunRecord) -> int | None:
    """Return the size of the first report that was found."""
    found = (check.size_bytes for checks in record.checks.values() for check in checks)
    return next((size for size in found if size is not None), None)
