"""Looking outside, once, before anything is planned: providers, commits, and the files that manifests name."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import runner.providers
from runner import plugins
from runner.errors import RunnerError, StalePlan
from runner.ports.git import Git
from runner.ports.provider import Probe, Provider
from runner.settings import Settings
from runner.spec.model import CommitFact, ContextFile, Facts
from runner.spec.resolve import Wanted

MAX_FILE = 16 << 20  # bytes of one context file
MAX_FILES = 1_000


def open_provider(name: str, settings: Settings) -> Provider:
    provider: Provider = plugins.load(runner.providers, name).provider(settings)
    return provider


async def gather(wanted: Sequence[Wanted], settings: Settings, git: Git, pinned: Facts | None = None) -> Facts:
    """The Facts of some runs. With ``pinned`` its commits and probes are kept, as long as they still hold.

    What cannot be had is noted in ``missing``, for the resolver to report where the manifest asks for it.
    Raises ``UnknownPlugin`` for a provider that does not exist and ``StalePlan`` for one that became weaker.
    """
    probes: dict[str, Probe] = {}
    commits: dict[str, CommitFact] = {}
    files: dict[str, dict[str, ContextFile]] = {}
    incidents: dict[str, dict[str, object]] = {}
    missing: dict[str, str] = {}
    for want in wanted:
        for name in want.providers:
            if name not in probes:
                probes[name] = _still(await open_provider(name, settings).probe(), pinned)
        if want.checkout is not None:
            try:
                commits[want.run] = await _commit(want, git, pinned)
            except RunnerError as error:
                missing[f"{want.run}/checkout"] = error.message
        try:
            if want.script is not None:
                files[f"{want.run}/script"] = {want.script_name: context_file(want.script)}
        except OSError as error:
            missing[f"{want.run}/script"] = f"`{want.script_name}` can not be read: {error.strerror}"
        if want.incident is not None:
            try:
                found = incident_files(want.incident)
                files[f"{want.run}/incident"] = found
                incidents[want.run] = incident_document(found)
            except (OSError, ValueError) as error:
                missing[f"{want.run}/incident"] = f"`{want.incident.name}`: {getattr(error, 'strerror', None) or error}"
        if gone := absent(want.toolchains):
            missing[f"{want.run}/toolchain"] = f"`{gone[0]}` is not a directory here"
    return Facts(probes, commits, files, incidents, missing)


def absent(directories: Sequence[str]) -> list[str]:
    return [path for path in directories if not os.path.isdir(path)]


def _still(found: Probe, pinned: Facts | None) -> Probe:
    """A provider as planned, if it can still do all that the plan counted on; stronger is fine, weaker is not."""
    planned = pinned.probes.get(found.provider) if pinned is not None else None
    if planned is None or not planned.available:
        return planned or found
    if not found.available:
        raise StalePlan(f"`{found.provider}` is not available any more: {found.reason}", hint=found.hint)
    lost = [feature.value for feature in found.missing if planned.enforces(feature)]
    if found.isolation < planned.isolation:
        lost.append(f"isolation {planned.isolation.word}")
    if lost:
        raise StalePlan(f"`{found.provider}` has lost what the plan counts on: {', '.join(lost)}", hint="plan again")
    return planned


async def _commit(want: Wanted, git: Git, pinned: Facts | None) -> CommitFact:
    assert want.checkout is not None
    path = want.checkout.path
    assert path is not None
    source = await git.inspect(path)
    known = pinned.commits.get(want.run) if pinned is not None else None
    if known is not None:
        await git.resolve(source.top, branch=None, commit=known.commit)  # gone means stale
        return known
    commit = await git.resolve(source.top, branch=want.checkout.branch, commit=want.checkout.commit)
    return CommitFact(commit, want.checkout.branch or source.branch or "work", source.dirty)


def context_file(path: Path) -> ContextFile:
    """A regular file's hash and size, read within bounds and never blocking. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "not a regular file")
        content = file.read(MAX_FILE + 1)
    if len(content) > MAX_FILE:
        raise OSError(0, f"larger than {MAX_FILE >> 20} MiB")
    return ContextFile(path, sha256(content).hexdigest(), len(content))


def incident_files(directory: Path) -> dict[str, ContextFile]:
    """An incident's input files: regular ones, links not followed, what earlier runs put there left out."""
    if not directory.is_dir():
        raise ValueError("not a directory")
    found: dict[str, ContextFile] = {}
    for top, folders, names in os.walk(directory):
        relative = Path(top).relative_to(directory)
        if relative == Path():
            folders[:] = [f for f in folders if f not in ("output", "logs", ".git")]
        folders.sort()
        for name in sorted(names):
            path = Path(top, name)
            if path.is_symlink() or (relative == Path() and name == "prompt-sent.md"):
                continue
            found[str(relative / name)] = context_file(path)
            if len(found) > MAX_FILES:
                raise ValueError(f"more than {MAX_FILES} files")
    return found


def incident_document(files: dict[str, ContextFile]) -> dict[str, object]:
    """``incident.json`` as templates see it; empty when there is none. Raises ``ValueError``."""
    if "incident.json" not in files:
        return {}
    try:
        document = json.loads(files["incident.json"].path.read_bytes())
    except RecursionError:
        raise ValueError("incident.json is nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError("incident.json is not an object")  # noqa: TRY004  # a value of the file, not of a caller
    return document
