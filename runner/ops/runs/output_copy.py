"""A copy of an incident run's output at the place that its triage names (``--output-dir``).

The place stands in the run's plan, so that whoever ends the run can make the copy: the triage itself, ``resume``, or
``recover`` for a runner that was killed. The place is the user's, and an agent chooses names: no file that is there is
lost, none but those that every triage has is replaced, and no name that begins with a dot goes there.
"""

from __future__ import annotations

import filecmp
import os
from collections.abc import Set
from pathlib import Path

from runner.artifacts.stored_plan import read_plan
from runner.core.errors import BadPlanFile
from runner.events.record import RunRecord
from runner.ops.planning.files import read_file
from runner.ops.planning.plan_inputs import read_inputs
from runner.ops.runs.header import header_of
from runner.runtime.incident_files import keep_earlier
from runner.safefs import trees
from runner.spec.preload import FILES
from runner.steps.preload.run import REPORT as BASELINE

RIGHTS = FILES["permissions"]
MAX_LOG = 1 << 28  # bytes of a log that is copied


def copy_output(directory: Path, record: RunRecord) -> list[str]:
    """Copy output and log of the run in ``directory`` to where its person asked; return what was not copied, and why.

    A run that was not asked to has nothing copied. An existing report or log that differs is renamed by its time (UTC).
    Blocking.
    """
    try:
        plan = read_plan(directory)
        request, report = read_inputs(plan).request, header_of(plan.run).report
    except BadPlanFile:  # gone, or of another version
        return []
    log = Path(record.log) if record.log is not None else None
    behind: list[str] = []
    if request.output_dir is not None and (directory / "output").is_dir():
        behind = _copy_output(directory / "output", Path(request.output_dir), {report, BASELINE, RIGHTS})
    if log is None or (request.output_dir is None and request.output_file is None):
        return behind
    place = Path(request.output_dir) if request.output_dir is not None else log.parent
    return behind + _copy_log(log, place / (request.output_file or log.name))


def _copy_output(kept: Path, place: Path, usual: Set[str]) -> list[str]:
    """Copy the files of the output; ``usual`` are those that every triage has."""
    names = [str(path.relative_to(kept)) for path in sorted(kept.rglob("*")) if path.is_file()]
    hidden = {name for name in names if name.startswith(".")}
    taken = {name for name in names if name not in usual and _differs(kept / name, place / name)}
    behind = [f"{name!r}: its name begins with a dot" for name in sorted(hidden)]
    behind += [f"{name!r}: another file is there" for name in sorted(taken - hidden)]
    try:
        for name in sorted(usual & {*names}):
            if not (place / name).parent.is_symlink():
                behind += keep_earlier(place / name, kept / name)
        return behind + trees.copy_out(kept, place, but=hidden | taken, to_people=True)
    except OSError as error:
        return [*behind, f"{place}: {error.strerror}"]


def _differs(new: Path, there: Path) -> bool:
    if not os.path.lexists(there):
        return False
    known = there.is_file() and not there.is_symlink() and os.access(there, os.R_OK)
    return not known or not filecmp.cmp(new, there, shallow=False)


def _copy_log(log: Path, to: Path) -> list[str]:
    if to.is_symlink():
        return [f"{to}: it is a link"]
    half = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        content = read_file(log, MAX_LOG, os.O_NOFOLLOW)
        to.parent.mkdir(parents=True, exist_ok=True)
        behind = keep_earlier(to, log)
        try:
            half.write_bytes(content)
            half.replace(to)
        finally:
            half.unlink(missing_ok=True)
    except OSError as error:
        return [f"{to}: {error.strerror}"]
    return behind
