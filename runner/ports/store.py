"""The store port. The journal is the truth; every other table is a projection written in the same transaction."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from runner.core.model import DEFAULT_PROJECT, ClockReference, Fence, Lease, Limits, SlotKey, SlotState, WorkspaceStatus
from runner.events.events import Event, Recorded

Cursor = tuple[int, str]  # ``created`` and ``id`` of a row in a list, newest first, which goes on below it


class RunRow(Struct, frozen=True, kw_only=True):
    """A run as listings show it. Times are microseconds since the epoch, UTC; ``resumes`` is the run that it continues,
    ``rehearsal`` what replaced its models, and ``manifests`` the file or folder that its plan was made from.
    ``runner`` is the ``RunnerRow`` that works on it.
    """

    id: str
    name: str
    status: str
    exit_code: int | None
    plan: str
    created: int
    ended: int | None
    resumes: str | None = None
    rehearsal: str | None = None
    manifests: str | None = None
    runner: str | None = None
    project: str = DEFAULT_PROJECT


class RunnerRow(Struct, frozen=True, kw_only=True):
    """A process that works on runs or holds leases; rows of runs and leases name its ``id``.

    ``boot`` identifies its host since its last start, ``home`` the directory of its ``RUNNER_HOME`` there, and
    ``ticks`` the process beside others that had its ``pid``. The store sets ``started`` and ``heartbeat``:
    microseconds since the epoch, UTC.
    """

    id: str
    host: str
    boot: str
    home: str
    pid: int
    ticks: int
    started: int = 0
    heartbeat: int = 0


class ProjectRow(Struct, frozen=True, kw_only=True):
    """The record of a project beside its manifests; ``root`` is a directory of this host.

    ``manifest`` is the file that it comes from, which alone changes it from then on; ``None`` for one that a command
    made. The store sets ``updated``: microseconds since the epoch, UTC.
    """

    name: str
    root: str
    workspace_isolation: bool
    protected_paths: tuple[str, ...] = ()
    manifest: str | None = None
    updated: int = 0


class WorkspaceRow(Struct, frozen=True, kw_only=True):
    """The state of a workspace. Times are microseconds since the epoch, UTC.

    ``run`` is the run that made it, and will remove it, if any. ``session`` is the one that it is attached to. ``path``
    is an adopted directory, with its ``inode`` at that time. ``base`` is the commit that its work is compared with,
    ``snapshot`` the last one saved of it. ``expires`` is ``None`` for one that lives until it is destroyed.
    ``not_enforced`` are limits that it should have beside ``limits``, and that its provider cannot enforce. ``image``
    is the id of the system that its commands see. ``slot`` is its id in a warm pool before it was claimed, which its
    directories are named after. ``tools`` are those that may be called in it, ``None`` for all. ``mcp_server`` is the
    server that it hosts.
    """

    id: str
    provider: str
    status: WorkspaceStatus
    created: int
    used: int
    expires: int | None = None
    persistent: bool = False
    project: str = DEFAULT_PROJECT
    run: str | None = None
    session: str | None = None
    path: str | None = None
    inode: int | None = None
    url: str | None = None
    branch: str | None = None
    base: str | None = None
    limits: Limits | None = None
    snapshot: str | None = None
    not_enforced: Limits | None = None
    image: str | None = None
    slot: str | None = None
    tools: tuple[str, ...] | None = None
    mcp_server: str | None = None


class EntryRow(Struct, frozen=True, kw_only=True):
    """Something that a client of a server has made: its ``body`` is the JSON of its ``kind``.

    The store sets ``created``, microseconds since the epoch, UTC, and ``version``, which is 0 for what is not stored.
    """

    kind: str
    name: str
    body: str
    state: str = ""
    version: int = 0
    created: int = 0


class PoolRow(Struct, frozen=True):
    """A warm pool: the number of slots that a key should have. ``name`` is the key's by ``lifecycle.pool``."""

    name: str
    key: SlotKey
    size: int


class SlotRow(Struct, frozen=True, kw_only=True):
    """A slot of a pool; its ``id`` is that of its workspace. ``workspace`` is the one that it is claimed for.

    The store sets ``created``: microseconds since the epoch, UTC.
    """

    id: str
    pool: str
    state: SlotState
    keeper: str
    created: int = 0
    workspace: str | None = None


