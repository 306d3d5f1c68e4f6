"""Replace files of a user's checkout: all of them, or none.

Theory of operation. Everything to be written is prepared in ``<git directory>/runner-apply``: a hard link to each old
file, each new file with its bytes on the disk, and a journal that lists each operation with the state of its path
before and after. Renames then perform the list. Removing the journal commits the change. An error or a cancellation
before that undoes everything; after a kill or a power cut the folder is still there, and the next use of the checkout
undoes it first. Old files come back as themselves: the same inode, bytes, mode and times. A file that somebody changed
in between is never touched: the error names it, and the folder with the old files stays.

All paths are reached by descriptors, one component at a time, and no link is followed. Nothing can exclude another
program that writes a file between the last look at it and the rename, a few microseconds later.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trio.from_thread import check_cancelled

from runner.core.errors import ApplyInterrupted, PatchConflict, UnsafePath, WouldOverwrite
from runner.core.locks import try_flock
from runner.core.sanitize import printable_path
from runner.git import disk
from runner.git.tree import EXECUTABLE, LINK
from runner.policy.names import judge_name, parents
from runner.ports.git import TreeEntry
from runner.safefs import trees

FOLDER = "runner-apply"
_JOURNAL = "journal.json"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Identity = tuple[int, int, int]  # inode, size, time of the last change of content in nanoseconds


@dataclass(frozen=True)
class Replacement:
    """A path whose file changes: ``old`` is its status now, ``mode`` git's mode of the new file; ``None``: no file."""

    path: bytes
    old: os.stat_result | None
    mode: int | None


@dataclass(frozen=True)
class _JournalEntry:
    """A journal entry. ``what`` is unlink, rmdir, mkdir or place; ``mode`` is that of a removed directory."""

    what: str
    path: str
    number: int = 0
    mode: int = 0
    was: Identity | None = None
    now: Identity | None = None

    @property
    def raw(self) -> bytes:
        return os.fsencode(self.path)


def check_not_interrupted(git: Path) -> None:
    """Raise ``ApplyInterrupted`` when an apply is under way here, or was interrupted."""
    if (git / FOLDER).exists():
        raise ApplyInterrupted(
            f"an apply is under way in `{git}`, or was interrupted",
            hint="`runner runs apply` without --check undoes an interrupted one",
        )


@contextmanager
def locked(git: Path, top: Path) -> Iterator[Path]:
    """Lock the folder of one change for the length of the block, and remove it; an interrupted change is undone first.

    Raises ``ApplyInterrupted`` when another process has the lock, or when somebody changed a file that is to be undone.
    """
    folder = git / FOLDER
    held = _lock(folder)
    try:
        roll_back(top, folder)
        _make_folders(folder)
        try:
            yield folder
        finally:
            if not (folder / _JOURNAL).exists():
                trees.remove(folder)
    finally:
        os.close(held)


def _lock(folder: Path) -> int:
    while True:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            held = os.open(folder, _DIRECTORY)
        except FileNotFoundError:  # another has just finished with it
            continue
        if not try_flock(held):
            os.close(held)
            message = f"another apply is under way in `{folder.parent}`"
            raise ApplyInterrupted(message, hint="wait until it has ended")
        if folder.exists() and os.path.samestat(os.fstat(held), folder.lstat()):
            return held
        os.close(held)


def _make_folders(folder: Path) -> None:
    for name in ("old", "new"):
        trees.remove(folder / name)
        (folder / name).mkdir()


