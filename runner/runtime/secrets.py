"""Secrets of the current step: given to its commands, and searched for in what it leaves.

A variable is part of one command's environment. A file lies in the memory of one sandbox, which ends with the step: see
``engine.run``.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

import trio

from runner.core.errors import ProviderFailed
from runner.core.model import Violation
from runner.core.redact import GZIP, Redactor, Secret
from runner.core.sanitize import printable_path
from runner.plan.model import SecretGrant
from runner.ports.git import Change
from runner.ports.provider import Workspace
from runner.runtime.context import RunContext
from runner.safefs import safe_open

FOLDER = "/dev/shm/secrets"  # in memory on every provider that has a guest
_WRITE = 'umask 077 && mkdir -p "${1%/*}" && rm -f "$1" && umask 377 && cat > "$1"'
_CHUNK = 1 << 20


def given_to(run: RunContext, step: str) -> tuple[SecretGrant, ...]:
    """Return the secrets of a step; no other step's commands get them."""
    return next((one.secrets for one in run.plan.steps if one.id == step), ())


async def variables(run: RunContext, workspace: Workspace) -> dict[str, str]:
    """Write the secret files of the current step, and return its secret variables.

    Raises ``ProviderFailed`` when a file cannot be written.
    """
    found: dict[str, str] = {}
    for given in given_to(run, run.step.step):
        found |= await give(workspace, given.name, run.secrets[given.name], as_file=given.as_file)
    return found


async def give(workspace: Workspace, name: str, secret: Secret, *, as_file: bool) -> dict[str, str]:
    """Return the variable of a secret, with its file written. Raises ``ProviderFailed``."""
    value = secret.reveal()
    if not as_file:
        return {name: os.fsdecode(value.rstrip(b"\r\n"))}
    path = f"{FOLDER}/{name}"
    written = await workspace.run(["sh", "-c", _WRITE, "sh", path], stdin=value)
    if not written.exit.ok:
        raise ProviderFailed(f"secret `{name}` cannot be written inside: sh {written.exit}")
    return {f"{name}_FILE": path}


async def leaks(redactor: Redactor, tree: Path, changes: Sequence[Change]) -> tuple[Violation, ...]:
    """Find changed files of a quiet tree that contain a secret, in their names, contents, or link targets."""
    if not redactor:
        return ()
    wanted = [change for change in changes if change.entry is not None]
    return await trio.to_thread.run_sync(partial(_leaks, redactor, tree, wanted))


def _leaks(redactor: Redactor, tree: Path, changes: Iterable[Change]) -> tuple[Violation, ...]:
    found: list[Violation] = []
    for change in changes:
        trio.from_thread.check_cancelled()
        found += _judged(redactor, tree, os.fsdecode(change.path), "")
    return tuple(found)


def _judged(redactor: Redactor, root: Path, path: str, prefix: str) -> Iterator[Violation]:
    """Judge an entry's name and content; one that cannot be read counts as a violation."""
    shown = f"{prefix}{printable_path(path)}"
    try:
        names = redactor.names_in(os.fsencode(path)) | _shown(redactor, root, path)
    except OSError as error:
        yield Violation(shown, "unreadable", error.strerror or "")
    else:
        yield from (Violation(shown, f"secret:{name}") for name in sorted(names))


async def output_leaks(redactor: Redactor, output: Path) -> tuple[Violation, ...]:
    """Find files and folders of a quiet output directory that contain a secret."""
    return await trio.to_thread.run_sync(_output_leaks, redactor, output) if redactor else ()


def _output_leaks(redactor: Redactor, output: Path) -> tuple[Violation, ...]:
    found: list[Violation] = []
    for folder, folders, names in os.walk(output):
        for name in sorted((*folders, *names)):
            trio.from_thread.check_cancelled()
            path = os.path.relpath(os.path.join(folder, name), output)
            found += _judged(redactor, output, path, "/output/")
    return tuple(found)


async def shown_by(redactor: Redactor, root: Path, path: str) -> list[str]:
    """Return the names of the secrets in a file of our own."""
    return sorted(await trio.to_thread.run_sync(_shown, redactor, root, path)) if redactor else []


def _shown(redactor: Redactor, root: Path, path: str) -> frozenset[str]:
    """Return the names of the secrets in a file or link target; of anything else, none."""
    above, _, name = path.rpartition("/")
    holder = safe_open.open_beneath(root, above or ".")
    try:
        kind = os.stat(name, dir_fd=holder, follow_symlinks=False).st_mode
        if stat.S_ISLNK(kind):
            return redactor.names_in(os.fsencode(os.readlink(name, dir_fd=holder)))
    finally:
        os.close(holder)
    if not stat.S_ISREG(kind):
        return frozenset()
    stream = redactor.stream()
    with open(safe_open.open_beneath(root, path), "rb") as file:
        while chunk := file.read(_CHUNK):
            trio.from_thread.check_cancelled()
            stream.feed(chunk)
        stream.end()
        with suppress(ValueError):  # of an archive that nobody can search it is known only that it is one
            stream.found |= _packed(redactor, file)
    return frozenset(stream.found)


def _packed(redactor: Redactor, file: IO[bytes]) -> frozenset[str]:
    """Return the names of the secrets in an archive. Raises ``ValueError`` when it cannot be searched."""
    file.seek(0)
    head = file.read(len(GZIP))
    file.seek(0)
    return redactor.names_packed(file, trio.from_thread.check_cancelled) if head == GZIP else frozenset()


def redact_files(redactor: Redactor, folder: Path) -> list[str]:
    """Redact secrets in copied files and their names, in place. Blocking. Returns which file had which secret.

    A folder whose path contains one is moved to the redacted path, with a number where another has that name. Archives
    that contain one, or cannot be searched, are removed.
    """
    if not redactor:
        return []
    said: list[str] = []
    emptied: set[Path] = set()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        relative = os.fsencode(path.relative_to(folder))
        cleaned = os.fsdecode(redactor.clean(relative))
        if why := _refused(redactor, path):
            path.unlink()
            said.append(f"output {printable_path(cleaned)} is left out: an archive {why}")
            continue
        stream = redactor.stream()
        half = path.with_name(f".{os.urandom(4).hex()}")
        with path.open("rb") as old, half.open("xb") as new:
            while chunk := old.read(_CHUNK):
                trio.from_thread.check_cancelled()
                new.write(stream.feed(chunk))
            new.write(stream.end())
        half.chmod(path.stat().st_mode)
        path.unlink()
        to = folder / cleaned
        number = 1
        while to.exists():
            number += 1
            to = folder / f"{cleaned}~{number}"
        to.parent.mkdir(parents=True, exist_ok=True)
        half.rename(to)
        if to != path:
            emptied.add(path.parent)
        said += _said(cleaned, stream.found | redactor.names_in(relative))
    for path in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):  # from within outwards
        relative = os.fsencode(path.relative_to(folder))
        found = redactor.names_in(relative)
        if (found or path in emptied) and not any(path.iterdir()):
            path.rmdir()
            said += _said(os.fsdecode(redactor.clean(relative)), found) if path not in emptied else []
            emptied.add(path.parent)
    return said


def _refused(redactor: Redactor, path: Path) -> str | None:
    """Return why an archive is not kept."""
    try:
        with path.open("rb") as file:
            found = _packed(redactor, file)
    except ValueError as error:
        return str(error)
    return f"that shows secret {', '.join(sorted(found))}" if found else None


def _said(cleaned: str, found: Iterable[str]) -> list[str]:
    return [f"output {printable_path(cleaned)} showed secret {name}; it was taken out" for name in sorted(found)]
