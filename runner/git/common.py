"""What the two adapters share: the parts of the port that need only a commit's leaves and a disk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import trio

from runner.core.errors import BadRef, BadSource, CheckoutDiffers, GitFailed, HostileTree, UnknownCommit
from runner.core.ids import is_commit_id
from runner.git import disk, source
from runner.git.ignore import IgnoreRules
from runner.git.tree import (
    EXECUTABLE,
    FILE,
    GITLINK,
    changes,
    check_branch,
    check_commit_id,
    kept,
    shown,
)
from runner.policy.names import collisions, parents
from runner.ports.git import Change, Entry, Snapshot, Snapshotting, Source

_GIT = "install git"

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Seen:
    """What a snapshot is made of: files on the disk, leaves kept from the base; and what was left out."""

    found: list[disk.Found]
    kept: list[Entry]
    left_out: int

    def snapshot(self, commit: str, tree: str, base: str | None) -> Snapshot:
        """What was made of it."""
        paths = {each.path for each in self.found} | {leaf.path for leaf in self.kept}
        return Snapshot(commit, tree, base, len(paths), self.left_out, tuple(collisions(paths).items()))


class Common(ABC):
    """A ``Git`` without the parts that move or store objects."""

    @abstractmethod
    async def find_commit(self, git: Path, name: str) -> str | None:
        """The commit that a full ref name, ``HEAD`` or a commit id means; ``None`` if there is none."""

    @abstractmethod
    async def leaves(self, git: Path, commit: str) -> list[Entry]:
        """The leaves of a commit that is there, submodules included."""

    @abstractmethod
    async def blobs(self, repository: Path, ids: Sequence[str]) -> list[bytes]: ...

    @abstractmethod
    async def leaf(self, git: Path, commit: str, path: bytes) -> Entry | None:
        """What a commit has at one path, a directory included."""

    async def read_ref(self, place: source.Place, name: str) -> str | None:
        """The id that ``HEAD`` or a full ref name of a user's repository stands for."""
        if place.has_reftable:
            raise BadSource(f"the refs of `{place.top}` are in a reftable, which cannot be read here", hint=_GIT)
        return await in_thread(source.read_ref, place, name)

    async def current_branch(self, place: source.Place) -> str | None:
        """The branch that HEAD of a user's repository is on."""
        return await in_thread(source.read_branch, place)

    async def holding(self, path: Path, commit: str, within: Path | None) -> source.Place:
        """The user's repository at ``path``, which has a commit. Raises ``UnknownCommit``."""
        check_commit_id(commit)
        place = await in_thread(source.find, path, within)
        with source.view(place, like=commit) as view:
            if await self.find_commit(view, commit) != commit:
                raise UnknownCommit(f"`{commit}` is not a commit of `{place.top}`")
        return place

    async def read_file(
        self, path: Path, commit: str, name: str, *, limit: int, within: Path | None = None
    ) -> bytes | None:
        place = await self.holding(path, commit, within)
        with source.view(place, like=commit) as view:
            return await self.file(view, commit, name, limit=limit)

    async def file(self, git: Path, commit: str, name: str, *, limit: int) -> bytes | None:
        """As ``Git.read_file``, of a git directory that has the commit."""
        found = await self.leaf(git, commit, name.encode())
        if found is None:
            return None
        if not _is_file(found):
            raise HostileTree(f"`{name}` of {commit[:12]} is not a regular file")
        if found.size > limit:
            raise HostileTree(f"`{name}` of {commit[:12]} has {found.size} bytes, more than {limit}")
        return (await self.blobs(git, [found.id]))[0]

    async def initialise(self, tree: Path, *, branch: str) -> None:
        check_branch(branch)
        await in_thread(disk.initialise, tree, branch)

    async def inspect(self, path: Path, *, within: Path | None = None) -> Source:
        place = await in_thread(source.find, path, within)
        head, changed = await self._uncommitted(place)
        return Source(place.top, head, await self.current_branch(place), bool(changed))

    async def resolve(self, path: Path, *, branch: str | None, commit: str | None, within: Path | None = None) -> str:
        self.check_names(branch, commit)
        if commit is not None:
            await self.holding(path, commit, within)
            return commit
        place = await in_thread(source.find, path, within)
        found = await self._commit_at(place, "HEAD" if branch is None else f"refs/heads/{branch}")
        if found is None:
            wanted = "commit yet" if branch is None else f"branch `{branch}`"
            raise UnknownCommit(f"`{place.top}` has no {wanted}")
        return found

    def check_names(self, branch: str | None, commit: str | None) -> None:
        """Raise ``BadRef`` for what is outside the grammar."""
        if branch is not None:
            check_branch(branch)
        if commit is not None and not is_commit_id(commit):
            raise BadRef(f"`{commit}` is not a full commit id", hint="a commit is 40 or 64 lower-case hex digits")

    async def add_dirty(self, path: Path, *, into: Path, within: Path | None = None) -> int:
        place = await in_thread(source.find, path, within)
        _, changed = await self._uncommitted(place)
        await in_thread(source.copy, place, changed, into)
        return len(changed)

    async def empty(self, repository: Path) -> None:
        await in_thread(disk.make_private, repository, like="0" * 40)

    async def entries(self, repository: Path, commit: str) -> list[Entry]:
        return [leaf for leaf in await self.all_leaves(repository, commit) if leaf.mode != GITLINK]

    async def changes(self, repository: Path, base: str | None, commit: str) -> list[Change]:
        return changes(await self.all_leaves(repository, base), await self.all_leaves(repository, commit))

    async def compare(self, repository: Path, commit: str, tree: Path | int) -> Mapping[bytes, str]:
        leaves = await self.entries(repository, commit)
        found = await in_thread(disk.differences, tree, leaves)
        return found | dict.fromkeys(await in_thread(disk.extras, tree, leaves), "extra")

    async def check_commit(self, git: Path, commit: str) -> None:
        check_commit_id(commit)
        if await self.find_commit(git, commit) != commit:
            raise UnknownCommit(f"`{commit}` is not a commit of `{git}`")

    async def all_leaves(self, repository: Path, commit: str | None) -> list[Entry]:
        if commit is None:
            return []
        await self.check_commit(repository, commit)
        return await self.leaves(repository, commit)

    async def look(self, repository: Path, tree: Path, base: str | None, wanted: Snapshotting) -> Seen:
        """Decide what a snapshot holds."""
        leaves = await self.all_leaves(repository, base)
        files = [leaf for leaf in leaves if _is_ignore_file(leaf)]
        texts = await self.blobs(repository, [leaf.id for leaf in files])
        rules = {leaf.path.rpartition(b"/")[0]: text for leaf, text in zip(files, texts, strict=True)}
        return await in_thread(_look, tree, leaves, IgnoreRules(rules.get), wanted)

    async def _uncommitted(self, place: source.Place) -> tuple[str | None, list[bytes]]:
        head = await self._commit_at(place, "HEAD")
        leaves = []
        if head is not None:
            with source.view(place, like=head) as view:
                leaves = await self.leaves(view, head)
        return head, await in_thread(source.uncommitted, place, leaves)

    async def _commit_at(self, place: source.Place, name: str) -> str | None:
        """The commit that a name stands for, if the repository has it."""
        id = await self.read_ref(place, name)
        if id is None:
            return None
        with source.view(place, like=id) as view:
            return await self.find_commit(view, id)


