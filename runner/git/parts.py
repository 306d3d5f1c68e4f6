"""Parts of a checkout that its commit only refers to: submodules, and files of LFS.

What was fetched of them lies in the private repository of the whole: a submodule's repository below ``modules``, the
content of LFS files below ``lfs``, and ``parts.json`` lists them. A checkout has them as plain files. A snapshot keeps
them as the commit has them, as links and pointers.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace
from trio.from_thread import check_cancelled

from runner.core.codec import decode, encode
from runner.core.errors import BadSource, BadUrl, HostileTree, RemoteOverLimit, UnknownCommit, Untrusted
from runner.core.patterns import pattern
from runner.core.sanitize import printable_path, sanitize
from runner.git import disk, source
from runner.git.tree import EXECUTABLE, FILE, GITLINK
from runner.ports.git import LfsFile, Parts, PartsRequest, Submodule, TreeEntry
from runner.spec.checkout import judge_url

if TYPE_CHECKING:
    from runner.git.common import GitAdapter

MAX_SUBMODULES = 100
MAX_DEPTH = 4  # submodules in each other
LIST = ".gitmodules"
LIST_BYTES = 1 << 20
LEAST_POINTER, MOST_POINTER = 120, 1024  # bytes

_RECORD = "parts.json"
_POINTER = pattern(
    rb"version https://git-lfs\.github\.com/spec/v1\noid sha256:([0-9a-f]{64})\nsize ([1-9][0-9]{0,17})\n"
)
_TOP = pattern(r"[a-z]+://[^/]+|[^/:]+")  # of a URL: all before its path
_NAME = pattern(r"[\w-][\w.-]*(/[\w-][\w.-]*)*", re.ASCII)


class Link(Struct, frozen=True):
    """A submodule as ``.gitmodules`` lists it."""

    name: str
    url: str


class _Whole(Struct, frozen=True, kw_only=True):
    """A repository whose parts are fetched: its ``path`` in the checkout, the user's ``local`` git directory of it."""

    path: bytes
    repository: Path
    commit: str
    url: str | None
    local: Path | None
    depth: int

    def below(self, path: bytes) -> bytes:
        return self.path + b"/" + path if self.path else path


def module_at(repository: Path, number: int) -> Path:
    return repository / "modules" / str(number)


def object_at(top: Path, sha256: str) -> Path:
    """Return the place of an object below a git directory, as git-lfs has it."""
    return top / "lfs" / "objects" / sha256[:2] / sha256[2:4] / sha256


def read_parts(repository: Path) -> Parts:
    """Return the parts that a private repository has."""
    try:
        return decode((repository / _RECORD).read_bytes(), Parts)
    except FileNotFoundError:
        return Parts()


def links_of(text: bytes) -> dict[bytes, Link]:
    """Return the submodules of a ``.gitmodules`` by their paths. Raises ``HostileTree``."""
    from dulwich.config import ConfigFile, parse_submodules

    try:
        found = list(parse_submodules(ConfigFile.from_file(BytesIO(text))))
    except (ValueError, KeyError) as error:
        raise HostileTree(f"`{LIST}` cannot be read: {sanitize(str(error))}") from error
    return {path: Link(name.decode("utf-8", "replace"), url.decode("utf-8", "replace")) for path, url, name in found}


def resolve_link(url: str, whole: str | None) -> str:
    """Return the URL that a submodule's means in a repository with the URL ``whole``. Raises ``BadUrl``."""
    if url.startswith(("./", "../")):
        if whole is None:
            hint = "run `git submodule update --init` in the repository, from which it is taken then"
            raise BadUrl(f"`{sanitize(url)}` is relative, and a repository by path has no URL", hint=hint)
        top = _TOP.match(whole)
        host, path, mark = top[0] if top else "", whole[top.end() if top else 0 :].rstrip("/"), "/"
        while url.startswith(("./", "../")):
            step, _, url = url.partition("/")
            if step == "..":
                if not path:
                    raise BadUrl(f"a submodule's URL leads out of `{host}`")
                mark = "/" if "/" in path else ":"
                path = path.rpartition(mark)[0]
        url = f"{host}{path}{mark}{url}"
    if fault := judge_url(url):
        raise fault
    return url


def pointer_in(content: bytes) -> tuple[str, int] | None:
    """Return the SHA-256 and the size that a pointer of LFS names; ``None`` for any other content."""
    found = _POINTER.fullmatch(content)
    return (found[1].decode(), int(found[2])) if found is not None else None


