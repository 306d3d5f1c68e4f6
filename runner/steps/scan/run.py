"""See ``plan``."""

from __future__ import annotations

from runner.model import Outcome, Reason, failed, succeeded
from runner.steps._judge import scan_tree
from runner.steps._run import Run
from runner.steps.scan.plan import Body


async def perform(body: Body, run: Run) -> Outcome:
    result = await scan_tree(run, "scan", body.policies)
    if result.violations:
        count = len(result.violations)
        text = f"{count} violation{'s' * (count != 1)}: {result.violations[0]}"
        return failed(Reason.POLICY, text, details=tuple(str(v) for v in result.violations))
    return succeeded(f"{result.files} files")
