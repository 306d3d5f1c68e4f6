"""What a run's directory says to its reports: where it was asked for, and the end of what its steps printed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from runner.artifacts.layout import write
from runner.beneath import open_beneath
from runner.errors import RunnerError
from runner.record import RunRecord
from runner.report.account import Account
from runner.report.compare import document, groups, markdown, row_of

TAIL_LINES = 50
TAIL_BYTES = 16 << 10
STREAMS = ("stdout", "stderr")


def account_of(record: RunRecord, directory: Path) -> Account:
    """Everything that reports of a run are made from. A directory that is gone, or has other files, says nothing."""
    plan = _plan(directory)
    steps: list[dict[str, Any]] = plan.get("steps", [])
    bodies: dict[str, dict[str, Any]] = {step["kind"]: step["body"] for step in steps}
    agent = bodies.get("agent", {})
    return Account(
        record,
        directory,
        group=plan.get("group", record.name),
        agent=agent.get("agent", ""),
        model=(agent.get("model") or {}).get("name", ""),
        incident=bodies.get("save", {}).get("incident") or "",
        origins={"": plan.get("origin", ""), **{step["id"]: step["origin"] for step in steps}},
        tails={name: tail for name in _unsuccessful(record) if (tail := tuple(_tail(directory, name)))},
    )


def _plan(directory: Path) -> dict[str, Any]:
    try:
        (plan,) = json.loads((directory / "plan.json").read_text(encoding="utf-8"))["runs"]
    except FileNotFoundError:
        return {}
    return dict(plan)


def _unsuccessful(record: RunRecord) -> Iterator[str]:
    return (name for name, step in record.steps.items() if step.outcome is not None and not step.outcome.ok)


def _tail(directory: Path, step: str) -> Iterator[str]:
    """The last lines of both streams, the first of which may be cut."""
    for stream in STREAMS:
        try:
            descriptor = open_beneath(directory, f"logs/{step}.{stream}")
        except (OSError, RunnerError):
            continue
        with open(descriptor, "rb") as file:
            file.seek(max(0, os.fstat(descriptor).st_size - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).decode(errors="replace").splitlines()[-TAIL_LINES:]
        yield from lines


def write_comparisons(accounts: Sequence[Account]) -> None:
    """Beside the record of each member of a matrix, how all of them did: ``comparison.json`` and ``comparison.md``."""
    for members in groups(accounts).values():
        rows = [row_of(account) for account in members]
        for directory in (account.directory for account in members if account.directory.is_dir()):
            write(directory / "comparison.json", json.dumps(document(rows), indent=1, ensure_ascii=False))
            write(directory / "comparison.md", markdown(rows).rstrip("\n"))
