"""Files beside manifests: scripts, skills, and those in an incident's directory.

People on call drop anything into that directory, so only ``incident.json`` can be an error there. Large files are
identified by size and time instead of content, and files that no agent can get are left out, with a note.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from heapq import nsmallest
from pathlib import Path

from runner.core.errors import UnknownReference, nearest
from runner.core.sanitize import excerpt
from runner.core.settings import shipped
from runner.safefs.safe_open import read_beneath
from runner.spec.model import AGENTS_FILE, ContextFile, Facts
from runner.spec.preload import FILES
from runner.triage.incident import FILE as INCIDENT_FILE
from runner.triage.incident import read_incident

MAX_FILE = 16 << 20  # bytes of a file that is taken by content
MAX_TEXT = 64 << 10  # bytes of a file whose text is kept, so that a later plan can be compared with it
MAX_READ = 256 << 20  # bytes of all files of an incident that are taken by content
MAX_FILES = 1_000  # of an incident that are taken by content
MAX_TOP = 100  # entries at the top with such files: each is a mount, and what 1,000 take grows with their square
MOST_FILES = 10_000  # of an incident that are taken at all, directories counted
MOST_BYTES = 2 << 30  # of all that are taken
_NAMED = 3  # of what is left out

_NOT_INPUT = ("output", "logs", ".git", "prompt-sent.md")  # at the top of an incident's directory: of earlier runs


def read_file(path: Path, limit: int, flags: int = 0) -> bytes:
    """Read a regular file without blocking. Raises ``OSError``, also above ``limit`` bytes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | flags)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit >> 20} MiB")
    return content


def context_file(path: Path) -> ContextFile:
    """Return a regular file's hash and size. Raises ``OSError``, also for a link."""
    content = read_file(path, MAX_FILE, os.O_NOFOLLOW)
    return ContextFile(path=path, sha256=sha256(content).hexdigest(), size=len(content))


def texts_of(facts: Facts, *runs: str) -> dict[str, str]:
    """Return scripts and ``AGENTS.md`` of some runs by hash, so that a later plan can show what changed.

    Leaves out what is large or not text, or has changed since it was planned.
    """
    texts: dict[str, str] = {}
    for file in (file for run in map(facts.of, runs) for file in (run.script, run.agents_file) if file is not None):
        with suppress(OSError, UnicodeDecodeError):
            content = read_file(file.path, MAX_TEXT, os.O_NOFOLLOW)
            if sha256(content).hexdigest() == file.sha256 and b"\0" not in content:
                texts[file.sha256] = content.decode()
    return texts


def incident_texts(files: Mapping[str, ContextFile], most: int) -> dict[str, str]:
    """Return the files of an incident by hash, for a host that does not have them.

    Leaves out what is not text, has changed since it was planned, and what goes beyond ``most`` bytes together.
    """
    texts: dict[str, str] = {}
    for file in files.values():
        if not file.whole or file.size > most:
            continue
        with suppress(OSError, UnicodeDecodeError):
            content = read_file(file.path, file.size, os.O_NOFOLLOW)
            if sha256(content).hexdigest() == file.sha256 and b"\0" not in content:
                texts[file.sha256] = content.decode()
                most -= file.size
    return texts


def agents_file(root: Path) -> ContextFile | None:
    """Return the ``AGENTS.md`` of a project, if any. Raises ``OSError``, and ``ValueError`` for a link."""
    try:
        content = read_beneath(root, AGENTS_FILE, MAX_FILE)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("it is a symbolic link, and none is followed") from error
        raise
    return ContextFile(path=root / AGENTS_FILE, sha256=sha256(content).hexdigest(), size=len(content))


def skill_files(name: str) -> dict[str, ContextFile]:
    """Return the files of an installed skill, by their paths below its name.

    Raises ``UnknownReference``, and ``OSError`` and ``ValueError`` for a file that cannot be read.
    """
    folder = shipped("skills")
    known = [path.parent.name for path in folder.glob("*/SKILL.md")]
    if name not in known:
        raise UnknownReference(f"`{name}` is not a skill of this installation", hint=nearest(name, known))
    return {f"{name}/{inner}": file for inner, file in incident_files(folder / name)[0].items()}