def _is_ignore_file(leaf: Entry) -> bool:
    return leaf.path.rpartition(b"/")[2] == b".gitignore" and _is_file(leaf)


def _is_file(leaf: Entry) -> bool:
    return leaf.mode in (FILE, EXECUTABLE)


def _look(tree: Path, leaves: Sequence[Entry], rules: IgnoreRules, wanted: Snapshotting) -> Seen:
    tracked = {leaf.path for leaf in leaves if leaf.mode != GITLINK}
    found, left_out = disk.walk(tree, ignores=rules, tracked=tracked, exclude=wanted.exclude)
    keep = kept(leaves, (each.path for each in found), wanted)
    hidden = parents(leaf.path for leaf in keep)  # a file where a kept leaf needs a directory
    rest = [each for each in found if each.path not in hidden]
    return Seen(rest, keep, left_out + len(found) - len(rest))


def refuse(into: Path, commit: str, wrong: Mapping[bytes, str]) -> None:
    """Raise ``CheckoutDiffers`` when anything is wrong."""
    if wrong:
        path = min(wrong)
        count = f"{len(wrong)} path{'s' * (len(wrong) != 1)}"
        raise CheckoutDiffers(f"`{into}` differs from {commit} in {count}", hint=f"`{shown(path)}`: {wrong[path]}")


async def in_thread(work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Do blocking work in a thread; a failure of the disk is ``GitFailed``.

    Cancelling takes effect where the work asks for it.
    """
    try:
        return await trio.to_thread.run_sync(partial(work, *args, **options))
    except OSError as error:
        raise GitFailed(str(error)) from error
