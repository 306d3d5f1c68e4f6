"""See ``plan``."""

from __future__ import annotations

from runner.model import Outcome, succeeded
from runner.steps._judge import broken, scan_tree
from runner.steps._run import Run
from runner.steps.scan.plan import Body


async def perform(body: Body, run: Run) -> Outcome:
    result = await scan_tree(run, "scan", body.policies)
    if result.violations:
        return broken(result.violations)
    return succeeded(f"{result.files} files")
