"""The adapter over the host's git binary.

Git runs on the runner's own repositories, whose configuration is four lines of ours. Of a user's repository it reads
objects through a view, and an agent's is not touched after it was made. What the host configures is switched off by
environment.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import IO

import trio
from trio.from_thread import check_cancelled

from runner.core.errors import CheckoutDiffers, GitFailed, HostileTree, RemoteOverLimit, RunnerError
from runner.git import disk, source
from runner.git._profile import environment
from runner.git._run import Ended, Limits, limited, run
from runner.git.common import Common, Seen, in_thread, refuse
from runner.git.mirror import Mirror, shrink
from runner.git.remote import NOWHERE, Reach, Remotes
from runner.git.tree import EXECUTABLE, FILE, check_branch, check_commit_id, check_names, commit_object, hasher, shown
from runner.policy.names import read_by_git
from runner.ports.git import Authored, Change, Entry, Snapshot, Snapshotting, Tip

_ENVIRONMENT = environment({})
_REFUSED = re.compile(r"^error: object ([0-9a-f]+): (.*)", re.MULTILINE)
_LEAST_SHARE = 2000  # files to check out at once; a process costs as much as a hundred files


class Binary(Common):
    name = "git"

    def __init__(
        self, program: str, reach: Reach = NOWHERE, *, objects: Path | None = None, limits: Limits | None = None
    ) -> None:
        """``objects`` takes the place of the object directory of every repository; ``limits`` bound each git."""
        self._program = program
        self._words = [program] if limits is None else [*limited(limits, mortal=True), program]
        self._reach = reach
        self._remotes = Remotes(program, reach)
        self._environment = _ENVIRONMENT if objects is None else _ENVIRONMENT | {"GIT_OBJECT_DIRECTORY": str(objects)}

    async def fetch(
        self, path: Path, commit: str, *, into: Path, depth: int | None, within: Path | None = None
    ) -> None:
        place = await self.holding(path, commit, within)
        await in_thread(disk.make_private, into, like=commit)
        with source.view(place, like=commit, inside=into) as view:
            ended = await self.on(
                into,
                "fetch",
                "--quiet",
                "--no-tags",
                "--no-write-fetch-head",
                "--no-recurse-submodules",
                "--no-auto-maintenance",
                "--update-shallow",
                *([f"--depth={depth}"] if depth is not None else []),
                "--end-of-options",
                os.fsencode(view),
                commit,
            )
        if ended.code and "fsck error" in ended.words:
            raise HostileTree(f"`{place.top}` has objects that git refuses: {ended.words}")
        _check("fetch", ended)
        await in_thread(check_names, await self.leaves(into, commit))

    async def look_up(self, url: str, *, branch: str | None, commit: str | None) -> Tip:
        self.check_names(branch, commit)
        return await self._remotes.look_up(url, branch=branch, commit=commit)

    async def fetch_url(self, url: str, commit: str, *, into: Path, depth: int | None) -> None:
        async with self._mirror(url, commit, depth) as mirror:
            await in_thread(mirror.give, commit, into)

    async def read_url(self, url: str, commit: str, name: str, *, depth: int | None, limit: int) -> bytes | None:
        async with self._mirror(url, commit, depth) as mirror:
            ready = Binary(self._program, objects=mirror.ready(commit))
            return await ready.file(mirror.repository, commit, name, limit=limit)

    @asynccontextmanager
    async def _mirror(self, url: str, commit: str, depth: int | None) -> AsyncIterator[Mirror]:
        """The mirror of a URL, held, and with a commit ready."""
        check_commit_id(commit)
        mirror = Mirror.of(self._reach.mirrors, url, depth)
        async with mirror.held():
            if not await in_thread(mirror.has, commit):
                await self._renew(mirror, url, commit, depth)
                await in_thread(shrink, self._reach.mirrors, self._reach.mirror_limit)
            yield mirror

    async def _renew(self, mirror: Mirror, url: str, commit: str, depth: int | None) -> None:
        """Fetch a commit into a mirror. One that git cannot work with is thrown away, and made anew once."""
        empty = await in_thread(mirror.prepare, like=commit)
        try:
            await self._fill(mirror, url, commit, depth, empty=empty)
        except RunnerError as error:
            damaged = isinstance(error, GitFailed)
            if empty or damaged:
                await in_thread(mirror.remove)
            if empty or not damaged:
                raise
            await self._renew(mirror, url, commit, depth)

    async def _fill(self, mirror: Mirror, url: str, commit: str, depth: int | None, *, empty: bool) -> None:
        await self._remotes.fetch(mirror.repository, url, commit, depth=depth)
        await self.check_commit(mirror.repository, commit)
        exact = mirror.repository
        if not empty:
            exact = mirror.copy
            await self._cut_out(mirror.repository, commit, into=exact)
        bounds = self._reach.bounds
        reading = Binary(self._program, limits=(bounds.fetch_memory_bytes, bounds.listing_bytes))
        leaves = await reading.leaves(exact, commit)  # a tree can name itself a billion times
        self._check_size(url, leaves)
        await in_thread(check_names, leaves)
        await in_thread(mirror.keep, exact, commit)

    async def _cut_out(self, repository: Path, commit: str, *, into: Path) -> None:
        """Make the bare repository ``into`` with exactly what is reachable from a commit of ours, packed as it is."""
        await in_thread(disk.make_private, into, like=commit)
        reachable = await self._git(repository, "rev-list", "--end-of-options", commit)
        words = ("--quiet", "--revs", "--window=0", "--delta-base-offset")
        await self._git(
            repository, "pack-objects", *words, str(into / "objects" / "pack" / "pack"), stdin=commit.encode() + b"\n"
        )
        await in_thread(disk.cut_history, repository, into, frozenset(reachable.stdout.split()))

    def _check_size(self, url: str, leaves: Sequence[Entry]) -> None:
        bounds = self._reach.bounds
        size = sum(leaf.size for leaf in leaves)
        if len(leaves) > bounds.tree_entries or size > bounds.tree_bytes:
            raise RemoteOverLimit(
                f"`{url}` holds {len(leaves):,} files of {size >> 20:,} MiB, which is more than is taken"
            )

    async def check_out(
        self, repository: Path, commit: str, *, into: Path, branch: str, origin: str | None = None
    ) -> None:
        check_branch(branch)
        await self.check_commit(repository, commit)
        await in_thread(disk.check_empty, into)
        await in_thread(disk.make_own, into / ".git", repository, commit, branch=branch, origin=origin)
        # The index is made as ours, so that the first snapshot knows the files, and then copied.
        index = repository / "index"
        await in_thread(_unlock, index)
        await in_thread(index.unlink, missing_ok=True)
        await self._git(repository, "read-tree", "-u", "--reset", commit, tree=into, index=index)
        await in_thread(shutil.copyfile, index, into / ".git" / "index")
        head = await self.find_commit(into / ".git", "HEAD")
        if head != commit:
            raise CheckoutDiffers(f"HEAD of `{into}` is {head}, not {commit}")

    async def snapshot(self, repository: Path, tree: Path, base: str | None, wanted: Snapshotting) -> Snapshot:
        seen = await self.look(repository, tree, base, wanted)
        index = repository / "index"
        await in_thread(_unlock, index)
        # Git would open what it has looked at by its path, which by then may lead anywhere.
        like = base or "0" * 40
        lines = await in_thread(_store, repository, tree, seen, like=like)
        if lines:
            await self._git(repository, "update-index", "-z", "--index-info", index=index, stdin=b"".join(lines))
        if index.exists():
            made = (await self._git(repository, "write-tree", index=index)).stdout.decode().strip()
        else:  # of nothing, which needs no program
            made = await in_thread(disk.store_text, repository / "objects", b"tree", b"", like=like)
        body = commit_object(made, base, wanted)
        commit = await in_thread(disk.store_text, repository / "objects", b"commit", body, like=made)
        return await in_thread(seen.snapshot, commit, made, base)

    async def refusals(self, repository: Path, changes: Sequence[Change]) -> Mapping[bytes, str]:
        read = {change.path: change.entry for change in changes if change.entry is not None and _name_for_git(change)}
        if not read:
            return {}
        ids = await in_thread(_objects_for_git, repository, changes)
        packed = await self._git(
            repository, "pack-objects", "--stdout", "--quiet", stdin="\n".join(ids).encode() + b"\n"
        )
        with tempfile.TemporaryDirectory(dir=repository) as folder:
            scratch = Path(folder) / "git"
            await in_thread(disk.make_private, scratch, like=ids[0])
            ended = await self.on(scratch, "index-pack", "--stdin", "--strict", stdin=packed.stdout)
        said = dict(_REFUSED.findall(ended.words))
        if ended.code and not said:
            raise GitFailed(f"`git index-pack` ended with {ended.code}: {ended.words}")
        return {path: said[leaf.id] for path, leaf in read.items() if leaf.id in said}

    async def patch(self, repository: Path, base: str | None, commit: str, to: Path) -> int:
        await self.check_commit(repository, commit)
        if base is not None:
            await self.check_commit(repository, base)
        old = base or hasher(0, like=commit, kind=b"tree").hexdigest()
        with to.open("xb") as file:
            ended = await self.on(
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
            _check("diff-tree", ended)
            return os.fstat(file.fileno()).st_size

    async def materialise(self, repository: Path, commit: str, into: Path) -> Sequence[Entry]:
        leaves = await self.entries(repository, commit)
        await in_thread(disk.check_empty, into)
        wrong: dict[bytes, str] = {}
        turn = trio.Lock()  # two threads that compare would only take the interpreter from each other

        async def compare(share: Sequence[Entry]) -> None:
            async with turn:
                wrong.update(await in_thread(disk.differences, into, share))

        with tempfile.TemporaryDirectory(dir=repository) as private:
            index = Path(private) / "index"
            await self._git(repository, "read-tree", commit, index=index)
            # While git writes one share, the one before is read again and compared.
            async with _nursery() as nursery:
                for share in _shares(leaves):
                    names = b"".join(leaf.path + b"\0" for leaf in share)
                    await self._git(repository, "checkout-index", "-z", "--stdin", tree=into, index=index, stdin=names)
                    nursery.start_soon(compare, share)
        wrong.update(dict.fromkeys(await in_thread(disk.extras, into, leaves), "extra"))
        refuse(into, commit, wrong)
        return leaves

    async def quarantine(self, repository: Path, bundle: bytes, base: str, *, into: Path) -> Sequence[Authored]:
        from runner.git.quarantine import unpack

        return await unpack(self._program, repository, bundle, base, into)

    async def accept(self, repository: Path, quarantine: Path, base: str, commit: str, *, to: Path) -> str:
        from runner.git.quarantine import accept

        await accept(self._program, repository, quarantine, base, commit, to=to)
        return (await self._git(repository, "rev-parse", "--verify", f"{commit}^{{tree}}")).stdout.decode().strip()

    async def find_commit(self, git: Path, name: str) -> str | None:
        ended = await self._git(
            git, "rev-parse", "--verify", "--quiet", "--end-of-options", name + "^{commit}", accept=(0, 1, 128)
        )
        return ended.stdout.decode().strip() or None

    async def read_ref(self, place: source.Place, name: str) -> str | None:
        return await (self.find_commit(place.git, name) if place.has_reftable else super().read_ref(place, name))

    async def current_branch(self, place: source.Place) -> str | None:
        if not place.has_reftable:
            return await super().current_branch(place)
        ended = await self._git(place.git, "symbolic-ref", "--quiet", "--short", "HEAD", accept=(0, 1))
        return ended.stdout.decode("utf-8", "surrogateescape").strip() or None

    async def leaves(self, git: Path, commit: str) -> list[Entry]:
        ended = await self._git(git, "ls-tree", "-r", "-z", "-l", "--full-tree", "--end-of-options", commit)
        return [_leaf(row) for row in ended.stdout.split(b"\0")[:-1]]

    async def leaf(self, git: Path, commit: str, path: bytes) -> Entry | None:
        ended = await self._git(git, "ls-tree", "-z", "-l", "--full-tree", "--end-of-options", commit, path)
        return next((_leaf(row) for row in ended.stdout.split(b"\0")[:-1]), None)

    async def blobs(self, repository: Path, ids: Sequence[str]) -> list[bytes]:
        if not ids:
            return []
        ended = await self._git(repository, "cat-file", "--batch", stdin="".join(f"{id}\n" for id in ids).encode())
        output = BytesIO(ended.stdout)
        found = []
        for _ in ids:
            size = int(output.readline().split()[2])
            found.append(output.read(size))
            output.read(1)
        return found

    async def _git(
        self,
        git: Path,
        *argv: str | bytes,
        tree: Path | None = None,
        index: Path | None = None,
        stdin: bytes = b"",
        accept: tuple[int, ...] = (0,),
    ) -> Ended:
        ended = await self.on(git, *argv, tree=tree, index=index, stdin=stdin)
        return _check(str(argv[0]), ended, accept)

    async def on(
        self,
        git: Path,
        *argv: str | bytes,
        tree: Path | None = None,
        index: Path | None = None,
        stdin: bytes = b"",
        stdout: IO[bytes] | None = None,
    ) -> Ended:
        """Run git on a repository, to whatever end but that of its limits: then it raises ``RemoteOverLimit``."""
        env = self._environment | {"GIT_DIR": str(git)}
        if tree is not None:
            env["GIT_WORK_TREE"] = str(tree)
        if index is not None:
            env["GIT_INDEX_FILE"] = str(index)
        ended = await run([*self._words, *argv], env=env, stdin=stdin, stdout=stdout)
        if ended.code == -signal.SIGXFSZ:
            raise RemoteOverLimit(f"`git {argv[0]!s}` has more to say than is taken")
        return ended


def _check(verb: str, ended: Ended, accept: tuple[int, ...] = (0,)) -> Ended:
    if ended.code not in accept:
        raise GitFailed(f"`git {verb}` ended with {ended.code}: {ended.words or 'no words'}")
    return ended


def _unlock(index: Path) -> None:
    """Remove the lock of a call that was killed; a repository of ours has one user at a time."""
    index.with_name("index.lock").unlink(missing_ok=True)


def _store(repository: Path, tree: Path, seen: Seen, *, like: str) -> list[bytes]:
    """Store what is new, and say in the words of ``update-index --index-info`` where the index is to differ."""
    index = source.read_index(repository / "index", like=like)
    stored = {entry.sha.decode() for entry in index.entries.values()}
    gone = index.entries.keys() - {each.path for each in seen.found}
    lines = [b"0 %s\t%s\0" % (b"0" * len(like), path) for path in gone]
    lines += [b"%o %s 0\t%s\0" % (leaf.mode, leaf.id.encode(), leaf.path) for leaf in seen.kept]
    with disk.Directories(tree) as directories:
        for each in seen.found:
            check_cancelled()
            known = index.entries.get(each.path)
            id = index.vouched(each) or (disk.identify(directories, each, like=like) if known else "")
            if id not in stored:
                id = disk.store(repository / "objects", directories, each, like=like)
            if known is None or (known.mode, known.sha.decode()) != (each.mode, id):
                lines.append(b"%o %s 0\t%s\0" % (each.mode, id.encode(), each.path))
    return lines


def _name_for_git(change: Change) -> str | None:
    """What git takes the new side of a change for, if it reads it."""
    name = change.path.rpartition(b"/")[2].decode("utf-8", "surrogateescape")
    return read_by_git(name) if change.entry is not None and change.entry.mode in (FILE, EXECUTABLE) else None


def _objects_for_git(repository: Path, changes: Sequence[Change]) -> list[str]:
    """The files that git reads, and trees made to hold each of them alone, by the name that git takes it for."""
    ids = []
    for change in changes:
        if change.entry is not None and (name := _name_for_git(change)):
            row = b"100644 %s\0%s" % (name.encode(), bytes.fromhex(change.entry.id))
            tree = disk.store_text(repository / "objects", b"tree", row, like=change.entry.id)
            ids += [change.entry.id, tree]
    return list(dict.fromkeys(ids))


def _leaf(row: bytes) -> Entry:
    head, _, path = row.partition(b"\t")
    mode, _, id, size = head.split()
    if size == b"BAD":
        raise GitFailed(f"object `{id.decode()}` of `{shown(path)}` is missing or damaged")
    return Entry(path, int(mode, 8), id.decode(), 0 if size == b"-" else int(size))


def _shares(leaves: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Parts that become smaller, so that little is left to compare when the last one is written."""
    start = 0
    while start < len(leaves):
        end = start + max((len(leaves) - start) * 2 // 5, _LEAST_SHARE)
        yield leaves[start:end]
        start = end


@asynccontextmanager
async def _nursery() -> AsyncIterator[trio.Nursery]:
    """A nursery from which the first of our own errors comes as itself."""
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except BaseExceptionGroup as group:
        ours, _ = group.split(GitFailed)
        if ours is None:
            raise
        raise next(iter(ours.exceptions)) from None
