"""The adapter over dulwich, for hosts without git: the same results, several times slower.

It uses the library's object store, refs and index, never its porcelain, and reads no configuration. Only SHA-1
repositories on this host; blobs are read whole, one at a time.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from dulwich import __version__
from dulwich.errors import ApplyDeltaError, ChecksumMismatch, FileFormatException, ObjectFormatException
from dulwich.index import Index, IndexEntry, index_entry_from_stat
from dulwich.object_store import DiskObjectStore, MissingObjectFinder
from dulwich.objects import Commit, ObjectID, ShaFile, Tree
from dulwich.pack import generate_unpacked_objects, write_pack_data
from dulwich.refs import DiskRefsContainer, Ref
from trio.from_thread import check_cancelled

from runner.core.errors import BadSource, CheckoutDiffers, GitFailed, GitMissing, HostileTree, UrlUnsupported
from runner.core.ids import is_commit_id
from runner.core.sanitize import excerpt
from runner.git import bundles, disk, source
from runner.git.common import GitAdapter, SnapshotContent, check_same, in_thread
from runner.git.patches import write_change
from runner.git.tree import (
    EXECUTABLE,
    FILE,
    GITLINK,
    LINK,
    changes,
    check_branch,
    check_names,
    commit_object,
)
from runner.policy.names import parents
from runner.ports.git import AgentCommit, Change, ResolvedRef, Snapshot, SnapshotOptions, TreeEntry

_TREE = 0o040000
_COMMIT_TYPE = 1


class GitDulwich(GitAdapter):
    name = "dulwich"
    version = __version__

    async def find_commit(self, git: Path, name: str) -> str | None:
        return await in_thread(_find_commit, git, name)

    async def tree_entries(self, git: Path, commit: str) -> list[TreeEntry]:
        return await in_thread(_tree_entries, git, commit)

    async def tree_entry(self, git: Path, commit: str, path: bytes) -> TreeEntry | None:
        return await in_thread(_tree_entry, git, commit, path)

    async def read_blobs(self, repository: Path, ids: Sequence[str]) -> list[bytes]:
        return await in_thread(_read_blobs, repository, ids)

    async def fetch(
        self, path: Path, commit: str, *, into: Path, depth: int | None, within: Path | None = None
    ) -> None:
        local = await self.repository_with(path, commit, within)
        await in_thread(disk.init_private, into, like=commit)
        with source.open_view(local, like=commit, inside=into) as view:
            await in_thread(_copy_closure, view, commit, into, depth)
        check_names(await in_thread(_tree_entries, into, commit, strict=True))

    def uses_keys(self, url: str) -> bool:
        return False

    async def resolve_url(self, url: str, *, branch: str | None, commit: str | None) -> ResolvedRef:
        raise _url_needs_git(url)

    async def fetch_url(self, url: str, commit: str, *, into: Path, depth: int | None) -> None:
        raise _url_needs_git(url)

    async def read_url(self, url: str, commit: str, name: str, *, depth: int | None, limit: int) -> bytes | None:
        raise _url_needs_git(url)

    async def bundle(self, repository: Path, commits: Sequence[str], to: Path) -> None:
        await in_thread(_bundle, repository, commits, to)

    async def unpack(self, bundle: Path, repository: Path) -> None:
        await in_thread(_unpack, bundle, repository)

    async def quarantine(self, repository: Path, bundle: bytes, base: str, *, into: Path) -> Sequence[AgentCommit]:
        raise _quarantine_needs_git()

    async def accept(self, repository: Path, quarantine: Path, base: str, commit: str, *, to: Path) -> str:
        raise _quarantine_needs_git()

    async def check_out(
        self, repository: Path, commit: str, *, into: Path, branch: str, origin: str | None = None
    ) -> None:
        check_branch(branch)
        entries = await self.checked_entries(repository, commit)
        await in_thread(disk.check_empty, into)
        await in_thread(disk.init_agent_copy, into / ".git", repository, commit, branch=branch, origin=origin)
        await in_thread(_write, repository, entries, into, index=into / ".git" / "index")
        await self.place_parts(repository, into)
        head = await self.find_commit(into / ".git", "HEAD")
        if head != commit:
            raise CheckoutDiffers(f"HEAD of `{into}` is {head}, not {commit}")

    async def snapshot(self, repository: Path, tree: Path, base: str | None, options: SnapshotOptions) -> Snapshot:
        content = await self.select_content(repository, tree, base, options)
        made = await in_thread(_store, repository, tree, content)
        commit = await in_thread(_store_commit, repository, commit_object(made, base, options))
        return await in_thread(content.snapshot, commit, made, base)

    async def rejected_files(self, repository: Path, changes: Sequence[Change]) -> Mapping[bytes, str]:
        return {}

    async def patch(self, repository: Path, base: str | None, commit: str, to: Path) -> int:
        before = await self.checked_entries(repository, base)
        after = await self.checked_entries(repository, commit)
        return await in_thread(_patch, repository, before, after, to)

    async def materialise(self, repository: Path, commit: str, into: Path) -> Sequence[TreeEntry]:
        entries = await self.entries(repository, commit)
        await in_thread(disk.check_empty, into)
        await in_thread(_write, repository, entries, into, index=None)
        inner = await self.place_parts(repository, into)
        check_same(into, commit, await self.compare(repository, commit, into))
        return [*entries, *inner]


def _quarantine_needs_git() -> GitMissing:
    return GitMissing("commits of an agent are taken over by the git program only", hint="install git")


def _url_needs_git(url: str) -> UrlUnsupported:
    return UrlUnsupported(f"`{url}` cannot be cloned without git", hint="install git")


@contextmanager
def _objects(git: Path) -> Iterator[DiskObjectStore]:
    """Open the objects of a git directory; a missing or damaged one raises ``GitFailed``."""
    store = DiskObjectStore(os.fspath(source.common(git) / "objects"))
    try:
        yield store
    except (KeyError, zlib.error, ApplyDeltaError, ChecksumMismatch, FileFormatException) as error:
        raise GitFailed(f"an object of `{git}` is missing or damaged: {error!r}") from error
    finally:
        store.close()


def _refs(git: Path) -> DiskRefsContainer:
    return DiskRefsContainer(os.fspath(source.common(git)), worktree_path=os.fspath(git))


def _id(text: str) -> ObjectID:
    return ObjectID(text.encode())


def _find_commit(git: Path, name: str) -> str | None:
    try:
        id = _id(name) if is_commit_id(name) else _refs(git)[Ref(name.encode())]
    except KeyError:
        return None
    if len(id) != 40:
        raise BadSource(f"`{git}` may have SHA-256 ids, which cannot be read here", hint="install git")
    with _objects(git) as store:
        return id.decode() if id in store and isinstance(store[id], Commit) else None


def _tree_entries(git: Path, commit: str, *, strict: bool = False) -> list[TreeEntry]:
    """List the entries in git's order; with ``strict``, trees that git would not have written are ``HostileTree``."""
    found: list[TreeEntry] = []
    with _objects(git) as store:
        head = store[_id(commit)]
        assert isinstance(head, Commit)
        waiting = [(b"", _TREE, head.tree)]
        while waiting:
            path, mode, id = waiting.pop()
            if mode & 0o170000 == _TREE:
                check_cancelled()
                tree = store[id]
                if not isinstance(tree, Tree):
                    raise GitFailed(f"`{id.decode()}` is not a tree")
                if strict:
                    _check_tree(tree)
                below = [(path + b"/" + e.path if path else e.path, e.mode, e.sha) for e in tree.iteritems()]
                waiting.extend(reversed(below))
            else:
                size = 0 if mode == GITLINK else len(store.get_raw(id)[1])
                found.append(TreeEntry(path, _canonical(mode), id.decode(), size))
    return found