class PartsFetch(Struct, frozen=True):
    """Fetches the parts of a commit of the private ``repository``."""

    git: GitAdapter
    repository: Path
    wanted: PartsRequest

    async def all(self, commit: str) -> Parts:
        """See ``Git.fetch_parts``."""
        from runner.git.common import in_thread

        wanted, local = self.wanted, None
        if wanted.path is not None:
            local = (await in_thread(source.find_repository, wanted.path, wanted.within)).common
        waiting = deque(
            [_Whole(path=b"", repository=self.repository, commit=commit, url=wanted.url, local=local, depth=0)]
        )
        parts = Parts()
        while waiting:
            whole = waiting.popleft()
            entries = await self.git.checked_entries(whole.repository, whole.commit)
            if wanted.lfs and (files := await self._lfs_files(whole, entries)):
                parts = replace(parts, lfs=(*parts.lfs, *files))
                if (size := sum(file.size for file in parts.lfs)) > wanted.lfs_bytes:
                    most = wanted.lfs_bytes >> 20
                    raise RemoteOverLimit(f"files of LFS have {size >> 20:,} MiB, and the limit is {most:,} MiB")
                await self._fetch_lfs(whole, files)
            links = [entry for entry in entries if entry.mode == GITLINK] if wanted.submodules else []
            listed = await self._listed(whole) if links else {}
            for link in links:
                path = whole.below(link.path)
                if whole.depth == MAX_DEPTH or len(parts.submodules) == MAX_SUBMODULES:
                    most_of = f"{MAX_SUBMODULES} submodules, {MAX_DEPTH} deep"
                    raise RemoteOverLimit(f"submodule `{printable_path(path)}` is one too many: at most {most_of}")
                if link.path not in listed:
                    raise BadSource(f"submodule `{printable_path(path)}` is not in `{LIST}`")
                into = module_at(self.repository, len(parts.submodules))
                parts = replace(parts, submodules=(*parts.submodules, Submodule(path, link.id)))
                waiting.append(await self._submodule(replace(whole, path=path), listed[link.path], link.id, into))
        (self.repository / _RECORD).write_bytes(encode(parts))
        return parts

    async def _listed(self, whole: _Whole) -> Mapping[bytes, Link]:
        from runner.git.common import read_file_at

        return links_of(await read_file_at(self.git, whole.repository, whole.commit, LIST, limit=LIST_BYTES) or b"")

    async def _submodule(self, above: _Whole, link: Link, commit: str, into: Path) -> _Whole:
        """Fetch a submodule: from the user's own clone if that has it, else by its URL."""
        local = above.local / "modules" / link.name if above.local is not None and _NAME.fullmatch(link.name) else None
        found = _Whole(path=above.path, repository=into, commit=commit, url=None, local=local, depth=above.depth + 1)
        into.parent.mkdir(exist_ok=True)
        if local is not None and self.wanted.within is None and (local / "HEAD").is_file():
            with suppress(UnknownCommit):
                await self.git.fetch(local, commit, into=into, depth=1)
                return found
        what = f"submodule `{printable_path(above.path)}`"
        try:
            url = resolve_link(link.url, above.url)
        except BadUrl as fault:
            raise BadUrl(f"{what}: {fault.message}", hint=fault.hint) from None
        if self.wanted.untrusted and self.git.uses_keys(url):
            hint = "apply it without --untrusted"
            raise Untrusted(f"an untrusted manifest may not reach {what} with your keys", hint=hint)
        await self.git.fetch_url(url, commit, into=into, depth=1)
        return replace(found, url=url, local=None)

    async def _lfs_files(self, whole: _Whole, entries: Sequence[TreeEntry]) -> list[LfsFile]:
        small = [e for e in entries if e.mode in (FILE, EXECUTABLE) and LEAST_POINTER <= e.size <= MOST_POINTER]
        texts = await self.git.read_blobs(whole.repository, [entry.id for entry in small])
        found = ((entry, pointer_in(text)) for entry, text in zip(small, texts, strict=True))
        return [LfsFile(whole.below(one.path), one.mode, *pointer) for one, pointer in found if pointer is not None]

    async def _fetch_lfs(self, whole: _Whole, files: Sequence[LfsFile]) -> None:
        """Bring the content of files into the private repository: from the user's own clone, else from the server."""
        from runner.git.common import in_thread

        if whole.url is None:
            assert whole.local is not None  # the one or the other
            await in_thread(_copy_objects, whole.local, self.repository, files)
        else:
            await self.git.fetch_lfs(whole.url, whole.repository, whole.commit, files, into=self.repository)