def incident_files(directory: Path) -> tuple[dict[str, ContextFile], str]:
    """Return the files in an incident's directory by name, top level first, and a sentence about those left out.

    Links are not followed, and output of earlier runs is skipped. Raises ``OSError``, and ``ValueError`` for what is
    not a directory and for an ``incident.json`` that cannot be read.
    """
    if not os.path.isdir(directory):
        raise ValueError("not a directory")
    look = _Look(directory)
    waiting = deque([""])
    while waiting:
        waiting += look.into(waiting.popleft())
    return dict(sorted(look.files.items())), look.words()


class _Look:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.files: dict[str, ContextFile] = {}
        self._left: list[str] = []
        self._top: set[str] = set()
        self._seen = self._whole = self._read = self._bytes = 0

    def into(self, folder: str) -> list[str]:
        """Take the files of a folder, and return its subfolders."""
        room = MOST_FILES - self._seen
        try:
            with os.scandir(self._directory / folder) as entries:
                inner = nsmallest(room + 1, (e for e in entries if f"{folder}{e.name}" not in _NOT_INPUT), key=_place)
        except OSError as error:
            if not folder:
                raise
            self._leave(folder, error)
            return []
        if len(inner) > room:
            self._left.append(f"`{excerpt(folder + inner.pop().name)}` and what follows (beyond {MOST_FILES} files)")
        self._seen += len(inner)
        folders = []
        for entry in inner:
            name = f"{folder}{entry.name}"
            if entry.is_dir(follow_symlinks=False) and name.isprintable() and name != INCIDENT_FILE:
                folders.append(f"{name}/")
                continue
            try:
                self.files[name] = self._file(name)
            except OSError as error:
                self._leave(name, error)
        return folders

    def _leave(self, name: str, error: OSError) -> None:
        if name == INCIDENT_FILE:
            raise ValueError(f"its `{name}`: {error.strerror}") from error
        self._left.append(f"`{excerpt(name)}` ({error.strerror})")

    def _file(self, name: str) -> ContextFile:
        """Return a file as a fact. Raises ``OSError`` with the reason why it is left out."""
        if not name.isprintable():
            raise OSError(errno.EINVAL, "a name that is not plain text")
        path = self._directory / name
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode):
            raise OSError(errno.ELOOP, "a link, and none is followed")
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "a directory" if stat.S_ISDIR(found.st_mode) else "not a regular file")
        if self._bytes + found.st_size > MOST_BYTES:
            raise OSError(errno.EFBIG, f"beyond {MOST_BYTES >> 30} GiB")
        self._bytes += found.st_size
        top = name.split("/", 1)[0]
        room = self._whole < MAX_FILES and (top in self._top or len(self._top) < MAX_TOP)
        if room and found.st_size <= min(MAX_FILE, MAX_READ - self._read):
            self._top.add(top)
            self._whole += 1
            self._read += found.st_size
            return context_file(path)
        if name == INCIDENT_FILE:
            raise OSError(errno.EFBIG, f"larger than {MAX_FILE >> 20} MiB")
        state = f"{found.st_size} bytes of {found.st_mtime_ns}"
        return ContextFile(path=path, sha256=sha256(state.encode()).hexdigest(), size=found.st_size, whole=False)

    def words(self) -> str:
        more = f" and {len(self._left) - _NAMED} more" if len(self._left) > _NAMED else ""
        return ", ".join(self._left[:_NAMED]) + more


def _place(entry: os.DirEntry[str]) -> tuple[bool, str]:
    """Sort key: files that are put into the prompt come first."""
    return entry.name not in FILES.values(), entry.name


def incident_document(files: dict[str, ContextFile]) -> dict[str, object]:
    """Return the incident for templates; empty without an ``incident.json``. Raises ``OSError`` and ``ValueError``."""
    file = files.get(INCIDENT_FILE)
    return read_incident(read_file(file.path, MAX_FILE)) if file is not None else {}
