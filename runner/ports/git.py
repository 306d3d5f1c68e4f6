"""What git must do for a run, in the runner's words. Two adapters pass one conformance suite.

The runner's repositories are private: bare, below ``RUNNER_HOME``, never writable from inside a
sandbox. An agent has a ``.git`` of its own in its tree, which no adapter reads again once an agent
has run. Host configuration, hooks, filters and attributes have no effect on anything here. Commits
are full hexadecimal ids. Refs are never written: which snapshot counts is a row of the store.

Cancelling any call ends every process that it started; a half-written repository is the caller's to
remove, a half-written directory as well. Foreign failures surface as ``GitFailed`` with git's words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Entry:
    """A leaf of a tree. ``mode`` is git's (0o100644, 0o100755, 0o120000); ``path`` raw bytes with ``/``."""

    path: bytes
    mode: int
    id: str
    size: int


@dataclass(frozen=True)
class Source:
    """A local repository as found: its top directory, HEAD's commit and branch, uncommitted files."""

    top: Path
    head: str | None
    branch: str | None
    dirty: bool


@dataclass(frozen=True)
class Tip:
    """What a name means on a server: a commit, and the branch that a checkout of it is on."""

    commit: str
    branch: str


@dataclass(frozen=True)
class Snapshot:
    """A commit built from a tree on disk. ``ignored`` counts entries left out by the base's ignore rules.

    ``collisions`` are paths that some disks take for others, each with one of those: ``fetch`` refuses such a tree.
    """

    commit: str
    tree: str
    base: str | None
    entries: int
    ignored: int
    collisions: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True)
class Change:
    """A path that differs between two trees. ``status`` is A, D, M or T; ``entry`` is the new side, none for D."""

    path: bytes
    status: str
    entry: Entry | None


@dataclass(frozen=True)
class Authored:
    """A commit of somebody else: what it has otherwise than each of its parents, and the targets of its new links."""

    commit: str
    changes: tuple[Change, ...]
    links: tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class Author:
    name: str
    email: str
    seconds: int  # since the epoch, UTC


@dataclass(frozen=True)
class Snapshotting:
    """What goes into a snapshot besides the tree itself.

    ``exclude`` are paths relative to the tree (a directory covers what is below it); their state in
    the base, if any, is kept, so that the patch does not speak of them.
    """

    message: str
    author: Author
    exclude: frozenset[bytes] = field(default_factory=frozenset)


