"""The copy of a run in a store of artifacts: how it is sent while the run lives and when it has ended, and read back.

Files are kept in parts, objects that are named by the offset and the SHA-256 of what they hold, so that sending again
does nothing, and each part is checked when it is read. A log that grows is sent part by part, and whoever follows it
elsewhere lists what is new. ``contents.json`` is written last: where it is, everything is. Its own digest goes into the
journal, which thereby vouches for all files.

Names of files were chosen by agents, among others: an object's name has one only if it is plain. Blocking.
"""

from __future__ import annotations

import os
import stat
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from msgspec import Struct

from runner.core import codec
from runner.core.errors import ArtifactsDamaged
from runner.core.home import PLAN_FILE
from runner.core.patterns import pattern
from runner.core.sanitize import excerpt
from runner.ports.artifacts import MAX_OBJECT, ArtifactStore, is_name
from runner.safefs.safe_open import open_beneath

if TYPE_CHECKING:
    from multiprocessing.pool import AsyncResult

FORMAT = "runner/artifacts/v1"
CONTENTS = "contents.json"
RUNS = "runs/"
INPUTS = "incident"  # the folder with what the agent was told of an incident
_AT_ONCE = 8  # objects that are on their way
_PLAIN = pattern(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_LONGEST = 400  # characters of a file's name that an object's has
_PART = pattern(r"([0-9a-f]{16})-([0-9a-f]{64})")


class Part(Struct, frozen=True):
    """A stretch of a file, and the name of its object below the run's folder."""

    object: str
    size: int
    sha256: str


class StoredFile(Struct, frozen=True):
    """A file of a run; ``name`` is relative to its directory."""

    name: str
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


class Contents(Struct, frozen=True):
    """All files of a run that has ended. A name that is not UTF-8 has its bytes escaped as Python does."""

    run: str
    files: tuple[StoredFile, ...]
    format: str = FORMAT

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


class SentCopy(Struct, frozen=True):
    """A whole copy, and the SHA-256 of its ``contents.json``."""

    contents: Contents
    sha256: str


class Interrupted(Exception):
    """Sending was stopped."""


def folder_of(run: str) -> str:
    return f"{RUNS}{run}/"


def _parts_folder(name: str) -> str:
    """Return the folder of a file's parts, relative to that of the run."""
    plain = _PLAIN.fullmatch(name) is not None and len(name) <= _LONGEST
    return f"parts/{name if plain else '~' + sha256(os.fsencode(name)).hexdigest()}/"


def _part(name: str, offset: int, content: bytes) -> Part:
    digest = sha256(content).hexdigest()
    return Part(f"{_parts_folder(name)}{offset:016x}-{digest}", len(content), digest)


class GrowingFiles:
    """Sends what is added to some files of a run, and that a step has ended once all that it printed is there."""

    def __init__(self, store: ArtifactStore, run: str, directory: Path) -> None:
        self._store, self._folder, self._directory = store, folder_of(run), directory
        self._sent: dict[str, int] = defaultdict(int)

    def send(self, ended: Collection[str]) -> bool:
        """Send what is new; ``ended`` are steps of which this was the last. Return whether there was anything."""
        names = [PLAN_FILE, *sorted(f"logs/{path.name}" for path in (self._directory / "logs").glob("*"))]
        news = [self._send_rest(name) for name in names]
        for step in ended:
            if is_name(marker := f"{self._folder}ended/{step}"):
                self._store.put(marker, b"")
        return any(news)

    def send_text(self, name: str, content: bytes) -> None:
        """Send a small file that is not in the directory."""
        self._store.put(self._folder + _part(name, 0, content).object, content)

    def _send_rest(self, name: str) -> bool:
        news = False
        try:
            descriptor = open_beneath(self._directory, name)
        except OSError:  # not there yet
            return False
        with open(descriptor, "rb") as file:
            file.seek(self._sent[name])
            while content := file.read(MAX_OBJECT):
                self._store.put(self._folder + _part(name, self._sent[name], content).object, content)
                self._sent[name] += len(content)
                news = True
        return news


def send_run(
    store: ArtifactStore,
    run: str,
    directory: Path,
    added: Mapping[str, Path],
    *,
    moved: Callable[[], None],
    stopped: Callable[[], bool],
) -> SentCopy:
    """Send all files of a run that has ended, and then their list; parts that are there are not sent again.

    ``added`` are further files by their name in the copy. ``moved`` is called after each part. Raises ``Interrupted``
    soon after ``stopped``, and what the store raises; whatever was sent stays, for the next time.
    """
    from multiprocessing.pool import ThreadPool  # most runs send no files

    folder = folder_of(run)
    known = _known_parts(store, folder)

    def put(part: Part, content: bytes) -> None:
        if stopped():
            raise Interrupted
        store.put(folder + part.object, content)
        moved()

    files: list[StoredFile] = []
    with ThreadPool(_AT_ONCE) as threads:  # unlike executors', its threads do not hold up the end of a process
        waiting: deque[AsyncResult[None]] = deque()
        for name, path in sorted({**_files_of(directory), **added}.items(), key=lambda one: os.fsencode(one[0])):
            parts = []
            with _open(directory, path) as file:
                for part, content in _cut(name, file, known.get(_parts_folder(name), ())):
                    parts.append(part)
                    if content is not None:
                        waiting.append(threads.apply_async(put, (part, content)))
                    while len(waiting) > _AT_ONCE:
                        waiting.popleft().get()
            files.append(StoredFile(name, tuple(parts)))
        for each in waiting:
            each.get()
    contents = Contents(run, (*files, *_inputs(known)))
    text = codec.encode(contents)
    for number in reversed(range(0, len(text), MAX_OBJECT)):  # the first is the mark of a whole copy
        put(Part(_contents_name(number), 0, ""), text[number : number + MAX_OBJECT])
    return SentCopy(contents, sha256(text).hexdigest())


def _contents_name(offset: int) -> str:
    return f"{CONTENTS}.{offset // MAX_OBJECT}" if offset else CONTENTS


def _files_of(directory: Path) -> dict[str, Path]:
    """List the regular files of a directory by their names in it."""
    return {
        os.path.relpath(path, directory): Path(path)
        for folder, _, names in os.walk(directory)
        for name in names
        if stat.S_ISREG(os.lstat(path := os.path.join(folder, name)).st_mode) and not _is_unfinished(name)
    }


def _is_unfinished(name: str) -> bool:
    return name.startswith(".") and name.endswith(".part")


def _open(directory: Path, path: Path) -> BinaryIO:
    """Open a file, one below the directory through no link."""
    if path.is_relative_to(directory):
        return open(open_beneath(directory, str(path.relative_to(directory))), "rb")
    return path.open("rb")


def _known_parts(store: ArtifactStore, folder: str) -> dict[str, list[Part]]:
    """List the parts that are there, by the folder of their file, ordered by offset."""
    found: dict[str, list[Part]] = defaultdict(list)
    for one in store.list(f"{folder}parts/"):
        name = one.name.removeprefix(folder)
        above, _, last = name.rpartition("/")
        if match := _PART.fullmatch(last):
            found[f"{above}/"].append(Part(name, one.size, match[2]))
    return found


def _cut(name: str, file: BinaryIO, known: Sequence[Part]) -> Iterator[tuple[Part, bytes | None]]:
    """Cut a file into parts, with the content of those that are to be sent; where they are known, they are used."""
    offset = 0
    by_offset = {part.object.rpartition("/")[2][:16]: part for part in known if part.size <= MAX_OBJECT}
    while True:
        there = by_offset.get(f"{offset:016x}")
        content = file.read(there.size if there is not None and there.size else MAX_OBJECT)
        part = _part(name, offset, content)
        if there is not None and part != there:  # what was there is of another content, such as of an earlier attempt
            file.seek(offset)
            content = file.read(MAX_OBJECT)
            part = _part(name, offset, content)
        if not content and offset:
            return
        yield part, None if part == there else content
        offset += len(content)
        if not content:  # an empty file has one empty part
            return


def _inputs(known: Mapping[str, Sequence[Part]]) -> Iterator[StoredFile]:
    """Yield the inputs that were sent when the run began; each has one part."""
    for folder, parts in known.items():
        name = folder.removeprefix("parts/").rstrip("/")
        if name.startswith(f"{INPUTS}/") and len(parts) == 1:
            yield StoredFile(name, tuple(parts))


def read_contents(store: ArtifactStore, run: str, expected: str | None) -> Contents:
    """Read the list of a whole copy; ``expected`` is the SHA-256 that the journal has for it.

    Raises ``ArtifactsMissing`` when there is no whole copy, and ``ArtifactsDamaged``.
    """
    folder, text, piece = folder_of(run), b"", None
    while piece is None or len(piece) == MAX_OBJECT:
        piece = store.get(folder + _contents_name(len(text)))
        text += piece
    if expected is not None and sha256(text).hexdigest() != expected:
        raise ArtifactsDamaged(
            f"the list of run `{run}` in {store.url} is not the one that the journal vouches for",
            hint="its files may have been replaced: look at who may write there",
        )
    try:
        contents = codec.decode(text, Contents)
    except ValueError as error:
        raise ArtifactsDamaged(f"the list of run `{run}` in {store.url}: {excerpt(str(error))}") from error
    if contents.format != FORMAT or contents.run != run:
        told = f"format `{excerpt(contents.format)}`, run `{excerpt(contents.run)}`"
        raise ArtifactsDamaged(f"the list of run `{run}` in {store.url} has another {told}")
    return contents


def fetch_files(
    store: ArtifactStore, contents: Contents, into: Path, wanted: Callable[[str], bool], *, stopped: Callable[[], bool]
) -> None:
    """Write files of a copy below a directory of their own; those that are there already are compared.

    Raises ``ArtifactsDamaged`` for a file that is not what its run wrote, or a name that leads out.
    """
    for file in contents.files:
        if wanted(file.name):
            _fetch(store, folder_of(contents.run), file, into, stopped)


def _fetch(store: ArtifactStore, folder: str, file: StoredFile, into: Path, stopped: Callable[[], bool]) -> None:
    path = _place(into, file.name)
    if _is_there(path, file):
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    half = path.with_name(f".{sha256(os.fsencode(path.name)).hexdigest()[:16]}.part")
    try:
        with half.open("wb") as target:
            for part in file.parts:
                if stopped():
                    raise Interrupted
                target.write(_checked(store, folder, part))
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def _place(into: Path, name: str) -> Path:
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise ArtifactsDamaged(f"`{excerpt(name)}` is no name of a file of a run")
    return into.joinpath(*parts)


def _is_there(path: Path, file: StoredFile) -> bool:
    try:
        with path.open("rb") as there:
            return os.fstat(there.fileno()).st_size == file.size and all(
                sha256(there.read(part.size)).hexdigest() == part.sha256 for part in file.parts
            )
    except OSError:
        return False


def _checked(store: ArtifactStore, folder: str, part: Part) -> bytes:
    if not is_name(part.object):
        raise ArtifactsDamaged(f"`{excerpt(part.object)}` of {store.url} is no name of an object")
    content = store.get(folder + part.object)
    if len(content) != part.size or sha256(content).hexdigest() != part.sha256:
        hint = "it was changed after the run; another copy may be on the host that it ran on"
        raise ArtifactsDamaged(f"`{folder}{part.object}` of {store.url} is not what the run wrote", hint=hint)
    return content


class GrowingCopy:
    """Reads what a run sends while it lives into a directory of its own."""

    def __init__(self, store: ArtifactStore, run: str, into: Path) -> None:
        self._store, self._folder, self._into = store, folder_of(run), into
        self._offsets: dict[str, int] = defaultdict(int)

    def fetch(self) -> None:
        """Add what is new to ``plan.json`` and the logs."""
        for above in ("parts/plan.json/", "parts/logs/"):
            for one in list(self._store.list(self._folder + above)):
                self._add(one.name.removeprefix(self._folder), one.size)

    def _add(self, name: str, size: int) -> None:
        above, _, last = name.rpartition("/")
        file = above.removeprefix("parts/")
        match = _PART.fullmatch(last)
        if match is None or file.startswith("~") or int(match[1], 16) != self._offsets[file]:
            return
        path = _place(self._into, file)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.open("ab" if self._offsets[file] else "wb") as target:
            target.write(_checked(self._store, self._folder, Part(name, size, match[2])))
        self._offsets[file] += size

    def ended(self) -> set[str]:
        """Return the steps of which everything is there."""
        above = f"{self._folder}ended/"
        return {one.name.removeprefix(above) for one in self._store.list(above)}


def remove_run(store: ArtifactStore, run: str) -> int:
    """Remove all that a store has of a run, the mark of a whole copy first; return the bytes."""
    folder = folder_of(run)
    found = sorted(store.list(folder), key=lambda one: one.name != folder + CONTENTS)
    store.remove(one.name for one in found)
    return sum(one.size for one in found)
