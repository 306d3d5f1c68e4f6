"""The git port: the operations that a run needs. Two adapters pass one conformance suite.

The runner's repositories are *private*: bare, below ``RUNNER_HOME``, never writable from inside a sandbox. An agent
has a ``.git`` of its own in its tree, which no adapter reads again once the agent has run. Host configuration, hooks,
filters and attributes have no effect. Commits are full hexadecimal ids. Refs are never written: a row of the store
says which snapshot counts.

Cancelling a call ends every process that it started; the caller removes a half-written repository or directory.
Failures of git are raised as ``GitFailed`` with git's message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct, field


class TreeEntry(Struct, frozen=True):
    """A file or link of a commit. ``mode`` is git's (0o100644, 0o100755, 0o120000); ``path`` raw bytes with ``/``."""

    path: bytes
    mode: int
    id: str
    size: int


class SourceRepository(Struct, frozen=True):
    """The state of a local repository: its top directory, HEAD's commit and branch, whether files are uncommitted."""

    top: Path
    head: str | None
    branch: str | None
    dirty: bool


class ResolvedRef(Struct, frozen=True):
    """The meaning of a name on a server: a commit, and the branch that a checkout of it is on."""

    commit: str
    branch: str


class Snapshot(Struct, frozen=True, kw_only=True):
    """A commit made from a tree on disk. ``ignored`` counts entries left out by the base's ignore rules.

    ``collisions`` are pairs of paths that are one file on some disks; ``fetch`` refuses a tree with any.
    """

    commit: str
    tree: str
    base: str | None
    entries: int
    ignored: int
    collisions: tuple[tuple[bytes, bytes], ...] = ()


class Change(Struct, frozen=True):
    """A path that differs between two trees. ``status`` is A, D, M or T; ``entry`` is the new side, ``None`` for D."""

    path: bytes
    status: str
    entry: TreeEntry | None


class AgentCommit(Struct, frozen=True):
    """A commit that an agent made: the paths that differ from every parent, and the targets of its new links."""

    commit: str
    changes: tuple[Change, ...]
    links: tuple[tuple[bytes, bytes], ...]


class Author(Struct, frozen=True):
    name: str
    email: str
    seconds: int  # since the epoch, UTC


class SnapshotOptions(Struct, frozen=True):
    """The options of a snapshot.

    ``exclude`` are paths relative to the tree (a directory covers everything below it). They stay as they are in the
    base, so that the patch does not mention them.
    """

    message: str
    author: Author
    exclude: frozenset[bytes] = field(default_factory=frozenset)


class Submodule(Struct, frozen=True):
    path: bytes
    commit: str


class LfsFile(Struct, frozen=True):
    """A file that is a pointer in its commit; SHA-256 and size are those of its content."""

    path: bytes
    mode: int
    sha256: str
    size: int


class Parts(Struct, frozen=True):
    """The parts of a checkout that its commit only refers to, by their paths in the whole; outer ones first."""

    submodules: tuple[Submodule, ...] = ()
    lfs: tuple[LfsFile, ...] = ()

    @property
    def paths(self) -> frozenset[bytes]:
        return frozenset([one.path for one in self.submodules] + [one.path for one in self.lfs])

    def directly_in(self, submodule: bytes = b"") -> frozenset[bytes]:
        """Return the paths of the parts that are in the whole, or in a submodule, and in no submodule of it."""
        above = submodule + b"/" if submodule else b""
        deeper = tuple(
            one.path + b"/" for one in self.submodules if one.path.startswith(above) and one.path != submodule
        )
        return frozenset(path for path in self.paths if path.startswith(above) and not path.startswith(deeper))


class PartsRequest(Struct, frozen=True, kw_only=True):
    """The parts to fetch of a repository at a ``url`` or ``path``, which may not lead out of ``within``.

    Servers of submodules that ``untrusted`` manifests lead to see no credentials.
    """

    url: str | None
    path: Path | None
    within: Path | None = None
    submodules: bool = False
    lfs: bool = False
    untrusted: bool = False
    lfs_bytes: int = 10 << 30  # of all files of LFS


