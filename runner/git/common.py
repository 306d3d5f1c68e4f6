"""The part of the git port that both adapters share: it needs only a commit's tree entries and a disk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

import trio
from msgspec import Struct
from msgspec.structs import replace

from runner.core.errors import BadRef, BadSource, CheckoutDiffers, GitFailed, GitMissing, HostileTree, UnknownCommit
from runner.core.ids import is_commit_id
from runner.core.plural import plural
from runner.core.sanitize import printable_path
from runner.git import bundles, disk, parts, source
from runner.git.ignore import IgnoreRules
from runner.git.tree import EXECUTABLE, FILE, GITLINK, carried_over, changes, check_branch, check_commit_id
from runner.policy.names import collisions, parents
from runner.ports.git import (
    Change,
    LfsFile,
    PartChanges,
    Parts,
    PartsRequest,
    Snapshot,
    SnapshotOptions,
    SourceRepository,
    TreeEntry,
)

_GIT = "install git"

P = ParamSpec("P")
T = TypeVar("T")


class SnapshotContent(Struct, frozen=True):
    """The content of a snapshot: files found on the disk, entries kept from the base. ``left_out`` is a count."""

    found: list[disk.DiskFile]
    kept: list[TreeEntry]
    left_out: int

    def snapshot(self, commit: str, tree: str, base: str | None) -> Snapshot:
        paths = {each.path for each in self.found} | {entry.path for entry in self.kept}
        return Snapshot(
            commit=commit,
            tree=tree,
            base=base,
            entries=len(paths),
            ignored=self.left_out,
            collisions=tuple(collisions(paths).items()),
        )


class ObjectReader(Protocol):
    async def tree_entry(self, git: Path, commit: str, path: bytes) -> TreeEntry | None: ...

    async def read_blobs(self, repository: Path, ids: Sequence[str]) -> list[bytes]: ...


class GitAdapter(ABC):
    """A ``Git`` without the parts that move or store objects."""

    @abstractmethod
    async def find_commit(self, git: Path, name: str) -> str | None:
        """Return the commit that a full ref name, ``HEAD`` or a commit id means; ``None`` if there is none."""

    @abstractmethod
    async def tree_entries(self, git: Path, commit: str) -> list[TreeEntry]:
        """List the tree entries of a commit that exists, submodules included."""

    @abstractmethod
    async def read_blobs(self, repository: Path, ids: Sequence[str]) -> list[bytes]: ...

    @abstractmethod
    async def tree_entry(self, git: Path, commit: str, path: bytes) -> TreeEntry | None:
        """Return the entry of a commit at one path, also a directory's."""

    async def read_ref(self, local: source.LocalRepository, name: str) -> str | None:
        """Return the id that ``HEAD`` or a full ref name of a user's repository stands for."""
        if local.has_reftable:
            raise BadSource(f"the refs of `{local.top}` are in a reftable, which cannot be read here", hint=_GIT)
        return await in_thread(source.read_ref, local, name)

    async def current_branch(self, local: source.LocalRepository) -> str | None:
        """Return the branch that HEAD of a user's repository is on."""
        return await in_thread(source.read_branch, local)

    async def repository_with(self, path: Path, commit: str, within: Path | None) -> source.LocalRepository:
        """Return the user's repository at ``path``. Raises ``UnknownCommit`` when it lacks the commit."""
        check_commit_id(commit)
        local = await in_thread(source.find_repository, path, within)
        with source.open_view(local, like=commit) as view:
            if await self.find_commit(view, commit) != commit:
                raise UnknownCommit(f"`{commit}` is not a commit of `{local.top}`")
        return local

    async def read_file(
        self, path: Path, commit: str, name: str, *, limit: int, within: Path | None = None
    ) -> bytes | None:
        local = await self.repository_with(path, commit, within)
        with source.open_view(local, like=commit) as view:
            return await read_file_at(self, view, commit, name, limit=limit)

    async def initialise(self, tree: Path, *, branch: str) -> None:
        check_branch(branch)
        await in_thread(disk.init_work_tree, tree, branch)

    async def inspect(self, path: Path, *, within: Path | None = None) -> SourceRepository:
        local = await in_thread(source.find_repository, path, within)
        head, changed = await self._uncommitted(local)
        return SourceRepository(local.top, head, await self.current_branch(local), bool(changed))

    async def resolve(self, path: Path, *, branch: str | None, commit: str | None, within: Path | None = None) -> str:
        self.check_names(branch, commit)
        if commit is not None:
            await self.repository_with(path, commit, within)
            return commit
        local = await in_thread(source.find_repository, path, within)
        found = await self._commit_at(local, "HEAD" if branch is None else f"refs/heads/{branch}")
        if found is None:
            wanted = "commit yet" if branch is None else f"branch `{branch}`"
            raise UnknownCommit(f"`{local.top}` has no {wanted}")
        return found

    def check_names(self, branch: str | None, commit: str | None) -> None:
        """Raise ``BadRef`` for a name outside the grammar."""
        if branch is not None:
            check_branch(branch)
        if commit is not None and not is_commit_id(commit):
            raise BadRef(f"`{commit}` is not a full commit id", hint="a commit is 40 or 64 lower-case hex digits")

    async def copy_uncommitted(self, path: Path, *, into: Path, within: Path | None = None) -> int:
        local = await in_thread(source.find_repository, path, within)
        _, changed = await self._uncommitted(local)
        await in_thread(source.copy_paths, local, changed, into)
        return len(changed)

    async def fetch_parts(self, repository: Path, commit: str, wanted: PartsRequest) -> Parts:
        return await parts.PartsFetch(self, repository, wanted).all(commit)

    @abstractmethod
    def uses_keys(self, url: str) -> bool:
        """Tell whether the server of a URL would see credentials of this host's user."""

    @abstractmethod
    async def fetch_url(self, url: str, commit: str, *, into: Path, depth: int | None) -> None: ...

    @abstractmethod
    async def fetch(
        self, path: Path, commit: str, *, into: Path, depth: int | None, within: Path | None = None
    ) -> None: ...

    @abstractmethod
    async def materialise(self, repository: Path, commit: str, into: Path) -> Sequence[TreeEntry]: ...

    async def fetch_lfs(self, url: str, repository: Path, commit: str, files: Sequence[LfsFile], *, into: Path) -> None:
        """Bring the content of a commit's files of LFS from a server into the private repository ``into``."""
        raise GitMissing(f"files of LFS of `{url}` are fetched by the git program only", hint=_GIT)

    async def place_parts(self, repository: Path, tree: Path) -> list[TreeEntry]:
        """Put the parts of a private repository into a checkout; return the entries of its submodules."""
        found = await in_thread(parts.read_parts, repository)
        placed: list[TreeEntry] = []
        for number, one in enumerate(found.submodules):
            into = await in_thread(parts.make_empty, tree, one.path)
            entries = await self.materialise(parts.module_at(repository, number), one.commit, into)
            placed += [replace(entry, path=one.path + b"/" + entry.path) for entry in entries]
        await in_thread(parts.place_lfs, repository, tree, found.lfs)
        return placed

    async def part_changes(self, repository: Path, tree: Path | int) -> PartChanges:
        found, changed, new = await in_thread(parts.read_parts, repository), dict[bytes, str](), 0
        for number, one in enumerate(found.submodules):
            inner = {path.removeprefix(one.path + b"/") for path in found.directly_in(one.path)}
            entries = await self.entries(parts.module_at(repository, number), one.commit)
            differ, more = await in_thread(parts.submodule_changes, tree, one.path, entries, inner)
            changed, new = changed | differ, new + more
        lfs = await in_thread(parts.lfs_changes, tree, found.lfs)
        return PartChanges(changed, lfs, frozenset(file.path for file in found.lfs), new)

    async def unbundle(self, bundle: Path, shallow: Path | None, *, into: Path) -> None:
        await in_thread(bundles.prepare, bundle, shallow, into)
        await self.unpack(bundle, into)

    @abstractmethod
    async def unpack(self, bundle: Path, repository: Path) -> None:
        """Add the objects of a bundle to a repository."""

    async def create_empty(self, repository: Path) -> None:
        await in_thread(disk.init_private, repository, like="0" * 40)

    async def entries(self, repository: Path, commit: str) -> list[TreeEntry]:
        return [entry for entry in await self.checked_entries(repository, commit) if entry.mode != GITLINK]

    async def changes(self, repository: Path, base: str | None, commit: str) -> list[Change]:
        return changes(await self.checked_entries(repository, base), await self.checked_entries(repository, commit))

    async def compare(self, repository: Path, commit: str, tree: Path | int) -> Mapping[bytes, str]:
        outside = (await in_thread(parts.read_parts, repository)).directly_in()
        entries = [entry for entry in await self.entries(repository, commit) if entry.path not in outside]
        found = await in_thread(disk.differences, tree, entries)
        expected = [*entries, *(TreeEntry(path, GITLINK, "", 0) for path in outside)]
        found |= dict.fromkeys(await in_thread(disk.extras, tree, expected), "extra")
        changed = await self.part_changes(repository, tree)
        return {**found, **changed.submodules, **changed.lfs}

    async def check_commit(self, git: Path, commit: str) -> None:
        check_commit_id(commit)
        if disk.is_loose_commit(git / "objects", commit):  # as every commit of our own is: that needs no program
            return
        if await self.find_commit(git, commit) != commit:
            raise UnknownCommit(f"`{commit}` is not a commit of `{git}`")

    async def checked_entries(self, repository: Path, commit: str | None) -> list[TreeEntry]:
        """List the tree entries of a commit, none for ``None``. Raises ``UnknownCommit``."""
        if commit is None:
            return []
        await self.check_commit(repository, commit)
        return await self.tree_entries(repository, commit)

    async def select_content(
        self, repository: Path, tree: Path, base: str | None, options: SnapshotOptions
    ) -> SnapshotContent:
        """Decide which files and entries a snapshot holds."""
        entries = await self.checked_entries(repository, base)
        outside = (await in_thread(parts.read_parts, repository)).paths
        options = replace(options, exclude=options.exclude | outside)
        files = [entry for entry in entries if entry.path.rpartition(b"/")[2] == b".gitignore" and _is_file(entry)]
        texts = await self.read_blobs(repository, [entry.id for entry in files])
        rules = {entry.path.rpartition(b"/")[0]: text for entry, text in zip(files, texts, strict=True)}
        return await in_thread(_select_content, tree, entries, IgnoreRules(rules.get), options)

    async def _uncommitted(self, local: source.LocalRepository) -> tuple[str | None, list[bytes]]:
        head = await self._commit_at(local, "HEAD")
        entries = []
        if head is not None:
            with source.open_view(local, like=head) as view:
                entries = await self.tree_entries(view, head)
        return head, await in_thread(source.uncommitted_paths, local, entries)

    async def _commit_at(self, local: source.LocalRepository, name: str) -> str | None:
        """Return the commit that a name stands for, if the repository has it."""
        id = await self.read_ref(local, name)
        if id is None:
            return None
        with source.open_view(local, like=id) as view:
            return await self.find_commit(view, id)


