"""The plan of a run as its directory holds it, typed."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from runner.compiler import read_runs
from runner.core import codec
from runner.core.errors import BadPlanFile
from runner.core.home import PLAN_FILE
from runner.core.sanitize import excerpt
from runner.plan.model import FORMAT, RunPlan
from runner.safefs.safe_open import read_beneath

_MAX_BYTES = 64 << 20


class StoredPlan(Struct, frozen=True):
    """A run's plan, the digest of the plan that it is part of, and ``inputs`` for a run that resumes it."""

    run: RunPlan
    digest: str
    inputs: object


class PlanDocument(Struct, frozen=True):
    """A plan file in JSON form: what each part says is not read yet."""

    format: str
    digest: str = ""
    runs: tuple[object, ...] = ()
    inputs: object = None


def read_document(directory: Path) -> PlanDocument:
    """Read the plan file of the run in a directory. Raises ``BadPlanFile``, also when it is gone."""
    file = directory / PLAN_FILE
    try:
        found = codec.decode(read_beneath(directory, PLAN_FILE, _MAX_BYTES), PlanDocument)
    except OSError as error:
        raise BadPlanFile(f"`{file}` cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise _no_plan(directory, error) from error
    if found.format != FORMAT:
        raise BadPlanFile(f"`{file}` has format `{excerpt(found.format)}`", hint=f"this version reads {FORMAT}")
    return found


def run_of(document: PlanDocument, directory: Path) -> RunPlan:
    """Return the run of a plan file. Raises ``BadPlanFile``."""
    try:
        (run,) = read_runs(document.runs)
    except (ValueError, TypeError, RecursionError) as error:
        raise _no_plan(directory, error) from error
    return run


def read_plan(directory: Path) -> StoredPlan:
    """Read the plan of the run in a directory. Raises ``BadPlanFile``, also when it is gone."""
    found = read_document(directory)
    return StoredPlan(run_of(found, directory), found.digest, found.inputs)


def _no_plan(directory: Path, error: Exception) -> BadPlanFile:
    return BadPlanFile(f"`{directory / PLAN_FILE}` is not the plan of a run: {excerpt(str(error))}")
