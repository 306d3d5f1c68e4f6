"""A user's repository on this host: found, checked and compared without running anything of it.

Its directories are found by looking, and its refs read, without git, so that neither its configuration nor its hooks
have an effect. Git reads its objects through a *view*, a git directory of the runner's. The index is read for its stat
data only: a file that git last saw unchanged is unchanged.

A repository that the user named is followed where it leads: a linked work tree has its objects elsewhere. One that a
stranger's manifest names must lie ``within`` the directory that the user named, since a ``.git`` file or a link in a
pull request would otherwise give its author what only the user can read. A repository that borrows objects from another
is always refused: the other may drop them while a run needs them.
"""

from __future__ import annotations

import os
import stat
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from runner.core.errors import BadSource, GitFailed, Untrusted
from runner.core.ids import is_commit_id
from runner.core.sanitize import sanitize
from runner.git import disk
from runner.git.ignore import IgnoreRules
from runner.git.tree import GITLINK
from runner.ports.git import TreeEntry

if TYPE_CHECKING:
    from dulwich.index import IndexEntry

_SKIP_WORKTREE = 0x4000  # of an index entry's extended flags: not on the disk on purpose
_SMALL_BYTES = 1 << 16  # bytes: a .git file, a commondir file, HEAD, a ref
_MAX_SYMBOLIC = 5  # refs that name each other, as many as git follows
_READ_NAMES = ("HEAD", "index", "packed-refs", "shallow", "info", "refs", "objects")  # of a repository, here and by git


class LocalRepository(Struct, frozen=True):
    """The place of a repository: its work tree (``top`` itself when bare), its git directory, the one shared by work
    trees.
    """

    top: Path
    bare: bool
    git: Path
    common: Path

    @property
    def has_reftable(self) -> bool:
        """True when its refs are in files that only git can read."""
        return (self.common / "reftable").exists()


def find_repository(path: Path, within: Path | None = None) -> LocalRepository:
    """Find the repository that contains ``path``. Raises ``BadSource`` and ``Untrusted`` as the port's ``inspect``
    does.
    """
    path = Path(os.path.realpath(path))
    if not os.path.exists(path):
        raise BadSource(f"`{path}` does not exist")
    if not path.is_dir():
        raise BadSource(f"`{path}` is not a directory")
    for folder in (path, *path.parents):
        if local := _repository_at(folder):
            if within is not None:
                _check_within(local, Path(os.path.realpath(within)))
            _check_owner_and_files(path, local)
            return local
    raise BadSource(f"`{path}` is not a git repository", hint="git init there, or use `type: none` for an empty tree")


def _repository_at(folder: Path) -> LocalRepository | None:
    own = folder / ".git"
    if own.is_file():
        text = _read_small(own)
        if not text.startswith("gitdir: "):
            raise BadSource(f"`{own}` does not say where its repository is")
        git = Path(os.path.normpath(folder / text.removeprefix("gitdir: ")))
        return LocalRepository(folder, False, git, common(git))
    for git, bare in ((own, False), (folder, True)):
        if (git / "HEAD").is_file() and (git / "objects").is_dir():
            return LocalRepository(folder, bare, git, common(git))
    return None


def _check_within(local: LocalRepository, within: Path) -> None:
    """Refuse a repository that a stranger may have made to lead elsewhere."""
    if local.bare:  # nobody commits a `.git`, but anybody a bare repository, with a configuration of their own
        raise _untrusted(f"read `{local.top}`, which is a bare repository")
    for part in (local.top, local.top / ".git", local.git, local.common):
        if not (real := Path(os.path.realpath(part))).is_relative_to(within):
            raise _untrusted(f"read `{real}`, which is outside of `{within}`")
    for link in _find_links([folder / name for folder in {local.git, local.common} for name in _READ_NAMES]):
        raise _untrusted(f"read a repository through the link `{sanitize(str(link))}`")
    if local.has_reftable:
        raise _untrusted(f"read `{local.top}`, whose refs only git can read")


def _untrusted(what: str) -> Untrusted:
    hint = "apply it from a clone of its own (git clone --no-local), or without --untrusted"
    return Untrusted(f"an untrusted manifest may not {what}", hint=hint)