class Reader(Protocol):
    """The reading half of a store."""

    async def now(self) -> int:
        """Return the time by the store's clock, which alone decides what has expired: microseconds since the epoch."""

    async def lease(self, workspace: str) -> Lease:
        """Return the lease of a workspace, which may be free."""

    async def leases(self) -> list[Lease]:
        """List every lease that has a holder, expired ones as well, the oldest first."""

    async def workspace_events(self, workspace: str, *, after: int = 0) -> list[Recorded]:
        """List the events of a workspace's own journal, whose ``run`` is the workspace's id."""

    async def workspaces(
        self, *, status: str | None = None, before: Cursor | None = None, limit: int | None = None
    ) -> list[WorkspaceRow]:
        """List the workspaces that exist, newest first, those of runs as well."""

    async def workspace(self, id: str) -> WorkspaceRow:
        """Return the workspace whose id starts with ``id``. Raises ``UnknownWorkspace``."""

    async def anchor(self) -> ClockReference | None:
        """Return the last reading of this host's clock, if there is one."""

    async def newest(self) -> int:
        """Return the time of the newest event of any journal; 0 when there is none."""

    async def events(self, run: str, *, after: int = 0, limit: int | None = None) -> list[Recorded]:
        """List the events of a run in order, those numbered above ``after``, at most ``limit``."""

    def watch(self, run: str, *, after: int = 0) -> AsyncGenerator[Recorded]:
        """Yield the events of a run numbered above ``after``, past and coming, without an end of its own."""

    async def counts(self) -> dict[str, int]:
        """Return the number of events in each journal, of runs and of workspaces."""

    async def runs(
        self,
        *,
        status: str | None = None,
        exit_code: int | None = None,
        name: str | None = None,
        since: int | None = None,
        projects: Sequence[str] | None = None,
        before: Cursor | None = None,
        limit: int | None = None,
    ) -> list[RunRow]:
        """List runs, newest first. In ``name`` only ``*`` stands for others; ``since`` is a time like ``created``,
        ``projects`` are those that they belong to.
        """

    async def run_counts(self) -> dict[str, int]:
        """Return the number of runs by status."""

    async def find(self, run: str) -> RunRow:
        """Return the run whose id starts with ``run``, or the newest for ``last``. Raises ``UnknownRun``."""

    async def runners(self) -> list[RunnerRow]:
        """List the runners that have not ended in good order, the dead as well."""

    async def projects(self) -> list[ProjectRow]:
        """List every project, by name."""

    async def project(self, name: str) -> ProjectRow:
        """Return a project. Raises ``UnknownProject``, with near misses."""

    async def entries(
        self,
        kind: str | None = None,
        *,
        name: str | None = None,
        state: str | None = None,
        before: Cursor | None = None,
        limit: int | None = None,
    ) -> list[EntryRow]:
        """List entries, newest first."""

    async def pools(self) -> list[PoolRow]:
        """List every warm pool, by name; those of size 0 as well."""

    async def slots(self) -> list[SlotRow]:
        """List every slot, the oldest first."""

    async def pool_counts(self) -> dict[str, int]:
        """Return the number of claims by all journals: of a warm workspace as ``hit``, of others by reason."""


class Store(Reader, Protocol):
    @property
    def nonce(self) -> str:
        """The identity of this store, put on everything that its runs create."""

    @property
    def writable(self) -> bool:
        """Tell whether the medium takes writes."""

    async def append(self, run: str, events: Sequence[Event], *, fence: Fence | None = None) -> list[Recorded]:
        """Make events durable, all or none, and return them as recorded; numbers have no gaps.

        With a ``fence`` they are written only while the caller still has that lease, by this store's clock, in the same
        transaction; else ``LeaseLost``. The second of two ``LeaseAcquired`` raises ``LeaseHeld``.

        Returning means that they survive a kill and a power cut. Appends of concurrent callers share one commit. The
        events of a cancelled caller may or may not be there, never in part. Raises ``StoreFailed`` (disk full, I/O),
        ``StoreBusy``, and ``RunExists`` for a ``RunSubmitted`` of a run that is there, and for it or a ``RunStarted``
        with the key and name of another run. ``RunOver`` refuses what is only for a pending run once that has begun or
        will not, and its beginning once it has ended.
        """

    async def append_to_workspace(
        self, workspace: str, events: Sequence[Event], *, fence: Fence | None = None
    ) -> list[Recorded]:
        """Append events of a workspace outside of any run: a journal of its own, numbered from 1.

        Raises ``WorkspaceState`` for a change that ``lifecycle.workspace`` does not allow.
        """

    @property
    def runner(self) -> RunnerRow | None:
        """The runner that has opened this store, which its runs and leases name from their first event."""

    async def register(self) -> None:
        """Record the runner, before it works on something that is neither a run nor leased."""

    async def beat(self) -> None:
        """Record that the runner lives, if anything names it."""

    async def leave(self) -> None:
        """Remove the runner, which works on nothing any more."""

    async def take_run(self, run: str, before: str | None) -> bool:
        """Become the runner of a run, if it is still ``before``; of concurrent callers one succeeds."""

    async def set_anchor(self, anchor: ClockReference) -> None: ...

    async def put_project(self, project: ProjectRow) -> ProjectRow:
        """Make or change the record of a project. Raises ``ProjectOwned`` for a manifest's, when no manifest changes
        it.
        """

    async def put_entry(self, entry: EntryRow) -> EntryRow | None:
        """Make an entry of version 0, or change one, and return it as stored.

        ``None`` when there is one of that name already, or it has another version by now.
        """

    async def remove_entry(self, kind: str, name: str) -> bool:
        """Remove an entry; return whether there was one."""

    async def put_pools(self, pools: Sequence[PoolRow]) -> None:
        """Replace all pools by these, all or none."""

    async def resize_pools(self, sizes: Mapping[str, int]) -> None:
        """Change how many slots the pools with these names should have."""

    async def put_slot(self, slot: SlotRow) -> SlotRow:
        """Record a slot; durable before anything of it is made."""

    async def move_slot(self, id: str, before: SlotState, after: SlotState, workspace: str | None = None) -> bool:
        """Change the state of a slot, if it is still ``before``; return whether it was: of concurrent callers one
        succeeds.
        """

    async def remove_slot(self, id: str) -> None:
        """Remove a slot of which nothing is left, or that has become a workspace. Idempotent."""
