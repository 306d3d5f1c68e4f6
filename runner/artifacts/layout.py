"""A run's directory: ``plan.json``, ``events.jsonl`` as they happen, the report and ``run.json`` at the end.

The journal is the truth; these are copies that can be read, archived and deleted without the product. ``run.json`` is
written last and whole: where it is, everything is, except the comparison of a matrix, which waits for all its members.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from shutil import rmtree
from typing import TextIO

from runner.artifacts.history import ESCAPED, FILE, add_events, event_line
from runner.artifacts.run_lock import create_locked
from runner.core.codec import plain
from runner.core.home import PLAN_FILE
from runner.events.events import Recorded, RunEnded
from runner.events.record import RunRecord
from runner.plan.model import FORMAT, RunPlan, run_document
from runner.report.json import record_document
from runner.report.text import render_run


class RunFiles:
    """Writes one run's files; as a sink, it appends each event. Keeps the run locked until its record is written.

    ``clean`` removes secrets from the plan; events and record are clean already.
    """

    def __init__(self, directory: Path, clean: Callable[[str], str] = str) -> None:
        self.directory = directory
        self._clean = clean
        self._held = create_locked(directory)
        (directory / "logs").mkdir()
        self._events: TextIO = (directory / FILE).open("x", encoding="utf-8", errors=ESCAPED)

    def discard(self) -> None:
        """Remove the directory of a run that never started."""
        self._events.close()
        rmtree(self.directory)
        os.close(self._held)

    def write_plan(self, plan: RunPlan, digest: str, inputs: object, rehearsal: str | None = None) -> None:
        """``inputs`` of the plan are for a run that resumes this one; ``rehearsal`` is that of the record."""
        played = {} if rehearsal is None else {"rehearsal": rehearsal}
        document = {"format": FORMAT, **played, "digest": digest, "runs": [run_document(plan)], "inputs": plain(inputs)}
        write(self.directory / PLAN_FILE, self._clean(json.dumps(document, indent=1, ensure_ascii=False)))

    def __call__(self, recorded: Recorded) -> None:
        self._events.write(event_line(recorded) + "\n")
        self._events.flush()
        if isinstance(recorded.event, RunEnded):
            self._events.close()

    def write_record(self, record: RunRecord) -> None:
        _write_end(self.directory, record)
        os.close(self._held)


def write_copies(directory: Path, history: Iterable[Recorded], record: RunRecord) -> None:
    """Write the files of a run that has ended, from its journal, in place of its runner."""
    write(directory / FILE, "\n".join(map(event_line, history)))
    _write_end(directory, record)


def rewrite_end(directory: Path, news: Iterable[Recorded], record: RunRecord) -> None:
    """Add events that follow the end of a run, and write its report and record anew."""
    add_events(directory, list(news))
    _write_end(directory, record)


def is_finished(directory: Path) -> bool:
    """Tell whether the files of a run are complete, and say that nothing of it was left behind."""
    try:
        return not json.loads((directory / "run.json").read_text(encoding="utf-8"))["left_behind"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # damaged is as good as missing: it is written anew
        return False


def _write_end(directory: Path, record: RunRecord) -> None:
    write(directory / "report.txt", render_run(record, directory))
    write(directory / "run.json", json.dumps(record_document(record), indent=1, ensure_ascii=False))


def write(path: Path, text: str) -> None:
    """Write a file and its final line break, all at once."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text + "\n", encoding="utf-8", errors=ESCAPED)
    part.replace(path)