def stage_files(
    top: Path, tree: Path, committed: Mapping[bytes, TreeEntry], paths: Sequence[bytes]
) -> tuple[dict[bytes, os.stat_result | None], set[bytes]]:
    """Return the status of each path's file on the disk, which is copied to ``tree``, and the paths that differ from
    the commit.

    Raises ``UnsafePath`` for a path through a link or into another repository, and for one that is neither a file nor a
    link.
    """
    seen: dict[bytes, os.stat_result | None] = {}
    changed = set()
    leaving = set(paths)
    with disk.Directories(top) as ours, disk.Directories(tree) as copies:
        for path in paths:
            check_cancelled()
            status = _status(ours, path, leaving)
            entry = committed.get(path)
            if status is not None and stat.S_ISDIR(status.st_mode):
                status = None  # ``plan_replacements`` sees whether it goes away
            seen[path] = status
            if status is None or entry is None:
                if status is not None or entry is not None:
                    changed.add(path)
                continue
            found = disk.DiskFile(path, disk.mode_of(status), status)
            if found.mode != entry.mode or disk.blob_id_of(ours, found, like=entry.id) != entry.id:
                changed.add(path)
            else:
                disk.write(copies, path, found.mode, disk.read(ours, path))
    return seen, changed


def _status(directories: disk.Directories, path: bytes, leaving: set[bytes]) -> os.stat_result | None:
    names = path.split(b"/")
    if any(judge_name(os.fsdecode(name)) for name in names):
        raise _unsafe_path(path, "is not a name for a file")
    for depth in range(1, len(names)):
        above, name = b"/".join(names[: depth - 1]), names[depth - 1]
        folder = b"/".join(names[:depth])
        try:
            status = os.lstat(name, dir_fd=directories.open(above))
        except FileNotFoundError:
            return None
        if not stat.S_ISDIR(status.st_mode):
            if folder in leaving:  # a file, or a link, that becomes a directory
                return None
            word = "a link" if stat.S_ISLNK(status.st_mode) else "no directory"
            raise _unsafe_path(path, f"leads through `{printable_path(folder)}`, which is {word}")
        if _exists(b".git", directories.open(folder)):
            raise _unsafe_path(path, f"leads into `{printable_path(folder)}`, another repository")
    try:
        status = os.lstat(names[-1], dir_fd=directories.open(b"/".join(names[:-1])))
    except FileNotFoundError:
        return None
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise _unsafe_path(path, "is neither a file nor a link here")
    return status


def _exists(name: bytes, above: int) -> bool:
    with suppress(FileNotFoundError):
        os.lstat(name, dir_fd=above)
        return True
    return False


def _unsafe_path(path: bytes, why: str) -> UnsafePath:
    return UnsafePath(f"`{printable_path(path)}` {why}", hint="take the work as a branch: runner runs branch")


def plan_replacements(top: Path, tree: Path, seen: Mapping[bytes, os.stat_result | None]) -> list[Replacement]:
    """List the replacements after which the checkout has the files of ``tree``.

    Raises ``PatchConflict`` for a directory in the way that does not become empty.
    """
    with disk.Directories(tree) as copies:
        changes = [Replacement(path, old, _mode_at(copies, path)) for path, old in seen.items()]
    found = [each for each in changes if each.old is not None or each.mode is not None]
    emptied = {path for path, _ in _emptied_folders(top, found)}
    with disk.Directories(top) as ours:
        for each in found:
            if each.old is None and each.path not in emptied and _is_directory(ours, each.path):
                raise PatchConflict(
                    f"`{printable_path(each.path)}` is a directory here", hint="move it away, then apply again"
                )
    return found


def _mode_at(directories: disk.Directories, path: bytes) -> int | None:
    """Return git's mode of a file or link; ``None`` when there is none."""
    try:
        above, name = _parent_of(directories, path)
        status = os.lstat(name, dir_fd=above)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return None if stat.S_ISDIR(status.st_mode) else disk.mode_of(status)