def _find_links(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the links among some paths and everything below them."""
    waiting = list(paths)
    while waiting:
        path = waiting.pop()
        if path.is_symlink():
            yield path
        elif path.is_dir():
            with os.scandir(path) as entries:
                waiting += [Path(entry.path) for entry in entries if entry.is_symlink() or entry.is_dir()]


def common(git: Path) -> Path:
    """Return the directory with the objects and branches of a git directory: another one for a linked work tree."""
    own = git / "commondir"
    return Path(os.path.normpath(git / _read_small(own))) if own.is_file() else git


def _read_small(path: Path) -> str:
    with path.open("rb") as file:
        text = os.fsdecode(file.read(_SMALL_BYTES)).rstrip("\n")
    if "\0" in text:
        raise BadSource(f"`{path}` holds a zero byte, so it names nothing")
    return text


def _check_owner_and_files(path: Path, local: LocalRepository) -> None:
    for part in (path, local.top, local.git, local.common, local.common / "objects"):
        try:
            owner = part.stat().st_uid
        except OSError as error:
            raise BadSource(f"`{part}` of the repository at `{local.top}`: {error.strerror}") from error
        if owner != os.geteuid():
            raise BadSource(f"`{part}` belongs to another user (uid {owner})", hint="make a clone of your own")
    files = [local.git / name for name in ("HEAD", "index", "commondir")]
    files += [local.common / name for name in ("config", "packed-refs", "shallow", "info/exclude")]
    for file in files:
        if file.exists() and not file.is_file():  # whoever opens a FIFO waits for what is in it
            raise BadSource(f"`{file}` of the repository at `{local.top}` is not a regular file")
    for name in ("alternates", "http-alternates"):
        if (local.common / "objects" / "info" / name).exists():
            raise BadSource(
                f"`{local.top}` borrows objects from another repository",
                hint="git repack -a -d, then remove objects/info/alternates",
            )


def read_ref(local: LocalRepository, name: str) -> str | None:
    """Return the id that ``HEAD`` or a full ref name stands for; ``None`` when there is none. Raises ``BadSource``."""
    for _ in range(_MAX_SYMBOLIC):
        text = _read_loose_ref(local, name)
        if text is None:
            return _read_packed_ref(local, name)
        if is_commit_id(text):
            return text
        if not text.startswith("ref:"):
            break
        name = text.removeprefix("ref:").strip()
        if not name.startswith("refs/") or not {"", ".", ".."}.isdisjoint(name.split("/")):
            break
    raise BadSource(f"`{sanitize(name)}` of `{local.top}` does not name a commit", hint="git fsck")


def read_branch(local: LocalRepository) -> str | None:
    """Return the branch that HEAD is on."""
    text = _read_loose_ref(local, "HEAD") or ""
    name = text.removeprefix("ref:").strip()
    return name.removeprefix("refs/heads/") if name != text and name.startswith("refs/heads/") else None


def _read_loose_ref(local: LocalRepository, name: str) -> str | None:
    """Return the content of a ref's file."""
    path = local.git / name if name == "HEAD" else local.common / name
    return _read_small(path).strip() if path.is_file() else None


def _read_packed_ref(local: LocalRepository, name: str) -> str | None:
    path = local.common / "packed-refs"
    if not path.is_file():
        return None
    wanted = os.fsencode(f" {name}\n")
    with path.open("rb") as file:
        found = next((line for line in file if line.endswith(wanted)), b"")
    id = found.removesuffix(wanted).decode("ascii", "replace")
    return id if is_commit_id(id) else None


@contextmanager
def open_view(local: LocalRepository, *, like: str, inside: Path | None = None) -> Iterator[Path]:
    """Make a git directory with the objects of a repository and where its history is cut, and nothing else of it.

    It lies in the directory ``inside``, and is removed when the block ends. Raises ``BadSource``.
    """
    with tempfile.TemporaryDirectory(prefix="runner-view-", dir=inside) as folder:
        git = Path(folder)
        try:
            disk.init_view(git, local.common / "objects", like=like)
            _copy_shallow(local.common / "shallow", git / "shallow")
        except OSError as error:
            raise GitFailed(str(error)) from error
        yield git


def _copy_shallow(listed: Path, to: Path) -> None:
    if not listed.is_file():
        return
    lines = listed.read_bytes().splitlines()
    if not all(is_commit_id(line.decode("ascii", "replace")) for line in lines):  # git would repeat what is none
        raise BadSource(f"`{listed}` is not a list of commits")
    to.write_bytes(b"".join(line + b"\n" for line in lines))


def uncommitted_paths(local: LocalRepository, head: Sequence[TreeEntry]) -> list[bytes]:
    """List the paths whose files differ from HEAD's entries: changed, deleted, or untracked and not ignored."""
    if local.bare:
        return []
    index = read_index(local.git / "index", like=head[0].id if head else "0" * 40)
    committed = {entry.path: entry for entry in head}
    known = index.entries
    submodules = {entry.path for entry in head if entry.mode == GITLINK}
    submodules |= {path for path, entry in known.items() if entry.mode == GITLINK}
    with disk.Directories(local.top) as directories:
        found, _ = disk.walk(
            local.top,
            ignores=IgnoreRules(lambda folder: _ignore_file(directories, folder), extra=_exclude_file(local)),
            tracked=committed.keys() | known.keys(),
            exclude=frozenset(submodules),
        )
        changed = [each.path for each in found if _differs(directories, each, index, committed.get(each.path))]
    absent = committed.keys() - {each.path for each in found} - submodules
    changed += [path for path in absent if path not in known or not known[path].extended_flags & _SKIP_WORKTREE]
    return sorted(changed)


def why_not_ignored(local: LocalRepository, name: str) -> str | None:
    """Return why git does not ignore a directory of a work tree, to be read after its name; ``None`` when it does."""
    path = os.fsencode(name)
    known = read_index(local.git / "index", like="0" * 40).entries
    if any(entry == path or entry.startswith(path + b"/") for entry in known):
        return "holds files of the repository"
    with disk.Directories(local.top) as directories:
        ignores = IgnoreRules(lambda folder: _ignore_file(directories, folder), extra=_exclude_file(local))
        above = [path[:at] for at, byte in enumerate(path) if byte == ord("/")]
        if any(ignores(folder, directory=True) for folder in (*above, path)):
            return None
        if ignores(path + b"/bin", directory=True):  # an ignore file inside says so of all
            return None
    return "is not ignored by git"


class GitIndex(Struct, frozen=True):
    """The index of a work tree; ``written`` is the index's own time, in nanoseconds."""

    entries: Mapping[bytes, IndexEntry]
    written: int

    def is_unchanged(self, found: disk.DiskFile, entry: TreeEntry) -> bool:
        """Tell whether git saw this file with the entry's content, and it has not been touched since.

        As in git, a file changed no earlier than the index was written proves nothing.
        """
        return self.unchanged_id(found) == entry.id

    def unchanged_id(self, found: disk.DiskFile) -> str | None:
        """Return the id of a file's content, if git saw it and the file has not been touched since."""
        known = self.entries.get(found.path)
        if known is None:
            return None
        now = found.stat
        untouched = (
            now.st_mtime_ns < self.written
            and (known.mtime, known.ctime) == (divmod(now.st_mtime_ns, 10**9), divmod(now.st_ctime_ns, 10**9))
            and (known.size, known.ino) == (now.st_size & 0xFFFFFFFF, now.st_ino & 0xFFFFFFFF)
        )
        return known.sha.decode() if untouched else None


def read_index(path: Path, *, like: str) -> GitIndex:
    """Read an index with ids ``like`` this one; empty when there is none. Raises ``BadSource``."""
    if not path.exists():
        return GitIndex({}, 0)
    from dulwich.index import IndexEntry, UnsupportedIndexFormat, read_index_dict
    from dulwich.object_format import SHA1, SHA256

    ids = SHA256 if len(like) == 64 else SHA1
    try:
        with path.open("rb") as file:
            entries, written = read_index_dict(file, object_format=ids), os.fstat(file.fileno()).st_mtime_ns
    except (AssertionError, ValueError, UnsupportedIndexFormat, struct.error) as error:
        raise BadSource(f"the index `{path}` cannot be read: {error}") from error
    return GitIndex({path: e for path, e in entries.items() if isinstance(e, IndexEntry)}, written)


def _ignore_file(directories: disk.Directories, folder: bytes) -> bytes | None:
    path = folder + b"/.gitignore" if folder else b".gitignore"
    try:
        above = directories.open(folder)
        if not stat.S_ISREG(os.lstat(b".gitignore", dir_fd=above).st_mode):
            return None
    except FileNotFoundError:
        return None
    return b"".join(disk.read(directories, path))


def _exclude_file(local: LocalRepository) -> bytes:
    path = local.common / "info" / "exclude"
    return path.read_bytes() if path.is_file() else b""


def _differs(directories: disk.Directories, found: disk.DiskFile, index: GitIndex, entry: TreeEntry | None) -> bool:
    if entry is None or entry.mode != found.mode:
        return True
    return not index.is_unchanged(found, entry) and disk.blob_id_of(directories, found, like=entry.id) != entry.id


def copy_paths(local: LocalRepository, paths: Sequence[bytes], into: Path) -> None:
    """Copy these paths of the work tree into ``into``; paths that are missing are removed there."""
    with disk.Directories(local.top) as source, disk.Directories(into) as target:
        for path in paths:
            disk.remove(target, path)
        for path in paths:
            folder, _, name = path.rpartition(b"/")
            try:
                status = os.lstat(name, dir_fd=source.open(folder))
            except (FileNotFoundError, NotADirectoryError):
                continue
            if not stat.S_ISDIR(status.st_mode):
                disk.write(target, path, disk.mode_of(status), disk.read(source, path))
