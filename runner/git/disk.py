"""Trees on a disk, and the bare bones of a repository: what both adapters read and write without git.

Everything below a root is reached through descriptors, one component at a time, and no link is followed: a tree may
have been written by an agent. All of it blocks; adapters call it in a thread.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from types import TracebackType
from typing import Protocol, Self

from msgspec import Struct
from trio.from_thread import check_cancelled

from runner.core.errors import GitFailed, HostileTree
from runner.core.sanitize import printable_path
from runner.git.tree import EXECUTABLE, FILE, LINK, blob_id, covers, hasher
from runner.policy.names import PATH_BYTES, Kind, judge_name, parents
from runner.ports.git import TreeEntry
from runner.safefs import trees

CHUNK = 1 << 20  # bytes
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

# In effect over any `.gitattributes` of a tree: bytes are bytes, and diffs are text where they can be.
_ATTRIBUTES = "* -text !eol -filter -ident !working-tree-encoding !diff !merge\n"


class DiskFile(Struct, frozen=True):
    """A regular file or link on a disk; ``mode`` is git's."""

    path: bytes
    mode: int
    stat: os.stat_result


class IgnoreRule(Protocol):
    def __call__(self, path: bytes, *, directory: bool) -> bool:
        """Tell whether rules leave out this path; its parents are known not to be."""


class Directories:
    """Descriptors of a tree's directories by path; one chain of them is open, so paths in order cost little."""

    def __init__(self, root: Path | int) -> None:
        top = os.open(".", _DIRECTORY, dir_fd=root) if isinstance(root, int) else os.open(root, _DIRECTORY)
        self._chain = [(b"", top)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for _, descriptor in self._chain:
            os.close(descriptor)

    def open(self, path: bytes, *, make: bool = False) -> int:
        """Return the directory's descriptor, which stays owned by this object. A link on the way is
        ``NotADirectoryError``.
        """
        names = path.split(b"/") if path else []
        same = 0
        while same < min(len(names), len(self._chain) - 1) and self._chain[same + 1][0] == names[same]:
            same += 1
        while len(self._chain) > same + 1:
            os.close(self._chain.pop()[1])
        for name in names[same:]:
            above = self._chain[-1][1]
            made = make and _mkdir(name, above)
            descriptor = os.open(name, _DIRECTORY, dir_fd=above)
            self._chain.append((name, descriptor))
            if made:
                os.fchmod(descriptor, 0o755)
        return self._chain[-1][1]


def _mkdir(name: bytes, above: int) -> bool:
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=above)
        return True
    return False


def walk(
    root: Path,
    *,
    ignores: IgnoreRule,
    tracked: Collection[bytes] = frozenset(),
    exclude: frozenset[bytes] = frozenset(),
) -> tuple[list[DiskFile], int]:
    """List regular files and links below ``root``, and count the entries that were left out.

    Left out are entries that ``ignores`` matches unless they are ``tracked``, nested ``.git`` and names like it, and
    files of any other type. The ``.git`` at the top and everything in or below ``exclude`` does not count. Raises
    ``HostileTree`` for a path that is too long to be opened by name.
    """
    found: list[DiskFile] = []
    left_out = 0
    needed = parents(tracked)
    excluded = covers(exclude)
    waiting = [(b"", False)]
    with Directories(root) as directories:
        while waiting:
            check_cancelled()
            folder, ignored = waiting.pop()
            for child in _scan(directories.open(folder)):
                name = os.fsencode(child.name)
                path = folder + b"/" + name if folder else name
                if path == b".git" or excluded(path):
                    continue
                if len(path) > PATH_BYTES:
                    raise HostileTree(f"`{printable_path(path[:60])}...` is too long a path: {len(path)} bytes")
                directory = child.is_dir(follow_symlinks=False)
                unwanted = ignored or ignores(path, directory=directory)
                kind: Kind = "directory" if directory else "link" if child.is_symlink() else "file"
                if judge_name(name.decode("utf-8", "surrogateescape"), kind) or (
                    unwanted and path not in (needed if directory else tracked)
                ):
                    left_out += 1
                elif directory:
                    waiting.append((path, unwanted))
                elif child.is_symlink() or child.is_file(follow_symlinks=False):
                    status = child.stat(follow_symlinks=False)
                    found.append(DiskFile(path, mode_of(status), status))
                else:
                    left_out += 1
    return found, left_out