def _is_directory(directories: disk.Directories, path: bytes) -> bool:
    try:
        directories.open(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _emptied_folders(top: Path, changes: Sequence[Replacement]) -> list[tuple[bytes, int]]:
    """List the directories that become empty, deepest first, with their modes."""
    gone = {each.path for each in changes if each.mode is None}
    coming = {each.path for each in changes if each.mode is not None}
    needed = parents(coming)
    found = []
    with disk.Directories(top) as ours:
        folders = parents(gone) | {path for path in coming if _is_directory(ours, path)}
        for folder in sorted(folders - needed - {b""}, key=lambda path: -path.count(b"/")):
            descriptor = ours.open(folder)
            if all(folder + b"/" + os.fsencode(name) in gone for name in os.listdir(descriptor)):
                gone.add(folder)
                found.append((folder, stat.S_IMODE(os.fstat(descriptor).st_mode)))
    return found


def replace_files(top: Path, folder: Path, tree: Path, changes: Sequence[Replacement]) -> None:
    """Perform all the changes; when one fails, or the caller is cancelled, undo them and raise.

    Raises ``WouldOverwrite`` for a file that has changed since it was staged.
    """
    done = 0
    try:
        for number in replace_stepwise(top, folder, tree, changes):
            done = number
            check_cancelled()
    except BaseException:
        roll_back(top, folder, done)
        raise


def replace_stepwise(top: Path, folder: Path, tree: Path, changes: Sequence[Replacement]) -> Iterator[int]:
    """Perform ``replace_files``, yielding before each operation the number of those that are done.

    Wherever it is left, ``roll_back`` undoes it.
    """
    entries = _prepare(top, folder, tree, changes)
    yield 0
    _write_journal(folder, entries)
    with disk.Directories(top) as ours:
        for number, entry in enumerate(entries):
            yield number
            _perform(ours, folder, entry)
        yield len(entries)
        for touched in {entry.raw.rpartition(b"/")[0] for entry in entries}:
            with suppress(FileNotFoundError, NotADirectoryError):  # it went away itself
                os.fsync(ours.open(touched))
    yield len(entries)
    (folder / _JOURNAL).unlink()
    _sync(folder)


def _prepare(top: Path, folder: Path, tree: Path, changes: Sequence[Replacement]) -> list[_JournalEntry]:
    """Make the new files and the links to the old ones; return the operations in order."""
    unlinks, places = [], []
    coming = parents(each.path for each in changes if each.mode is not None)
    with disk.Directories(top) as ours, disk.Directories(tree) as copies:
        for number, each in enumerate(changes, start=1):
            check_cancelled()
            name = os.fsdecode(each.path)
            was = _identity(each.old) if each.old is not None else None
            if was is not None:
                above, last = _parent_of(ours, each.path)
                os.link(last, folder / "old" / str(number), src_dir_fd=above, follow_symlinks=False)
            if each.mode is None:
                unlinks.append(_JournalEntry("unlink", name, number, was=was))
                continue
            new = folder / "new" / str(number)
            _write_new(copies, each, new)
            places.append(_JournalEntry("place", name, number, was=was, now=_identity(new.lstat())))
        removed = [(path, mode) for path, mode in _emptied_folders(top, changes)]
        missing = sorted(path for path in coming - {b""} if not _is_directory(ours, path))
    rmdirs = [_JournalEntry("rmdir", os.fsdecode(path), mode=mode) for path, mode in removed]
    mkdirs = [_JournalEntry("mkdir", os.fsdecode(path)) for path in missing]
    return [*unlinks, *rmdirs, *mkdirs, *places]


def _write_new(copies: disk.Directories, each: Replacement, new: Path) -> None:
    if each.mode == LINK:
        os.symlink(b"".join(disk.read(copies, each.path)), os.fsencode(new))
        return
    executable = each.mode == EXECUTABLE
    with open(
        os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o777 if executable else 0o666), "wb"
    ) as file:
        file.writelines(disk.read(copies, each.path))
        if each.old is not None and stat.S_ISREG(each.old.st_mode):
            kept = stat.S_IMODE(each.old.st_mode)
            os.fchmod(file.fileno(), kept | (kept & 0o444) >> 2 if executable else kept & ~0o111)
        file.flush()
        os.fsync(file.fileno())


def _write_journal(folder: Path, entries: Sequence[_JournalEntry]) -> None:
    half = folder / "half"
    with half.open("w", encoding="ascii") as file:
        json.dump([asdict(entry) for entry in entries], file)
        file.flush()
        os.fsync(file.fileno())
    for inner in (folder / "old", folder / "new", folder):
        _sync(inner)
    half.rename(folder / _JOURNAL)
    _sync(folder)