def _copy_objects(local: Path, repository: Path, files: Sequence[LfsFile]) -> None:
    with disk.Directories(local) as directories:
        for file in files:
            place, to = object_at(Path(), file.sha256), object_at(repository, file.sha256)
            try:
                content = disk.read(directories, os.fsencode(place))
                to.parent.mkdir(parents=True, exist_ok=True)
                _write_checked(content, to, file)
            except (FileNotFoundError, NotADirectoryError) as error:
                name = printable_path(file.path)
                raise BadSource(
                    f"the content of `{name}`, a file of LFS, is not in `{local}`", hint="git lfs fetch"
                ) from error


def link_objects(mirror: Path, repository: Path, files: Sequence[LfsFile]) -> None:
    """Link objects of a mirror into a private repository; they are checked when they are placed."""
    for file in files:
        to = object_at(repository, file.sha256)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.unlink(missing_ok=True)
        try:
            os.link(object_at(mirror, file.sha256), to)
        except FileNotFoundError as error:
            raise BadSource(f"the server has no content for `{printable_path(file.path)}`, a file of LFS") from error


def _write_checked(content: Iterable[bytes], to: Path, file: LfsFile) -> None:
    with disk.Directories(to.parent) as directories:
        disk.remove(directories, os.fsencode(to.name))
        disk.write(directories, os.fsencode(to.name), FILE, checked(content, file))


def checked(content: Iterable[bytes], file: LfsFile) -> Iterator[bytes]:
    """Yield the content of a file of LFS. Raises ``HostileTree`` at its end when it is not what its pointer says."""
    digest, size = hashlib.sha256(), 0
    for chunk in content:
        check_cancelled()
        digest.update(chunk)
        size += len(chunk)
        if size > file.size:
            break
        yield chunk
    if size != file.size or digest.hexdigest() != file.sha256:
        raise HostileTree(f"the content of `{printable_path(file.path)}` is not what its pointer of LFS says")


def place_lfs(repository: Path, tree: Path, files: Sequence[LfsFile]) -> None:
    """Put the content of files in place of their pointers."""
    with disk.Directories(tree) as directories, disk.Directories(repository) as objects:
        for file in files:
            content = disk.read(objects, os.fsencode(object_at(Path(), file.sha256)))
            disk.remove(directories, file.path)
            disk.write(directories, file.path, file.mode, checked(content, file))


def make_empty(tree: Path, path: bytes) -> Path:
    """Make an empty directory in a tree, through no link, and return it. Raises ``HostileTree``."""
    with disk.Directories(tree) as directories:
        if os.listdir(directories.open(path, make=True)):
            raise HostileTree(f"`{printable_path(path)}` is a submodule and has files of the whole")
    return tree / os.fsdecode(path)


def lfs_changes(tree: Path | int, files: Sequence[LfsFile]) -> dict[bytes, str]:
    """Map the files that are not as they were placed to ``missing``, ``mode`` or ``content``."""
    with disk.Directories(tree) as directories:
        return {file.path: word for file in files if (word := _lfs_change(directories, file))}


def _lfs_change(directories: disk.Directories, file: LfsFile) -> str | None:
    folder, _, name = file.path.rpartition(b"/")
    try:
        status = os.lstat(name, dir_fd=directories.open(folder))
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    if not stat.S_ISREG(status.st_mode) or disk.mode_of(status) != file.mode:
        return "mode"
    return None if status.st_size == file.size and holds(directories, file) else "content"


def holds(directories: disk.Directories, file: LfsFile) -> bool:
    """Tell whether a regular file has the content that its pointer names."""
    digest = hashlib.sha256()
    for chunk in disk.read(directories, file.path):
        check_cancelled()
        digest.update(chunk)
    return digest.hexdigest() == file.sha256


def submodule_changes(
    tree: Path | int, path: bytes, entries: Sequence[TreeEntry], inner: Collection[bytes]
) -> tuple[dict[bytes, str], int]:
    """Map the files of a submodule that differ to how, and count new ones. ``inner`` are parts of its own."""
    try:
        with disk.Directories(tree) as directories:
            directory = directories.open(path)
            own = [entry for entry in entries if entry.path not in inner]
            differ = disk.differences(directory, own)
            new = disk.extras(directory, [*own, *(TreeEntry(name, GITLINK, "", 0) for name in inner)])
            return {path + b"/" + name: word for name, word in differ.items()}, len(new)
    except (FileNotFoundError, NotADirectoryError):
        return {path: "missing"}, 0