def _scan(directory: int) -> list[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        return list(entries)


def mode_of(status: os.stat_result) -> int:
    if stat.S_ISLNK(status.st_mode):
        return LINK
    return EXECUTABLE if status.st_mode & stat.S_IXUSR else FILE


def read(directories: Directories, path: bytes) -> Iterator[bytes]:
    """Yield the content of a file, or the target of a link, in chunks."""
    folder, _, name = path.rpartition(b"/")
    above = directories.open(folder)
    if stat.S_ISLNK(os.lstat(name, dir_fd=above).st_mode):
        yield os.readlink(name, dir_fd=above)
        return
    descriptor = os.open(name, _READ, dir_fd=above)
    try:
        while chunk := os.read(descriptor, CHUNK):
            yield chunk
    finally:
        os.close(descriptor)


def blob_id_of(directories: Directories, found: DiskFile, *, like: str) -> str:
    """Return the blob id of a file on the disk."""
    digest = hasher(found.stat.st_size, like=like)
    for chunk in read(directories, found.path):
        digest.update(chunk)
    return digest.hexdigest()


def store_blob(objects: Path, directories: Directories, found: DiskFile, *, like: str) -> str:
    """Stream a file into a loose object, named by the bytes that were read."""
    size = found.stat.st_size
    digest = hasher(size, like=like)
    deflate = zlib.compressobj(1)
    length = 0
    with tempfile.NamedTemporaryFile(dir=objects, prefix="tmp_obj_", delete=False) as file:
        file.write(deflate.compress(b"blob %d\0" % size))
        for chunk in read(directories, found.path):
            check_cancelled()
            digest.update(chunk)
            file.write(deflate.compress(chunk))
            length += len(chunk)
        file.write(deflate.flush())
    if length != size:
        raise GitFailed(f"`{os.fsdecode(found.path)}` changed while it was read")
    return _move_object(objects, Path(file.name), digest.hexdigest())


def store_object(objects: Path, kind: bytes, content: bytes, *, like: str) -> str:
    """Write an object of any kind from memory; return its id."""
    digest = hasher(len(content), like=like, kind=kind)
    digest.update(content)
    with tempfile.NamedTemporaryFile(dir=objects, prefix="tmp_obj_", delete=False) as file:
        file.write(zlib.compress(b"%s %d\0%s" % (kind, len(content), content), 1))
    return _move_object(objects, Path(file.name), digest.hexdigest())


def is_loose_commit(objects: Path, id: str) -> bool:
    """Tell whether an object is a commit in a file of its own, as ``store_object`` writes it. No pack is searched."""
    try:
        with (objects / id[:2] / id[2:]).open("rb") as file:
            return zlib.decompressobj().decompress(file.read(64), 7) == b"commit "
    except (FileNotFoundError, zlib.error):
        return False


def _move_object(objects: Path, file: Path, id: str) -> str:
    target = objects / id[:2] / id[2:]
    target.parent.mkdir(exist_ok=True)
    file.replace(target)
    return id


def write(directories: Directories, path: bytes, mode: int, content: Iterable[bytes]) -> os.stat_result:
    """Make a new file or link, and the directories above it, with git's modes whatever the umask."""
    folder, _, name = path.rpartition(b"/")
    above = directories.open(folder, make=True)
    if mode == LINK:
        os.symlink(b"".join(content), name, dir_fd=above)
        return os.lstat(name, dir_fd=above)
    descriptor = os.open(name, _CREATE, 0o600, dir_fd=above)
    try:
        for chunk in content:
            view = memoryview(chunk)
            while view:
                view = view[os.write(descriptor, view) :]
        os.fchmod(descriptor, mode & 0o777)
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def remove(directories: Directories, path: bytes) -> None:
    """Remove a file or link if it exists, and the directories above it that become empty."""
    while path:
        folder, _, name = path.rpartition(b"/")
        try:
            above = directories.open(folder)
            if stat.S_ISDIR(os.lstat(name, dir_fd=above).st_mode):
                os.rmdir(name, dir_fd=above)
            else:
                os.unlink(name, dir_fd=above)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENOTEMPTY):
                return
            raise
        path = folder


def differences(root: Path | int, entries: Iterable[TreeEntry]) -> dict[bytes, str]:
    """Map paths where the disk differs from the entries to ``missing``, ``mode`` (also another type) or ``content``."""
    found: dict[bytes, str] = {}
    with Directories(root) as directories:
        for number, entry in enumerate(entries):
            if number % 64 == 0:
                check_cancelled()
            if word := _difference(directories, entry):
                found[entry.path] = word
    return found


def _difference(directories: Directories, entry: TreeEntry) -> str | None:
    folder, _, name = entry.path.rpartition(b"/")
    try:
        above = directories.open(folder)
        if entry.mode == LINK:
            target = os.readlink(name, dir_fd=above)
            return None if blob_id(target, like=entry.id) == entry.id else "content"
        descriptor = os.open(name, _READ, dir_fd=above)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return "missing"
        if error.errno in (errno.ELOOP, errno.EINVAL, errno.ENXIO):  # a link, no link, a socket
            return "mode"
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or mode_of(status) != entry.mode:
            return "mode"
        digest = hasher(entry.size, like=entry.id)
        wanted = min(status.st_size + 1, CHUNK)
        while len(chunk := os.read(descriptor, wanted)) == wanted:  # less is the end of a file
            digest.update(chunk)
        digest.update(chunk)
        return None if digest.hexdigest() == entry.id else "content"
    finally:
        os.close(descriptor)