class Git(Protocol):
    name: str

    async def inspect(self, path: Path, *, within: Path | None = None) -> Source:
        """Look at a local repository without trusting it; nothing of its configuration has an effect.

        Raises ``BadSource``: missing, not a directory, not a repository, owned by another user,
        borrowing objects (``objects/info/alternates``). Where it leads elsewhere it is followed, as to the repository
        of a linked work tree; but with ``within`` all of it must be below that directory, with a ``.git`` and through
        no link, else it is ``Untrusted``. That holds for every ``within`` here.
        """

    async def resolve(self, path: Path, *, branch: str | None, commit: str | None, within: Path | None = None) -> str:
        """The commit that a checkout of ``path`` means; a commit given must exist, be a commit, and is returned.

        With neither, HEAD. Raises ``BadRef`` for a name outside the allow-list grammar (before git
        sees it) and ``UnknownCommit`` for what is not there.
        """

    async def read_file(
        self, path: Path, commit: str, name: str, *, limit: int, within: Path | None = None
    ) -> bytes | None:
        """A regular file of a commit of the repository at ``path``; ``None`` when the commit has no such path.

        Raises ``HostileTree`` for a link, a directory, and a file of more than ``limit`` bytes.
        """

    async def fetch(
        self, path: Path, commit: str, *, into: Path, depth: int | None, within: Path | None = None
    ) -> None:
        """Make the bare private repository ``into`` with ``commit`` and its history to ``depth``.

        No hard links, no borrowed objects, objects checked. Raises ``HostileTree`` for a tree with a
        name that must never reach a disk (``..``, any form of ``.git``, names equal when case or
        normalisation is ignored).
        """

    async def look_up(self, url: str, *, branch: str | None, commit: str | None) -> Tip:
        """Ask a server what to check out; with neither, its default branch. A commit given is taken at its word.

        Raises ``BadUrl`` and ``BadRef`` before anything is asked; ``UrlUnsupported`` where a program is missing;
        ``UnknownCommit`` for a branch that is not there; ``NoRepository``, ``RemoteDenied`` (it wants credentials,
        or is not the known host), ``RemoteRedirects``; ``RemoteUnreachable`` after several tries;
        ``RemoteOverLimit`` for a server that is too slow or says too much.
        """

    async def fetch_url(self, url: str, commit: str, *, into: Path, depth: int | None) -> None:
        """Make the bare private repository ``into`` with exactly ``commit`` and its history to ``depth``.

        Objects are checked, and kept here for the next time. A commit that was kept is not asked for again. Safe
        against any number of callers at once. Raises what ``look_up`` raises, of which ``UnknownCommit`` means that
        the server does not give this commit, and ``HostileTree`` as ``fetch`` does.
        """

    async def read_url(self, url: str, commit: str, name: str, *, depth: int | None, limit: int) -> bytes | None:
        """As ``read_file``, of a commit on a server. It is fetched and kept as ``fetch_url`` does, with its errors."""

    async def check_out(
        self, repository: Path, commit: str, *, into: Path, branch: str, origin: str | None = None
    ) -> None:
        """Fill the empty directory ``into`` with ``commit`` and give it a ``.git`` of its own.

        That ``.git`` has ``branch`` checked out at ``commit``, the same history, and shares no file with ours. With a
        URL as ``origin`` it has that remote, whose branch of this name is followed; else no remote.
        Afterwards HEAD is compared with ``commit``; raises ``CheckoutDiffers``.
        """

    async def initialise(self, tree: Path, *, branch: str) -> None:
        """Give a directory that has no ``.git`` one with nothing committed, which belongs to whom the directory does.

        It is there as a whole or not at all; one that somebody else has made meanwhile stays.
        """

    async def add_dirty(self, path: Path, *, into: Path, within: Path | None = None) -> int:
        """Copy uncommitted changes of the repository at ``path`` into a checkout; how many paths changed."""

    async def empty(self, repository: Path) -> None:
        """Make the bare private repository for a workspace that starts from nothing."""

    async def snapshot(self, repository: Path, tree: Path, base: str | None, wanted: Snapshotting) -> Snapshot:
        """Commit the files below ``tree``, byte for byte, onto ``base``.

        Regular files and symbolic links, empty directories not; the ``.git`` at the top never. What
        the ignore files *of the base* name is left out unless the base tracks it. Files are streamed.
        Equal input gives an equal id.
        """

    async def entries(self, repository: Path, commit: str) -> list[Entry]:
        """All leaves of a commit's tree in git's order. Raises ``UnknownCommit``, also for a tree or blob id."""

    async def changes(self, repository: Path, base: str | None, commit: str) -> list[Change]:
        """What ``commit`` changed from ``base`` (``None``: from nothing), by path; renames are not guessed."""

    async def refusals(self, repository: Path, changes: Sequence[Change]) -> Mapping[bytes, str]:
        """The changed files that git itself reads and ``fetch`` would refuse, with the reason: bad submodules, say."""

    async def patch(self, repository: Path, base: str | None, commit: str, to: Path) -> int:
        """Write a binary-safe patch that ``git apply`` takes, streamed to the new file ``to``; its size."""

    async def materialise(self, repository: Path, commit: str, into: Path) -> Sequence[Entry]:
        """Write the commit's files into the empty directory ``into``: no ``.git``, no filters, no attributes.

        What was written is compared with the tree (names, modes, contents, nothing more); raises
        ``CheckoutDiffers``. Raises ``UnknownCommit`` before anything is written.
        """

    async def compare(self, repository: Path, commit: str, tree: Path | int) -> Mapping[bytes, str]:
        """Differences of a directory, or of one by its descriptor, from a commit: path to ``missing``, ``extra``,
        ``mode`` or ``content``."""

    async def quarantine(self, repository: Path, bundle: bytes, base: str, *, into: Path) -> Sequence[Authored]:
        """Unpack a bundle from ``base`` to HEAD into the new directory ``into``; its commits, HEAD last.

        The repository does not change. Raises ``HostileTree`` for a bundle with another ref, objects that git refuses,
        names as in ``fetch``, new submodules, and commits that are not built on ``base``; ``RemoteOverLimit`` for too
        many commits; ``GitMissing`` where only the library is.
        """

    async def accept(self, repository: Path, quarantine: Path, base: str, commit: str, *, to: Path) -> str:
        """Make what is in a quarantine a part of the repository, and the file ``to`` a bundle of exactly that.

        Returns the id of the commit's tree. The commits have been judged, ``commit`` is the last of them.
        """