async def read_file_at(reader: ObjectReader, git: Path, commit: str, name: str, *, limit: int) -> bytes | None:
    """Read a file of a commit that the git directory has, as ``Git.read_file`` does."""
    found = await reader.tree_entry(git, commit, name.encode())
    if found is None:
        return None
    if not _is_file(found):
        raise HostileTree(f"`{name}` of {commit[:12]} is not a regular file")
    if found.size > limit:
        raise HostileTree(f"`{name}` of {commit[:12]} has {found.size} bytes, more than the limit of {limit}")
    return (await reader.read_blobs(git, [found.id]))[0]


def _is_file(entry: TreeEntry) -> bool:
    return entry.mode in (FILE, EXECUTABLE)


def _select_content(
    tree: Path, entries: Sequence[TreeEntry], rules: IgnoreRules, options: SnapshotOptions
) -> SnapshotContent:
    tracked = {entry.path for entry in entries if entry.mode != GITLINK}
    found, left_out = disk.walk(tree, ignores=rules, tracked=tracked, exclude=options.exclude)
    keep = carried_over(entries, (each.path for each in found), options)
    hidden = parents(entry.path for entry in keep)  # a file where a kept entry needs a directory
    rest = [each for each in found if each.path not in hidden]
    return SnapshotContent(rest, keep, left_out + len(found) - len(rest))


def check_same(into: Path, commit: str, wrong: Mapping[bytes, str]) -> None:
    """Raise ``CheckoutDiffers`` when anything is wrong."""
    if wrong:
        path = min(wrong)
        count = plural(len(wrong), "path")
        raise CheckoutDiffers(
            f"`{into}` differs from {commit} in {count}", hint=f"`{printable_path(path)}`: {wrong[path]}"
        )


async def in_thread(work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Do blocking work in a thread; an ``OSError`` becomes ``GitFailed``.

    Cancelling takes effect where the work checks for it.
    """
    try:
        return await trio.to_thread.run_sync(partial(work, *args, **options))
    except OSError as error:
        raise GitFailed(str(error)) from error