def extras(root: Path | int, entries: Iterable[TreeEntry]) -> list[bytes]:
    """List what is below ``root`` beside the entries and the directories above them; such a directory once."""
    expected = {entry.path for entry in entries}
    needed = parents(expected)
    found = []
    waiting = [b""]
    with Directories(root) as directories:
        while waiting:
            check_cancelled()
            folder = waiting.pop()
            for child in _scan(directories.open(folder)):
                name = os.fsencode(child.name)
                path = folder + b"/" + name if folder else name
                if path in needed and child.is_dir(follow_symlinks=False):
                    waiting.append(path)
                elif path not in expected:
                    found.append(path)
    return found


def check_empty(into: Path) -> None:
    if os.listdir(into):
        raise GitFailed(f"`{into}` is not empty")


def init_private(repository: Path, *, like: str) -> None:
    """Make a bare private repository with the object format of ids ``like`` this one."""
    _make_git_dir(repository, bare=True, branch="none", like=like)
    (repository / "info").mkdir()
    (repository / "info" / "attributes").write_text(_ATTRIBUTES)


def init_view(git: Path, objects: Path, *, like: str) -> None:
    """Make a bare git directory that has the objects of another repository."""
    _make_git_dir(git, bare=True, branch="none", like=like, objects=objects)


def init_agent_copy(git: Path, repository: Path, commit: str, *, branch: str, origin: str | None) -> None:
    """Make an agent's ``.git``: copies of the objects of ``repository``, and one branch.

    With a URL as ``origin`` that branch follows the one of its name there; else there is no remote.
    """
    _make_git_dir(git, bare=False, branch=branch, like=commit)
    shutil.copytree(repository / "objects", git / "objects", dirs_exist_ok=True, copy_function=_copy)
    with suppress(FileNotFoundError):
        shutil.copyfile(repository / "shallow", git / "shallow")
    _write_ref(git / "refs" / "heads" / branch, commit)
    if origin is not None:
        _write_ref(git / "refs" / "remotes" / "origin" / branch, commit)
        with (git / "config").open("a") as config:
            config.write(
                f'[remote "origin"]\n\turl = "{origin}"\n\tfetch = "+refs/heads/*:refs/remotes/origin/*"\n'
                f'[branch "{branch}"]\n\tremote = origin\n\tmerge = "refs/heads/{branch}"\n'
            )


def init_work_tree(tree: Path, branch: str) -> None:
    """Make the ``.git`` of a directory that others may write to, by descriptors only. Raises ``GitFailed``."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    half = f".git-{token_hex(8)}"
    top = os.open(tree, flags)
    try:
        os.mkdir(half, 0o700, dir_fd=top)
        inner = os.open(half, flags, dir_fd=top)
        try:
            if os.fstat(inner).st_uid != os.geteuid():
                raise GitFailed(f"somebody else writes to `{tree}`")
            _make_git_dir(Path(f"/proc/self/fd/{inner}"), bare=False, branch=branch, like="0" * 40)
            _chown_tree(inner, os.fstat(top))
        finally:
            os.close(inner)
        os.rename(half, ".git", src_dir_fd=top, dst_dir_fd=top)
    except OSError as error:
        trees.remove(tree / half)
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise GitFailed(f"`{tree}` cannot be made a repository: {error.strerror}") from error
    finally:
        os.close(top)


def _chown_tree(directory: int, whose: os.stat_result) -> None:
    """Give a tree that only this process has written to the owner and group of another directory."""
    for _, folders, files, parent in os.fwalk(".", dir_fd=directory):
        for name in (*folders, *files):
            os.chown(name, whose.st_uid, whose.st_gid, dir_fd=parent, follow_symlinks=False)
    os.fchmod(directory, 0o755)
    os.fchown(directory, whose.st_uid, whose.st_gid)


def _write_ref(ref: Path, commit: str) -> None:
    ref.parent.mkdir(parents=True, exist_ok=True)
    ref.write_text(commit + "\n")


def cut_history(source: Path, target: Path, commits: frozenset[bytes]) -> None:
    """Copy to ``target``, which has these ``commits``, where the history of ``source`` is cut."""
    with suppress(FileNotFoundError):
        cut = commits.intersection((source / "shallow").read_bytes().split())
        (target / "shallow").write_bytes(b"".join(id + b"\n" for id in sorted(cut)))


def _copy(source: str, target: str) -> str:
    check_cancelled()
    return shutil.copyfile(source, target)


def _make_git_dir(git: Path, *, bare: bool, branch: str, like: str, objects: Path | None = None) -> None:
    if objects is not None:
        (git / "objects").symlink_to(objects)
    for folder in ("refs/heads", *(("objects/info", "objects/pack") if objects is None else ())):
        (git / folder).mkdir(parents=True)
    (git / "HEAD").write_text(f"ref: refs/heads/{branch}\n")
    version, extension = (0, "") if len(like) == 40 else (1, "[extensions]\n\tobjectFormat = sha256\n")
    (git / "config").write_text(
        f"[core]\n\trepositoryformatversion = {version}\n\tfilemode = true\n\tbare = {str(bare).lower()}\n{extension}"
    )