class PartChanges(Struct, frozen=True):
    """Differences of parts on a disk: how each file differs, and the number of new files in submodules.

    ``lfs_files`` are all files of LFS.
    """

    submodules: Mapping[bytes, str] = {}
    lfs: Mapping[bytes, str] = {}
    lfs_files: frozenset[bytes] = frozenset()
    new: int = 0


class Git(Protocol):
    name: str

    @property
    def version(self) -> tuple[int, ...]: ...

    async def inspect(self, path: Path, *, within: Path | None = None) -> SourceRepository:
        """Describe a local repository without trusting it: its configuration has no effect.

        Raises ``BadSource``: missing, not a directory, not a repository, owned by another user, borrowing objects
        (``objects/info/alternates``). A linked work tree is followed to its repository. With ``within``, here and
        below, everything must lie below that directory, with a ``.git`` and through no link, else ``Untrusted``.
        """

    async def resolve(self, path: Path, *, branch: str | None, commit: str | None, within: Path | None = None) -> str:
        """Return the commit to check out of ``path``: the given one if it exists, the branch's, or else HEAD's.

        Raises ``BadRef`` for a name outside the allow-list grammar (before git sees it), and ``UnknownCommit``.
        """

    async def read_file(
        self, path: Path, commit: str, name: str, *, limit: int, within: Path | None = None
    ) -> bytes | None:
        """Read a regular file of a commit of the repository at ``path``; ``None`` when the commit has no such path.

        Raises ``HostileTree`` for a link, a directory, and a file of more than ``limit`` bytes.
        """

    async def fetch(
        self, path: Path, commit: str, *, into: Path, depth: int | None, within: Path | None = None
    ) -> None:
        """Make the bare private repository ``into`` with ``commit`` and its history to ``depth``.

        No hard links, no borrowed objects; objects are checked. Raises ``HostileTree`` for a tree with a name that
        must never be written to a disk (``..``, any form of ``.git``, names equal when case or normalisation is
        ignored).
        """

    async def resolve_url(self, url: str, *, branch: str | None, commit: str | None) -> ResolvedRef:
        """Ask a server which commit to check out; with neither, its default branch. A given commit is not checked.

        Raises ``BadUrl`` and ``BadRef`` before anything is asked; ``UrlUnsupported`` where a program is missing;
        ``UnknownCommit`` for a branch that does not exist; ``NoRepository``; ``RemoteDenied`` (it requires other
        credentials, or its host key is unknown); ``RemoteRedirects``; ``RemoteUnreachable`` after retries;
        ``RemoteOverLimit`` for a server that is too slow or sends too much.
        """

    async def fetch_url(self, url: str, commit: str, *, into: Path, depth: int | None) -> None:
        """Make the bare private repository ``into`` with exactly ``commit`` and its history to ``depth``.

        Objects are checked, and mirrored on this host: a commit in the mirror is not fetched again. Any number of
        callers may run at once. Raises what ``resolve_url`` raises (``UnknownCommit``: the server does not give this
        commit), and ``HostileTree`` as ``fetch`` does.
        """

    async def read_url(self, url: str, commit: str, name: str, *, depth: int | None, limit: int) -> bytes | None:
        """Read a file as ``read_file`` does, of a commit on a server, mirrored as by ``fetch_url``, with its errors."""

    async def fetch_parts(self, repository: Path, commit: str, wanted: PartsRequest) -> Parts:
        """Fetch what a commit of a private repository only refers to, and note it there.

        From then on ``check_out`` and ``materialise`` put it into their trees, ``snapshot`` leaves it as the base has
        it, and ``compare`` compares it too. Each submodule is fetched from the user's own clone or by a URL that
        ``fetch_url`` takes, with its errors; raises ``Untrusted``, ``BadSource`` for what is nowhere, and
        ``RemoteOverLimit`` for too many submodules, too deep ones, and too large files of LFS.
        """

    async def part_changes(self, repository: Path, tree: Path | int) -> PartChanges:
        """Compare the parts of a checkout with what ``fetch_parts`` has fetched."""

    async def check_out(
        self, repository: Path, commit: str, *, into: Path, branch: str, origin: str | None = None
    ) -> None:
        """Fill the empty directory ``into`` with ``commit`` and give it a ``.git`` of its own.

        That ``.git`` has ``branch`` checked out at ``commit``, the same history, and shares no file with
        ``repository``. With a URL as ``origin`` it has that remote, whose branch of this name is followed; else none.
        Raises ``CheckoutDiffers`` when HEAD is not ``commit`` afterwards.
        """

    async def initialise(self, tree: Path, *, branch: str) -> None:
        """Make a ``.git`` without commits, owned by the owner of the directory ``tree``.

        It appears whole or not at all; one that exists already, or by then, stays.
        """

    async def copy_uncommitted(self, path: Path, *, into: Path, within: Path | None = None) -> int:
        """Copy uncommitted changes of the repository at ``path`` into a checkout; return how many paths changed."""

    async def create_empty(self, repository: Path) -> None:
        """Make the bare private repository of a workspace that starts empty."""

    async def bundle(self, repository: Path, commits: Sequence[str], to: Path) -> None:
        """Write commits of a private repository, with all that they need there, to a new file that git can clone from.

        Where the repository is cut, so is the bundle: it goes with the file ``shallow`` of the repository.
        """

    async def unbundle(self, bundle: Path, shallow: Path | None, *, into: Path) -> None:
        """Make a private repository of a bundle. Raises ``GitFailed`` for one that is damaged."""

    async def snapshot(self, repository: Path, tree: Path, base: str | None, options: SnapshotOptions) -> Snapshot:
        """Commit the files below ``tree``, byte for byte, onto ``base``.

        Regular files and symbolic links, no empty directories, never the ``.git`` at the top. Paths that the ignore
        files *of the base* match are left out unless the base tracks them. Files are streamed. Equal input gives an
        equal id.
        """

    async def entries(self, repository: Path, commit: str) -> list[TreeEntry]:
        """List all files and links of a commit in git's order. Raises ``UnknownCommit``, also for a tree or blob id."""

    async def changes(self, repository: Path, base: str | None, commit: str) -> list[Change]:
        """List the changes from ``base`` (``None``: the empty tree) to ``commit`` by path; renames are not detected."""

    async def rejected_files(self, repository: Path, changes: Sequence[Change]) -> Mapping[bytes, str]:
        """Map each changed file that git itself reads and ``fetch`` would refuse, such as bad submodules, to why."""

    async def patch(self, repository: Path, base: str | None, commit: str, to: Path) -> int:
        """Write a binary-safe patch for ``git apply`` to the new file ``to``, streamed; return its size."""

    async def materialise(self, repository: Path, commit: str, into: Path) -> Sequence[TreeEntry]:
        """Write the commit's files into the empty directory ``into``: no ``.git``, no filters, no attributes.

        Afterwards names, modes and contents are compared with the tree; raises ``CheckoutDiffers``. Raises
        ``UnknownCommit`` before anything is written.
        """

    async def compare(self, repository: Path, commit: str, tree: Path | int) -> Mapping[bytes, str]:
        """Compare a directory, by path or descriptor, with a commit.

        Maps each path that differs to ``missing``, ``extra``, ``mode`` or ``content``.
        """

    async def quarantine(self, repository: Path, bundle: bytes, base: str, *, into: Path) -> Sequence[AgentCommit]:
        """Unpack a bundle from ``base`` to HEAD into the new directory ``into``; return its commits, HEAD last.

        The repository does not change. Raises ``HostileTree`` for a bundle with another ref, objects that git refuses,
        names as in ``fetch``, new submodules, and commits that are not built on ``base``; ``RemoteOverLimit`` for too
        many commits; ``GitMissing`` on a host without the git program.
        """

    async def accept(self, repository: Path, quarantine: Path, base: str, commit: str, *, to: Path) -> str:
        """Move the objects of a quarantine into the repository, and write a bundle of exactly these to ``to``.

        Returns the tree id of ``commit``, the last of its commits, which the caller has judged.
        """
