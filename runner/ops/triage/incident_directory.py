"""Directory of an incident: which ones are allowed, its ``incident.json``, and where output is copied besides."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runner.core.errors import (
    ForbiddenIncident,
    NoIncident,
    UsageError,
)
from runner.core.sanitize import excerpt
from runner.core.settings import Settings
from runner.ops.planning.files import read_file
from runner.ops.triage.request import MAX_TEXT, TriageRequest
from runner.triage.alert import same_incident
from runner.triage.strict_json import written

PLACES = "triage"  # below the current directory: for new incidents without a named one
# Refused as an incident's directory: the first with everything below, the others themselves.
_SYSTEM = ("/bin", "/boot", "/etc", "/lib", "/lib64", "/proc", "/sbin", "/sys", "/usr")
_SHARED = ("/dev", "/home", "/opt", "/root", "/run", "/srv", "/tmp", "/var", "/var/lib", "/var/log", "/var/tmp")


def new_directory(about: Mapping[str, Any], now: int) -> str:
    """Name a directory that does not exist after the incident's resource or fault, and the time."""
    resource = about.get("resource")
    told = (resource.get("name") if isinstance(resource, Mapping) else resource, about.get("faultType"), "incident")
    slugs = (re.sub(r"[^a-z0-9]+", "-", str(word or "").lower())[:40].strip("-") for word in told)
    time = datetime.fromtimestamp(now / 1e6, UTC).strftime("%Y%m%d-%H%M%S")
    name = f"{next(filter(None, slugs))}-{time}"
    places = (os.path.join(PLACES, name + more) for more in ("", *(f"-{number}" for number in range(2, 100))))
    return next(place for place in places if not os.path.lexists(place))


def incident_directory(text: str | None, settings: Settings) -> Path:
    """Resolve the path of an incident's directory. Raises ``NoIncident``, and ``ForbiddenIncident``."""
    if not text:
        raise NoIncident(
            "an incident workspace directory is required: `-w DIR`",
            hint="describe a new one: runner triage --namespace NAMESPACE --resource deploy/NAME, or --alert FILE",
        )
    directory = Path(os.path.realpath(text))
    if (reason := _forbidden_reason(directory, settings)) is not None:
        raise ForbiddenIncident(f"`{excerpt(text)}` is {reason}", hint="name a directory of the incident's own")
    return directory


def _forbidden_reason(directory: Path, settings: Settings) -> str | None:
    """Say what a directory is that no agent may write to; ``None`` for any other."""
    home = Path(os.path.realpath(settings.home))
    reason = None
    own = Path(os.path.realpath(settings.variables.get("HOME") or "/root"))
    if directory == Path("/"):
        reason = "the root of this host"
    elif directory == home or home in directory.parents:
        reason = "the runner's own state"
    elif directory in home.parents and os.path.isdir(directory):
        reason = "a directory that holds the runner's own state"
    elif any(Path(name) in (directory, *directory.parents) for name in _SYSTEM) or str(directory) in _SHARED:
        reason = "a directory of this host's own system"
    elif directory == own or directory.parent == Path("/home"):
        reason = "a home directory"
    return reason


def output_directory(text: str | None, directory: Path, given_as: Mapping[str, str], settings: Settings) -> Path | None:
    """Resolve the directory that output is copied to; ``None`` for the incident's own. Raises ``UsageError``."""
    if text is None or (place := Path(os.path.realpath(text))) == directory / "output":
        return None
    there = next(above for above in (place, *place.parents) if os.path.lexists(above))
    why = _forbidden_reason(place, settings)
    if why is None and not os.path.isdir(there):
        why = f"below `{excerpt(str(there))}`, which is not a directory" if there != place else "not a directory"
    if why is None and not os.access(there, os.W_OK | os.X_OK):
        why = "not writable for you"
    if why is not None:
        message = f"`{given_as['output_dir']}` is `{excerpt(text)}`, {why}"
        raise UsageError(message, hint="name a directory that is new, or that you can write to")
    return place


