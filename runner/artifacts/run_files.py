"""The content of a run's directory for its reports: where it was requested, and the end of its steps' output."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from runner.artifacts.layout import write
from runner.artifacts.stored_plan import read_plan
from runner.core.errors import BadPlanFile, RunnerError
from runner.events.record import RunRecord
from runner.policy.paths import PathPolicy
from runner.report.compare import document, groups, markdown, row_of
from runner.report.run_files import Account, Ceiling
from runner.safefs.safe_open import open_beneath
from runner.spec.model import PolicySpec
from runner.steps.agent.plan import AgentBody
from runner.steps.save.plan import SaveBody
from runner.steps.scan.plan import ScanBody

TAIL_LINES = 50
TAIL_BYTES = 16 << 10
STREAMS = ("stdout", "stderr")


def read_account(record: RunRecord, directory: Path) -> Account:
    """Read everything that reports of a run are made from; a directory that is gone adds nothing."""
    tails = {name: tail for name in _unsuccessful(record) if (tail := (*_tail(record, directory, name),))}
    try:
        plan = read_plan(directory).run
    except BadPlanFile:
        return Account(record=record, directory=directory, group=record.name, origins={"": ""}, tails=tails)
    agent, save, scan = plan.body(AgentBody), plan.body(SaveBody), plan.body(ScanBody)
    return Account(
        record=record,
        directory=directory,
        group=plan.group,
        agent=agent.agent if agent is not None else "",
        model=agent.model.name if agent is not None and agent.model is not None else "",
        incident=str(save.incident) if save is not None and save.incident is not None else "",
        origins={"": plan.origin, **{step.id: step.origin for step in plan.steps}},
        networks={step.id: step.network for step in plan.steps},
        ceilings=[_ceiling_of(policy) for policy in scan.policies] if scan is not None else [],
        tails=tails,
    )


def _ceiling_of(policy: PolicySpec) -> Ceiling:
    paths = PathPolicy(policy.allowed_paths, policy.forbidden_patterns, policy.max_file_size)
    return Ceiling(policy.name, policy.origin, paths)


def _unsuccessful(record: RunRecord) -> Iterator[str]:
    return (name for name, step in record.steps.items() if step.outcome is not None and not step.outcome.ok)


def _tail(record: RunRecord, directory: Path, step: str) -> Iterator[str]:
    for printed in log_tails(record, directory, step):
        yield from printed.decode(errors="replace").splitlines()[-TAIL_LINES:]


def log_tails(record: RunRecord, directory: Path, step: str) -> Iterator[bytes]:
    """Yield the end of what a step printed to each of its streams, the first line of which may be cut: that of the
    command that failed it, if known.
    """
    failure = record.steps[step].failure
    spans = (failure.stdout, failure.stderr) if failure is not None else (None, None)
    for stream, span in zip(STREAMS, spans, strict=True):
        try:
            descriptor = open_beneath(directory, f"logs/{step}.{stream}")
        except (OSError, RunnerError):
            yield b""
            continue
        with open(descriptor, "rb") as file:
            size = os.fstat(descriptor).st_size
            begin, end = span or (0, size)
            cut = max(0, end - size)  # of a log that is too long its end is kept
            file.seek(max(0, begin - cut, end - cut - TAIL_BYTES))
            yield file.read(end - cut - file.tell())


def write_comparisons(accounts: Sequence[Account]) -> None:
    """Write the comparison of a matrix, ``comparison.json`` and ``comparison.md``, beside the record of each member."""
    for members in groups(accounts).values():
        rows = [row_of(account) for account in members]
        for directory in (account.directory for account in members if account.directory.is_dir()):
            write(directory / "comparison.json", json.dumps(document(rows), indent=1, ensure_ascii=False))
            write(directory / "comparison.md", markdown(rows).rstrip("\n"))