def _tree_entry(git: Path, commit: str, path: bytes) -> TreeEntry | None:
    with _objects(git) as store:
        head = store[_id(commit)]
        assert isinstance(head, Commit)
        mode, id = _TREE, head.tree
        for name in path.split(b"/"):
            tree = store[id] if mode & 0o170000 == _TREE else None
            if not isinstance(tree, Tree) or name not in tree:
                return None
            mode, id = tree[name]
        if mode & 0o170000 == _TREE:
            return TreeEntry(path, _TREE, id.decode(), 0)
        size = 0 if mode == GITLINK else len(store.get_raw(id)[1])
        return TreeEntry(path, _canonical(mode), id.decode(), size)


def _check_tree(tree: Tree) -> None:
    try:
        tree.check()
    except ObjectFormatException as error:
        raise HostileTree(f"tree `{tree.id.decode()}` is malformed: {error}") from error


def _canonical(mode: int) -> int:
    """Return the mode that git writes today: old trees have modes such as 100664."""
    if mode in (LINK, GITLINK):
        return mode
    return EXECUTABLE if mode & 0o100 else FILE


def _read_blobs(repository: Path, ids: Sequence[str]) -> list[bytes]:
    with _objects(repository) as store:
        return [store.get_raw(_id(id))[1] for id in ids]


def _copy_closure(view: Path, commit: str, into: Path, depth: int | None) -> None:
    """Pack a commit's closure, cut at ``depth`` commits and where the source is cut, into ``into``."""
    wants = [_id(commit)]
    listed = view / "shallow"
    shallow = {ObjectID(line) for line in listed.read_bytes().split()} if listed.is_file() else set()
    with _objects(view) as ours, _objects(into) as store:
        if depth is not None:
            shallow |= _commits_at_depth(ours, commit, depth, shallow)
        missing = MissingObjectFinder(
            ours, haves=[], wants=wants, shallow=shallow, get_parents=lambda c: [] if c.id in shallow else c.parents
        )
        ids = list(missing)
        store.add_pack_data(len(ids), generate_unpacked_objects(ours, ids))
    if cut := {id for id, _ in ids} & shallow:
        (into / "shallow").write_bytes(b"".join(id + b"\n" for id in sorted(cut)))