def check_log_file(place: Path, given_as: Mapping[str, str]) -> None:
    if place.is_symlink() or (os.path.exists(place) and not os.path.isfile(place)):
        message = f"`{given_as['output_file']}` is `{excerpt(place.name)}`, which exists and is not a file"
        raise UsageError(message, hint="name another; an existing file would be kept under its time")


def check_directory(triage: TriageRequest, written: str, *, required: bool) -> None:
    """Raise ``NoIncident`` unless the directory has the incident or can hold a new one.

    ``written`` is its path as the person wrote it. Unless ``required``, it may be missing.
    """
    directory = triage.directory
    if os.path.exists(directory) and not os.path.isdir(directory):
        raise NoIncident(f"`{excerpt(written)}` is not a directory", hint="name the incident's directory with -w")
    if not os.path.exists(directory) and triage.new_incident is None and required:
        raise NoIncident(
            f"the incident directory `{excerpt(written)}` does not exist",
            hint="add --namespace NAMESPACE --resource KIND/NAME, or --alert FILE, to write a new one",
        )
    if not os.path.isdir(directory.parent) and os.path.dirname(written) != PLACES:
        raise NoIncident(f"`{excerpt(str(directory.parent))}` is not a directory", hint="create it first")
    for place in (directory, directory / "output"):
        own = os.path.isdir(place) and not place.is_symlink()
        if os.path.lexists(place) and not (own and os.access(place, os.W_OK | os.X_OK)):
            message = f"`{excerpt(str(place), 400)}` is not a directory that you can write to"
            raise NoIncident(message, hint="remove the link or file: report and log are written to `output` in -w")
    there = read_known(directory)
    if not there:
        return
    if triage.new_incident is not None and not _describe_same_incident(triage, there):
        hint = "name another directory, or leave out what describes a new incident"
        raise NoIncident(f"`{excerpt(written)}` already has the incident.json of another incident", hint=hint)
    if triage.incident_id is not None and there.get("incidentId") not in (None, "", triage.incident_id):
        message = f"`INCIDENT_ID` is `{excerpt(triage.incident_id)}`, but incident.json has another id"
        raise NoIncident(message, hint="unset INCIDENT_ID, or name that incident's directory")


def read_known(directory: Path) -> Mapping[str, Any]:
    """Read incident.json; empty when it is missing, or invalid: planning reports that."""
    try:
        there = json.loads(read_file(directory / "incident.json", MAX_TEXT))
    except (OSError, ValueError, RecursionError):
        return {}
    return there if isinstance(there, dict) else {}


def _describe_same_incident(triage: TriageRequest, there: Mapping[str, Any]) -> bool:
    """Compare the new incident with the one on disk, so that the same command line may be given again."""
    assert triage.new_incident is not None
    told = {name: value for name, value in triage.new_incident.items() if name != "cluster" or "cluster" in there}
    return same_incident({**there, **told}, there)


@contextmanager
def new_incident_file(triage: TriageRequest) -> Iterator[bool]:
    """Write the new incident's ``incident.json`` for the block, and yield whether it was written.

    An exception removes it again unless a run has written output, so that the corrected command line can be given.
    Raises ``NoIncident``.
    """
    known, output = triage.directory / "incident.json", triage.directory / "output"
    if triage.new_incident is None or os.path.exists(known):
        yield False
        return
    made = [place for place in (output, triage.directory, triage.directory.parent) if not os.path.exists(place)]
    text = written(triage.new_incident) + "\n"
    half = known.with_name(f".incident.json.{os.getpid()}")
    try:
        output.mkdir(parents=True, exist_ok=True)
        try:
            half.write_text(text, encoding="utf-8")
            os.link(half, known)  # whole or not at all, and never over another
        finally:
            half.unlink(missing_ok=True)
    except OSError as error:
        _remove_empty(made)
        hint = "name a directory with -w that you can write to, or a new one in such a directory"
        raise NoIncident(f"`{excerpt(str(known), 400)}` cannot be written: {error.strerror}", hint=hint) from error
    before = os.listdir(output)
    try:
        yield True
    except BaseException:
        if os.path.isdir(output) and {*os.listdir(output)} <= {*before}:
            known.unlink(missing_ok=True)
            _remove_empty(made)
        raise


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()
