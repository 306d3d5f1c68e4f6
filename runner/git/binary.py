"""The adapter over the host's git binary.

Git runs on the runner's own repositories, whose configuration is four lines. From a user's repository it reads only
objects, through a view; an agent's is never read again. The environment switches the host's configuration off.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio
from trio.from_thread import check_cancelled

from runner.core.errors import CheckoutDiffers, GitFailed, HostileTree, RemoteOverLimit, RunnerError
from runner.git import bundles, disk, source
from runner.git._profile import fetch_arguments
from runner.git._run import ProcessLimits, version
from runner.git.commands import GitCommands, check_exit
from runner.git.common import GitAdapter, SnapshotContent, check_same, in_thread, read_file_at
from runner.git.mirror import Mirror, evict
from runner.git.parts import link_objects, object_at, read_parts
from runner.git.quarantine import accept, unpack
from runner.git.remote import NO_REMOTES, RemoteAccess, RemoteClient
from runner.git.tree import (
    EXECUTABLE,
    FILE,
    GITLINK,
    check_branch,
    check_commit_id,
    check_names,
    commit_object,
    hasher,
)
from runner.policy.names import read_by_git
from runner.ports.git import AgentCommit, Change, LfsFile, ResolvedRef, Snapshot, SnapshotOptions, TreeEntry
from runner.spec.checkout import uses_keys

_REJECTED = re.compile(r"^error: object ([0-9a-f]+): (.*)", re.MULTILINE)
_MIN_BATCH = 2000  # files to check out at once; a process costs as much as a hundred files


class GitBinary(GitCommands, GitAdapter):
    name = "git"

    def __init__(self, program: str, remote_access: RemoteAccess = NO_REMOTES) -> None:
        super().__init__(program)
        self.remote_access = remote_access
        self._remotes = RemoteClient(program, remote_access)

    @property
    def version(self) -> tuple[int, ...]:
        return version(self.program)

    async def fetch(
        self, path: Path, commit: str, *, into: Path, depth: int | None, within: Path | None = None
    ) -> None:
        local = await self.repository_with(path, commit, within)
        await in_thread(disk.init_private, into, like=commit)
        with source.open_view(local, like=commit, inside=into) as view:
            fetched = await self.run_git(into, *fetch_arguments(depth), os.fsencode(view), commit)
        if fetched.code and "fsck error" in fetched.stderr:
            raise HostileTree(f"git refuses objects of `{local.top}`: {fetched.stderr}")
        check_exit("fetch", fetched)
        await in_thread(check_names, await self.tree_entries(into, commit))

    async def resolve_url(self, url: str, *, branch: str | None, commit: str | None) -> ResolvedRef:
        self.check_names(branch, commit)
        return await self._remotes.resolve(url, branch=branch, commit=commit)

    async def fetch_url(self, url: str, commit: str, *, into: Path, depth: int | None) -> None:
        async with self._mirror(url, commit, depth) as mirror:
            await in_thread(mirror.copy_ready, commit, into)

    def uses_keys(self, url: str) -> bool:
        return uses_keys(url, self.remote_access.credentials)

    async def fetch_lfs(self, url: str, repository: Path, commit: str, files: Sequence[LfsFile], *, into: Path) -> None:
        mirror = Mirror.for_url(self.remote_access.mirrors, f"lfs {url}", None)
        async with mirror.lock():
            mirror.path.mkdir(mode=0o700, exist_ok=True)
            if not all(object_at(mirror.path, file.sha256).is_file() for file in files):
                await self._remotes.fetch_lfs(
                    repository, url, commit, into=mirror.path, most=max(f.size for f in files)
                )
            os.utime(mirror.path)
            await in_thread(link_objects, mirror.path, into, files)
            await in_thread(evict, self.remote_access.mirrors, self.remote_access.mirror_limit)

    async def read_url(self, url: str, commit: str, name: str, *, depth: int | None, limit: int) -> bytes | None:
        async with self._mirror(url, commit, depth) as mirror:
            ready = GitCommands(self.program, objects=mirror.ready(commit))
            return await read_file_at(ready, mirror.repository, commit, name, limit=limit)

    @asynccontextmanager
    async def _mirror(self, url: str, commit: str, depth: int | None) -> AsyncIterator[Mirror]:
        """Lock the mirror of a URL for the length of the block, with a commit ready in it."""
        check_commit_id(commit)
        mirror = Mirror.for_url(self.remote_access.mirrors, url, depth)
        async with mirror.lock():
            if not await in_thread(mirror.has_ready, commit):
                await self._update(mirror, url, commit, depth)
                await in_thread(evict, self.remote_access.mirrors, self.remote_access.mirror_limit)
            yield mirror

    async def _update(self, mirror: Mirror, url: str, commit: str, depth: int | None) -> None:
        """Fetch a commit into a mirror; a damaged mirror is removed and made again once."""
        empty = await in_thread(mirror.prepare, like=commit)
        try:
            await self._fill(mirror, url, commit, depth, empty=empty)
        except RunnerError as error:
            damaged = isinstance(error, GitFailed)
            if empty or damaged:
                await in_thread(mirror.remove)
            if empty or not damaged:
                raise
            await self._update(mirror, url, commit, depth)

    async def _fill(self, mirror: Mirror, url: str, commit: str, depth: int | None, *, empty: bool) -> None:
        await self._remotes.fetch(mirror.repository, url, commit, depth=depth)
        await self.check_commit(mirror.repository, commit)
        exact = mirror.repository
        if not empty:
            exact = mirror.copy
            await self._cut_out(mirror.repository, commit, into=exact)
        limits = self.remote_access.limits
        reading = GitCommands(self.program, limits=ProcessLimits(limits.fetch_memory_bytes, limits.listing_bytes))
        entries = await reading.tree_entries(exact, commit)  # a tree can name itself a billion times
        self._check_size(url, entries)
        await in_thread(check_names, entries)
        await in_thread(mirror.add_ready, exact, commit)

    async def _cut_out(self, repository: Path, commit: str, *, into: Path) -> None:
        """Make the bare repository ``into`` with exactly the objects that are reachable from a commit, as packed."""
        await in_thread(disk.init_private, into, like=commit)
        reachable = await self.git(repository, "rev-list", "--end-of-options", commit)
        words = ("--quiet", "--revs", "--window=0", "--delta-base-offset")
        await self.git(
            repository, "pack-objects", *words, str(into / "objects" / "pack" / "pack"), stdin=commit.encode() + b"\n"
        )
        await in_thread(disk.cut_history, repository, into, frozenset(reachable.stdout.split()))

    def _check_size(self, url: str, entries: Sequence[TreeEntry]) -> None:
        limits = self.remote_access.limits
        size = sum(entry.size for entry in entries)
        if len(entries) > limits.tree_entries or size > limits.tree_bytes:
            most = f"{limits.tree_entries:,} files and {limits.tree_bytes >> 20:,} MiB"
            raise RemoteOverLimit(f"`{url}` has {len(entries):,} files of {size >> 20:,} MiB, and the limit is {most}")

    async def check_out(
        self, repository: Path, commit: str, *, into: Path, branch: str, origin: str | None = None
    ) -> None:
        check_branch(branch)
        await self.check_commit(repository, commit)
        await in_thread(disk.check_empty, into)
        await in_thread(disk.init_agent_copy, into / ".git", repository, commit, branch=branch, origin=origin)
        # The index stays in the private repository, so that the first snapshot knows the files; the agent gets a copy.
        index = repository / "index"
        await in_thread(_remove_stale_lock, index)
        await in_thread(index.unlink, missing_ok=True)
        await self.git(repository, "read-tree", "-u", "--reset", commit, tree=into, index=index)
        await self.place_parts(repository, into)
        found = await in_thread(read_parts, repository)
        own = found.directly_in()
        if names := b"".join(
            file.path + b"\0" for file in found.lfs if file.path in own
        ):  # changed pointers to git inside
            words = ("update-index", "-z", "--assume-unchanged", "--stdin")
            await self.git(repository, *words, tree=into, index=index, stdin=names)
        await in_thread(shutil.copyfile, index, into / ".git" / "index")
        head = await self.find_commit(into / ".git", "HEAD")
        if head != commit:
            raise CheckoutDiffers(f"HEAD of `{into}` is {head}, not {commit}")

    async def snapshot(self, repository: Path, tree: Path, base: str | None, options: SnapshotOptions) -> Snapshot:
        content = await self.select_content(repository, tree, base, options)
        index = repository / "index"
        await in_thread(_remove_stale_lock, index)
        # Git would open a file by its path after it has looked at it, and by then the path may lead anywhere.
        like = base or "0" * 40
        lines = await in_thread(_store_new, repository, tree, content, like=like)
        if lines:
            await self.git(repository, "update-index", "-z", "--index-info", index=index, stdin=b"".join(lines))
        if index.exists():
            made = (await self.git(repository, "write-tree", index=index)).stdout.decode().strip()
        else:  # the empty tree needs no program
            made = await in_thread(disk.store_object, repository / "objects", b"tree", b"", like=like)
        body = commit_object(made, base, options)
        commit = await in_thread(disk.store_object, repository / "objects", b"commit", body, like=made)
        return await in_thread(content.snapshot, commit, made, base)

    async def rejected_files(self, repository: Path, changes: Sequence[Change]) -> Mapping[bytes, str]:
        read = {change.path: change.entry for change in changes if change.entry is not None and _git_file_name(change)}
        if not read:
            return {}
        ids = await in_thread(_objects_read_by_git, repository, changes)
        packed = await self.git(
            repository, "pack-objects", "--stdout", "--quiet", stdin="\n".join(ids).encode() + b"\n"
        )
        with tempfile.TemporaryDirectory(dir=repository) as folder:
            scratch = Path(folder) / "git"
            await in_thread(disk.init_private, scratch, like=ids[0])
            checked = await self.run_git(scratch, "index-pack", "--stdin", "--strict", stdin=packed.stdout)
        reasons = dict(_REJECTED.findall(checked.stderr))
        if not reasons:
            check_exit("index-pack", checked)
        return {path: reasons[entry.id] for path, entry in read.items() if entry.id in reasons}

    async def patch(self, repository: Path, base: str | None, commit: str, to: Path) -> int:
        await self.check_commit(repository, commit)
        if base is not None:
            await self.check_commit(repository, base)
        old = base or hasher(0, like=commit, kind=b"tree").hexdigest()
        with to.open("xb") as file:
            await self.git(
                repository,
                "diff-tree",
                "-r",
                "--patch",
                "--binary",
                "--full-index",
                "--no-ext-diff",
                "--no-textconv",
                "--no-renames",
                "--end-of-options",
                old,
                commit,
                stdout=file,
            )
            return os.fstat(file.fileno()).st_size

    async def materialise(self, repository: Path, commit: str, into: Path) -> Sequence[TreeEntry]:
        await self.check_commit(repository, commit)
        await in_thread(disk.check_empty, into)
        wrong: dict[bytes, str] = {}
        turn = trio.Lock()  # two threads that compare would only take the interpreter from each other

        async def compare(batch: Sequence[TreeEntry]) -> None:
            async with turn:
                wrong.update(await in_thread(disk.differences, into, batch))

        with tempfile.TemporaryDirectory(dir=repository) as private:
            index = Path(private) / "index"
            async with _nursery() as nursery:
                nursery.start_soon(partial(self.git, repository, "read-tree", commit, index=index))
                listed = await self.tree_entries(repository, commit)
            entries = [entry for entry in listed if entry.mode != GITLINK]
            # While git writes one batch, the one before is read again and compared.
            async with _nursery() as nursery:
                for batch in _batches(entries):
                    names = b"".join(entry.path + b"\0" for entry in batch)
                    await self.git(repository, "checkout-index", "-z", "--stdin", tree=into, index=index, stdin=names)
                    nursery.start_soon(compare, batch)
        wrong.update(dict.fromkeys(await in_thread(disk.extras, into, entries), "extra"))
        check_same(into, commit, wrong)
        return [*entries, *await self.place_parts(repository, into)]

    async def bundle(self, repository: Path, commits: Sequence[str], to: Path) -> None:
        with to.open("xb") as file:
            file.write(bundles.header(commits))
            file.flush()
            wants = "".join(f"{commit}\n" for commit in commits).encode()
            await self.git(repository, "pack-objects", "--quiet", "--revs", "--stdout", stdin=wants, stdout=file)

    async def unpack(self, bundle: Path, repository: Path) -> None:
        await self.git(repository, "bundle", "unbundle", str(bundle))

    async def quarantine(self, repository: Path, bundle: bytes, base: str, *, into: Path) -> Sequence[AgentCommit]:
        return await unpack(self.program, repository, bundle, base, into)

    async def accept(self, repository: Path, quarantine: Path, base: str, commit: str, *, to: Path) -> str:
        await accept(self.program, repository, quarantine, base, commit, to=to)
        return (await self.git(repository, "rev-parse", "--verify", f"{commit}^{{tree}}")).stdout.decode().strip()

    async def read_ref(self, local: source.LocalRepository, name: str) -> str | None:
        return await (self.find_commit(local.git, name) if local.has_reftable else super().read_ref(local, name))

    async def current_branch(self, local: source.LocalRepository) -> str | None:
        if not local.has_reftable:
            return await super().current_branch(local)
        result = await self.git(local.git, "symbolic-ref", "--quiet", "--short", "HEAD", accept=(0, 1))
        return result.stdout.decode("utf-8", "surrogateescape").strip() or None


def _remove_stale_lock(index: Path) -> None:
    """Remove the lock of a call that was killed; a private repository has one user at a time."""
    index.with_name("index.lock").unlink(missing_ok=True)


def _store_new(repository: Path, tree: Path, content: SnapshotContent, *, like: str) -> list[bytes]:
    """Store new files, and return the changes of the index as lines for ``update-index --index-info``."""
    index = source.read_index(repository / "index", like=like)
    stored = {entry.sha.decode() for entry in index.entries.values()}
    gone = index.entries.keys() - {each.path for each in content.found}
    lines = [b"0 %s\t%s\0" % (b"0" * len(like), path) for path in gone]
    lines += [b"%o %s 0\t%s\0" % (entry.mode, entry.id.encode(), entry.path) for entry in content.kept]
    with disk.Directories(tree) as directories:
        for each in content.found:
            check_cancelled()
            known = index.entries.get(each.path)
            id = index.unchanged_id(each) or (disk.blob_id_of(directories, each, like=like) if known else "")
            if id not in stored:
                id = disk.store_blob(repository / "objects", directories, each, like=like)
            if known is None or (known.mode, known.sha.decode()) != (each.mode, id):
                lines.append(b"%o %s 0\t%s\0" % (each.mode, id.encode(), each.path))
    return lines


def _git_file_name(change: Change) -> str | None:
    """Return the name by which git itself reads the new side of a change, such as ``.gitmodules``, if it does."""
    name = change.path.rpartition(b"/")[2].decode("utf-8", "surrogateescape")
    return read_by_git(name) if change.entry is not None and change.entry.mode in (FILE, EXECUTABLE) else None


def _objects_read_by_git(repository: Path, changes: Sequence[Change]) -> list[str]:
    """List the files that git itself reads, each with a new tree that holds it alone under git's name for it."""
    ids = []
    for change in changes:
        if change.entry is not None and (name := _git_file_name(change)):
            row = b"100644 %s\0%s" % (name.encode(), bytes.fromhex(change.entry.id))
            tree = disk.store_object(repository / "objects", b"tree", row, like=change.entry.id)
            ids += [change.entry.id, tree]
    return list(dict.fromkeys(ids))


def _batches(entries: Sequence[TreeEntry]) -> Iterator[Sequence[TreeEntry]]:
    """Split into batches that become smaller, so that little is left to compare when the last one is written."""
    start = 0
    while start < len(entries):
        end = start + max((len(entries) - start) * 2 // 5, _MIN_BATCH)
        yield entries[start:end]
        start = end


@asynccontextmanager
async def _nursery() -> AsyncIterator[trio.Nursery]:
    """Open a nursery that raises the first ``GitFailed`` of its tasks without the group around it."""
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except BaseExceptionGroup as group:
        ours, _ = group.split(GitFailed)
        if ours is None:
            raise
        raise next(iter(ours.exceptions)) from None