def _bundle(repository: Path, commits: Sequence[str], to: Path) -> None:
    listed = repository / "shallow"
    shallow = {ObjectID(line) for line in listed.read_bytes().split()} if listed.is_file() else set()
    with _objects(repository) as store, to.open("xb") as file:
        missing = MissingObjectFinder(
            store,
            haves=[],
            wants=[_id(commit) for commit in commits],
            shallow=shallow,
            get_parents=lambda c: [] if c.id in shallow else c.parents,
        )
        ids = list(missing)
        file.write(bundles.header(commits))
        records = generate_unpacked_objects(store, ids)
        write_pack_data(file.write, records, num_records=len(ids), object_format=store.object_format)


def _unpack(bundle: Path, repository: Path) -> None:
    with _objects(repository) as store, bundle.open("rb") as file:
        bundles.skip_header(file)
        target, commit, abort = store.add_pack()
        try:
            shutil.copyfileobj(file, target)
            commit()
        except AssertionError as error:  # as dulwich says that a pack is no pack
            abort()
            raise GitFailed(f"the pack of `{bundle}` is damaged: {excerpt(str(error))}") from error
        except BaseException:
            abort()
            raise


def _commits_at_depth(store: DiskObjectStore, commit: str, depth: int, shallow: set[ObjectID]) -> set[ObjectID]:
    """List the commits ``depth`` steps away, counted along the shortest path."""
    content = level = {_id(commit)}
    for _ in range(depth - 1):
        above = {id for id in level - shallow for id in _parents(store, id)} - content
        if not above:
            return set()
        content, level = content | above, above
    return level


def _parents(store: DiskObjectStore, id: ObjectID) -> list[ObjectID]:
    commit = store[id]
    assert isinstance(commit, Commit)
    return commit.parents


def _write(repository: Path, entries: Sequence[TreeEntry], into: Path, *, index: Path | None) -> None:
    """Write files and, if wanted, the index that a checkout of them has."""
    made: dict[bytes, IndexEntry] = {}
    with _objects(repository) as store, disk.Directories(into) as directories:
        for entry in entries:
            check_cancelled()
            if entry.mode == GITLINK:
                directories.open(entry.path, make=True)
                made[entry.path] = IndexEntry((0, 0), (0, 0), 0, 0, GITLINK, 0, 0, 0, _id(entry.id))
            else:
                status = disk.write(directories, entry.path, entry.mode, [store.get_raw(_id(entry.id))[1]])
                made[entry.path] = index_entry_from_stat(status, _id(entry.id), mode=entry.mode)
    if index is not None:
        listed = Index(os.fspath(index), read=False)
        for path, row in made.items():
            listed[path] = row
        listed.write()


def _store(repository: Path, tree: Path, content: SnapshotContent) -> str:
    """Store the files of a snapshot and the trees above them; return the id of the top one."""
    entries = [(entry.path, entry.mode, entry.id) for entry in content.kept]
    with _objects(repository) as store:
        with disk.Directories(tree) as directories:
            for each in content.found:
                check_cancelled()
                id = disk.blob_id_of(directories, each, like="0" * 40)
                if _id(id) not in store:
                    id = disk.store_blob(repository / "objects", directories, each, like="0" * 40)
                entries.append((each.path, each.mode, id))
        trees = {folder: Tree() for folder in (b"", *parents(path for path, _, _ in entries))}
        for path, mode, id in entries:
            folder, _, name = path.rpartition(b"/")
            trees[folder].add(name, mode, _id(id))
        for path in sorted(trees, key=len, reverse=True):  # what is inside comes before what it is in
            store.add_object(trees[path])
            if path:
                folder, _, name = path.rpartition(b"/")
                trees[folder].add(name, _TREE, trees[path].id)
        return trees[b""].id.decode()


def _store_commit(repository: Path, body: bytes) -> str:
    with _objects(repository) as store:
        commit = ShaFile.from_raw_string(_COMMIT_TYPE, body)
        store.add_object(commit)
        return commit.id.decode()


def _patch(repository: Path, before: Sequence[TreeEntry], after: Sequence[TreeEntry], to: Path) -> int:
    old = {entry.path: entry for entry in before}
    with _objects(repository) as store, to.open("xb") as file:

        def content(entry: TreeEntry) -> bytes:
            if entry.mode == GITLINK:
                return b"Subproject commit %s\n" % entry.id.encode()
            return store.get_raw(_id(entry.id))[1]

        for change in changes(before, after):
            check_cancelled()
            write_change(file, change.path, old.get(change.path), change.entry, content)
        return file.tell()
