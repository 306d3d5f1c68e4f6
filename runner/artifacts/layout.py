"""A run's directory: ``plan.json``, ``events.jsonl`` as they happen, ``run.json`` and the report at the end.

The journal is the truth; these are copies that can be read, archived and deleted without the product.
"""

from __future__ import annotations

import json
from pathlib import Path
from shutil import rmtree
from typing import TextIO

from runner.events import Recorded, RunEnded, as_json
from runner.plan.model import FORMAT, RunPlan, run_document
from runner.record import RunRecord
from runner.report.json import record_document
from runner.report.text import render_run

ESCAPED = "backslashreplace"  # of a name that is not UTF-8: in JSON, its bytes as Python reads them


class RunFiles:
    """Writes one run's files; as a sink, it appends each event."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, mode=0o700)
        (directory / "logs").mkdir()
        self._events: TextIO = (directory / "events.jsonl").open("x", encoding="utf-8", errors=ESCAPED)

    def discard(self) -> None:
        """Remove the directory of a run that never started."""
        self._events.close()
        rmtree(self.directory)

    def write_plan(self, plan: RunPlan, digest: str) -> None:
        document = {"format": FORMAT, "digest": digest, "runs": [run_document(plan)]}
        _write(self.directory / "plan.json", json.dumps(document, indent=1, ensure_ascii=False))

    def __call__(self, recorded: Recorded) -> None:
        self._events.write(json.dumps(as_json(recorded), ensure_ascii=False) + "\n")
        self._events.flush()
        if isinstance(recorded.event, RunEnded):
            self._events.close()

    def write_record(self, record: RunRecord) -> None:
        _write(self.directory / "run.json", json.dumps(record_document(record), indent=1, ensure_ascii=False))
        _write(self.directory / "report.txt", render_run(record, self.directory))


def _write(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8", errors=ESCAPED)
