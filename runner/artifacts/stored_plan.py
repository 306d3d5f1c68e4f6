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


class _Document(Struct, frozen=True):
    format: str
    digest: str = ""
    runs: tuple[object, ...] = ()
    inputs: object = None


def read_plan(directory: Path) -> StoredPlan:
    """Read the plan of the run in a directory. Raises ``BadPlanFile``, also when it is gone."""
    file = directory / PLAN_FILE
    try:
        found = codec.decode(read_beneath(directory, PLAN_FILE, _MAX_BYTES), _Document)
        if found.format != FORMAT:
            message = f"`{file}` has format `{excerpt(found.format)}`"
            raise BadPlanFile(message, hint=f"this version reads {FORMAT}")
        (run,) = read_runs(found.runs)
    except OSError as error:
        raise BadPlanFile(f"`{file}` cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise BadPlanFile(f"`{file}` is not the plan of a run: {excerpt(str(error))}") from error
    return StoredPlan(run, found.digest, found.inputs)
