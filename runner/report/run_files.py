"""All that reports of a run are made from: its record, and what its directory says besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runner.core.model import CheckKind, Status, Usage, Violation
from runner.events.record import RunRecord
from runner.policy.paths import PathPolicy


@dataclass(frozen=True)
class Ceiling:
    """One of a run's policies, with the place where it is written."""

    name: str
    origin: str
    paths: PathPolicy


@dataclass(frozen=True)
class Account:
    """A run as reports see it. What nobody knows any more is empty.

    ``group`` is shared by the members of a matrix; ``incident`` is a directory. ``origins`` maps the run (the empty
    name) and its steps to ``file:line`` of the manifest that asked for them. ``tails`` has the last lines that steps
    printed, of those that did not succeed. ``networks`` is what each step may reach.
    """

    record: RunRecord
    directory: Path
    group: str = ""
    agent: str = ""
    model: str = ""
    incident: str = ""
    origins: Mapping[str, str] = field(default_factory=dict)
    tails: Mapping[str, Sequence[str]] = field(default_factory=dict)
    networks: Mapping[str, str] = field(default_factory=dict)
    ceilings: Sequence[Ceiling] = ()

    def rule_of(self, violation: Violation) -> str:
        """The policy that a violation breaks, and where that is written; empty when no policy decided it."""
        for one in self.ceilings:
            allowed = ", ".join(one.paths.allowed)
            verdict = one.paths.judge(violation.path)
            if violation.rule == verdict.rule:
                says = f" allows {allowed}" if verdict.rule == "not-allowed" else ""
                return f"policy {one.name}{says}, {one.origin}"
        return ""


def blamed(record: RunRecord) -> str | None:
    """The step that decided that a run did not succeed: the first that went wrong."""
    wrong = (name for name, step in record.steps.items() if step.outcome is not None and not step.outcome.ok)
    return next(wrong, None) if record.status is not Status.SUCCEEDED else None


def used(record: RunRecord) -> Usage:
    """What the gateway counted of all models; else what the agent says of itself."""
    if record.models:
        return sum(record.models.values(), Usage())
    return record.reported_usage or Usage()


def sections(record: RunRecord) -> tuple[int, int] | None:
    """How many of the sections that its report has to have are there; ``None`` when none has to be."""
    wanted = [check.ok for checks in record.checks.values() for check in checks if check.kind is CheckKind.SECTION]
    return (sum(wanted), len(wanted)) if wanted else None


def report_bytes(record: RunRecord) -> int | None:
    """The size of the first report that was looked at and was there."""
    found = (check.size_bytes for checks in record.checks.values() for check in checks)
    return next((size for size in found if size is not None), None)