def _perform(ours: disk.Directories, folder: Path, entry: _JournalEntry) -> None:
    above, name = _parent_of(ours, entry.raw)
    if entry.what == "rmdir":
        os.rmdir(name, dir_fd=above)
    elif entry.what == "mkdir":
        os.mkdir(name, 0o777, dir_fd=above)
    elif _identity_at(above, name) != entry.was:
        raise WouldOverwrite(
            f"`{printable_path(entry.raw)}` was changed during the apply", hint="apply again when it has settled"
        )
    elif entry.what == "unlink":
        os.unlink(name, dir_fd=above)
    elif entry.was is None:
        os.link(folder / "new" / str(entry.number), name, dst_dir_fd=above, follow_symlinks=False)
    else:
        os.rename(folder / "new" / str(entry.number), name, dst_dir_fd=above)


def roll_back(top: Path, folder: Path, carried_out: int | None = None) -> None:
    """Undo the operations of a journal, if there is one; it can be interrupted and repeated.

    ``carried_out`` limits it to the first ones, when that number is known. Raises ``ApplyInterrupted``, which names
    what somebody changed since, after everything else has been undone.
    """
    if not (folder / _JOURNAL).exists():
        return
    entries = [_parse_entry(**fields) for fields in json.loads((folder / _JOURNAL).read_text(encoding="ascii"))]
    foreign = []
    with disk.Directories(top) as ours:
        for entry in reversed(entries[:carried_out]):
            try:
                undone = _undo(ours, folder, entry)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):  # somebody's, above or in its place
                undone = entry.was is None
            if not undone:
                foreign.append(entry.raw)
    if foreign:
        raise ApplyInterrupted(
            f"an apply to `{top}` was interrupted, and since then somebody changed `{printable_path(foreign[0])}`"
            + (f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""),
            hint=f"the files from before are in `{folder / 'old'}`; remove `{folder}` when you have what you need",
        )
    (folder / _JOURNAL).unlink()


def _parse_entry(was: Sequence[int] | None, now: Sequence[int] | None, **rest: object) -> _JournalEntry:
    return _JournalEntry(was=_parse_identity(was), now=_parse_identity(now), **rest)  # type: ignore[arg-type]  # as we wrote it


def _parse_identity(numbers: Sequence[int] | None) -> Identity | None:
    return (numbers[0], numbers[1], numbers[2]) if numbers is not None else None


def _undo(ours: disk.Directories, folder: Path, entry: _JournalEntry) -> bool:
    """Undo one operation; return whether the path is as it was."""
    above, name = _parent_of(ours, entry.raw)
    if entry.what == "mkdir":
        _rmdir(name, above)
        return True
    if entry.what == "rmdir":
        if not _exists(name, above):
            os.mkdir(name, dir_fd=above)
            os.chmod(name, entry.mode, dir_fd=above)
        return True
    found = _identity_at(above, name)
    if found == entry.was or (found is not None and entry.was is not None and found[0] == entry.was[0]):
        return True  # the old file, which its owner may have written to
    if found != entry.now:
        return False
    if entry.was is None:
        os.unlink(name, dir_fd=above)
        return True
    back = folder / "back"
    back.unlink(missing_ok=True)
    os.link(folder / "old" / str(entry.number), back, follow_symlinks=False)
    os.rename(back, name, dst_dir_fd=above)
    return True


def _rmdir(name: bytes, above: int) -> None:
    try:
        os.rmdir(name, dir_fd=above)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENOTEMPTY):
            raise


def _parent_of(directories: disk.Directories, path: bytes) -> tuple[int, bytes]:
    folder, _, name = path.rpartition(b"/")
    return directories.open(folder), name


def _identity_at(above: int, name: bytes) -> Identity | None:
    """Return the identity of a file or link; a directory has none."""
    try:
        status = os.lstat(name, dir_fd=above)
    except FileNotFoundError:
        return None
    return None if stat.S_ISDIR(status.st_mode) else _identity(status)


def _identity(status: os.stat_result) -> Identity:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, _DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
