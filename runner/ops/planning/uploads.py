"""Manifests and plans that a server was sent or has made, kept below ``RUNNER_HOME`` for their runs and ``resume``.

Equal contents are one folder or file; gc goes by their latest use.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from secrets import token_hex

from runner.core.codec import digest
from runner.core.errors import BadRequest, Place, RunnerError, StoreFailed, UnknownPlan
from runner.core.sanitize import excerpt
from runner.core.settings import Settings
from runner.ops.planning.make_plan import PlanResult
from runner.ops.planning.plan_file import save

MANIFESTS, PLANS = "uploads", "plans"  # in the home
MOST_FILES = 200
MOST_BYTES = 4 << 20  # of all files of a request
_NAME = re.compile(r"(?!.*(^|/)\.\.?(/|$))[A-Za-z0-9._-]{1,100}(/[A-Za-z0-9._-]{1,100}){0,7}")
_ID = re.compile(r"[0-9a-f]{32}")


def store_manifests(files: Mapping[str, str], settings: Settings) -> Path:
    """Store the texts of files as a folder of manifests, which is a repository of its own. Raises ``BadRequest``."""
    for name in files:
        if not _NAME.fullmatch(name) or ".git" in name.lower().split("/"):
            hint = "letters, digits, `.`, `_` and `-`, in folders if need be"
            raise BadRequest(f"`{excerpt(name)}` cannot be the name of a file here", hint=hint)
    content = {name: text.encode() for name, text in files.items()}
    if not files or len(files) > MOST_FILES or sum(map(len, content.values())) > MOST_BYTES:
        hint = f"send 1 to {MOST_FILES} files of {MOST_BYTES >> 20} MiB together"
        raise BadRequest(f"`manifests` has {len(files)} files", hint=hint)
    whole = settings.home / MANIFESTS / digest(files).removeprefix("sha256:")[:32]
    half = whole.with_name(f".{token_hex(8)}")
    try:
        if not whole.is_dir():
            for name, raw in content.items():
                path = half / ".runner" / name
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                path.write_bytes(raw)
            (half / ".git").touch()  # the top: nothing above it is of these manifests
            half.replace(whole)
        os.utime(whole)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise BadRequest("a name is that of a file and of a folder", hint="rename one of them") from error
    except OSError as error:
        if not whole.is_dir():  # where another request was faster
            raise StoreFailed(f"`{whole}` cannot be written: {error.strerror}", hint="free some space") from error
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return whole / ".runner"


def store_plan(planned: PlanResult, settings: Settings) -> str:
    """Store a plan, and return the id that ``find_plan`` takes. Raises ``BadPlanFile``."""
    folder = settings.home / PLANS
    folder.mkdir(exist_ok=True, mode=0o700)
    half = folder / f".{token_hex(8)}.json"
    save(planned, half)
    id = sha256(half.read_bytes()).hexdigest()[:32]
    half.replace(folder / f"{id}.json")
    return id


def find_plan(id: str, settings: Settings) -> Path:
    """Return the file of a stored plan. Raises ``UnknownPlan``."""
    path = settings.home / PLANS / f"{id}.json"
    if not _ID.fullmatch(id) or not path.is_file():
        raise UnknownPlan(f"there is no plan `{excerpt(id)}`", hint="make one: POST /api/v1/plans")
    os.utime(path)
    return path


def shown(finding: RunnerError, manifests: Path) -> RunnerError:
    """Return a finding with the places that whoever sent the manifests knows."""
    before = f"{manifests}/"

    def known(place: Place) -> Place:
        return place._replace(file=place.file.removeprefix(before))

    finding.at = known(finding.at) if finding.at else None
    finding.also = tuple(map(known, finding.also))
    finding.message = finding.message.replace(before, "")
    return finding
