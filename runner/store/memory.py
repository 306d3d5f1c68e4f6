"""A store in memory, lost when the process ends; engine tests run on it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from fnmatch import fnmatchcase
from itertools import count

import trio
from msgspec.structs import replace

from runner.core.clock import now_microseconds
from runner.core.errors import BadStoreUrl, RunOver, StoreFailed
from runner.core.model import ClockReference, Fence, Lease, SlotState, Status
from runner.core.sanitize import excerpt
from runner.core.settings import without_secrets
from runner.events.events import (
    Event,
    LeaseAcquired,
    Recorded,
    RunEnded,
    RunPlaced,
    RunStarted,
    RunSubmitted,
    RunWaits,
    RunWithdrawn,
    decode,
    encode,
)
from runner.lifecycle.lease import LeaseEvent, advance, check, free
from runner.lifecycle.pool import NEXT
from runner.lifecycle.workspace import fold, named
from runner.ports.store import Cursor, EntryRow, PoolRow, ProjectRow, RunnerRow, RunRow, SlotRow, WorkspaceRow
from runner.store._projects import find_project, project_owned_error
from runner.store._runs import R, begin_with, glob_of, not_pending_error, one_run, run_exists_error
from runner.store._slots import count_name
from runner.store._workspaces import one_workspace


def place(url: str) -> None:
    """Check a URL, which names nothing but the scheme. Raises ``BadStoreUrl``."""
    if url != "memory:":
        raise BadStoreUrl(f"`{excerpt(without_secrets(url))}` names more than memory", hint="write memory:")


def exists(place: None) -> bool:
    return False


@asynccontextmanager
async def open_store(
    place: None, *, entropy: Callable[[int], bytes], must_exist: bool, runner: RunnerRow | None
) -> AsyncIterator[MemoryStore]:
    yield MemoryStore(runner=runner)


@asynccontextmanager
async def open_reader(place: None, *, must_exist: bool) -> AsyncIterator[MemoryStore]:
    yield MemoryStore()


class MemoryStore:
    nonce = "memory"
    writable = True

    def __init__(self, now: Callable[[], int] = now_microseconds, *, runner: RunnerRow | None = None) -> None:
        self.runner = runner
        self._runners: dict[str, RunnerRow] = {}
        self._now = now
        self._journal: dict[str, list[Recorded]] = {}
        self._rows: dict[str, RunRow] = {}
        self._keys: dict[tuple[str, str], str] = {}
        self._projects: dict[str, ProjectRow] = {}
        self._entries: dict[tuple[str, str], EntryRow] = {}
        self._leases: dict[str, Lease] = {}
        self._of_workspaces: dict[str, list[Recorded]] = {}
        self._workspaces: dict[str, WorkspaceRow] = {}
        self._anchor: ClockReference | None = None
        self._pools: dict[str, PoolRow] = {}
        self._slots: dict[str, SlotRow] = {}
        self._counts: Counter[str] = Counter()
        self._changed: defaultdict[str, trio.Event] = defaultdict(trio.Event)  # set at the next append, by owner

    async def append(self, run: str, events: Sequence[Event], *, fence: Fence | None = None) -> list[Recorded]:
        at, rows = self._now(), {id: row for id, row in [(run, self._rows.get(run))] if row}
        leases, workspaces = self._leased(events, fence, at), self._folded(run, events, at)
        for event in events:
            _project(rows, run, at, event, self._named())
        keyed = [event for event in events if isinstance(event, RunSubmitted | RunStarted) and event.key is not None]
        for started in keyed:
            holder = self._keys.get((str(started.key), started.name), run)
            if holder != run:
                raise run_exists_error(holder, started)
        recorded = self._written(self._journal.setdefault(run, []), run, at, events)
        await self._record_runner(events)
        self._rows |= rows
        self._leases, self._workspaces = leases, workspaces
        self._keys |= {(str(started.key), started.name): run for started in keyed}
        return recorded

    async def append_to_workspace(
        self, workspace: str, events: Sequence[Event], *, fence: Fence | None = None
    ) -> list[Recorded]:
        at = self._now()
        leases, workspaces = self._leased(events, fence, at), self._folded(workspace, events, at)
        recorded = self._written(self._of_workspaces.setdefault(workspace, []), workspace, at, events)
        await self._record_runner(events)
        self._leases, self._workspaces = leases, workspaces
        return recorded

    def _written(self, history: list[Recorded], owner: str, at: int, events: Sequence[Event]) -> list[Recorded]:
        stored = [decode(encode(event)) for event in events]  # what a file would give back, or fail on
        first = len(history) + 1
        history += [Recorded(owner, seq, at, event) for seq, event in zip(count(first), stored, strict=False)]
        if owner in self._changed:
            self._changed.pop(owner).set()
        self._counts.update(what for event in stored if (what := count_name(event)))
        return history[first - 1 :]

    def _leased(self, events: Sequence[Event], fence: Fence | None, at: int) -> dict[str, Lease]:
        leases = dict(self._leases)
        if fence is not None:
            check(leases.get(fence.workspace, free(fence.workspace)), fence, at)
        for event in events:
            if isinstance(event, LeaseEvent):
                row = leases.get(event.workspace, free(event.workspace))
                leases[event.workspace] = advance(row, event, at, self._named())
        return leases

    def _folded(self, owner: str, events: Sequence[Event], at: int) -> dict[str, WorkspaceRow]:
        rows = dict(self._workspaces)
        for event in events:
            if id := named(owner, event):
                row = fold(rows.pop(id, None), owner, at, event)
                rows |= {id: row} if row is not None else {}
        return rows

    def _named(self) -> str | None:
        return self.runner.id if self.runner is not None else None

    async def _record_runner(self, events: Sequence[Event]) -> None:
        if any(isinstance(event, RunSubmitted | RunStarted | LeaseAcquired) for event in events):
            await self.register()

    async def register(self) -> None:
        if self.runner is not None:
            self._runners.setdefault(self.runner.id, replace(self.runner, started=self._now()))
            await self.beat()

    async def beat(self) -> None:
        if self.runner is not None and self.runner.id in self._runners:
            self._runners[self.runner.id] = replace(self._runners[self.runner.id], heartbeat=self._now())

    async def leave(self) -> None:
        self._runners.pop(self._named() or "", None)

    async def take_run(self, run: str, before: str | None) -> bool:
        await self.register()
        taken = run in self._rows and self._rows[run].runner == before
        if taken:
            self._rows[run] = replace(self._rows[run], runner=self._named())
        return taken

    async def runners(self) -> list[RunnerRow]:
        return sorted(self._runners.values(), key=lambda row: (row.started, row.id))

    async def now(self) -> int:
        return self._now()

    async def lease(self, workspace: str) -> Lease:
        return self._leases.get(workspace, free(workspace))

    async def leases(self) -> list[Lease]:
        return sorted((row for row in self._leases.values() if row.id), key=lambda row: (row.acquired, row.workspace))

    async def workspace_events(self, workspace: str, *, after: int = 0) -> list[Recorded]:
        return self._of_workspaces.get(workspace, [])[after:]

    async def workspaces(
        self, *, status: str | None = None, before: Cursor | None = None, limit: int | None = None
    ) -> list[WorkspaceRow]:
        rows = [row for row in self._workspaces.values() if status is None or row.status == status]
        return _page(rows, before, limit)

    async def workspace(self, id: str) -> WorkspaceRow:
        found = begin_with(await self.workspaces(), id)
        return one_workspace(found, len(found), id)

    async def anchor(self) -> ClockReference | None:
        return self._anchor

    async def set_anchor(self, anchor: ClockReference) -> None:
        self._anchor = anchor

    async def newest(self) -> int:
        journals = (*self._journal.values(), *self._of_workspaces.values())
        return max((journal[-1].at for journal in journals if journal), default=0)

    async def events(self, run: str, *, after: int = 0, limit: int | None = None) -> list[Recorded]:
        return self._journal.get(run, [])[after:][:limit]

    async def watch(self, run: str, *, after: int = 0) -> AsyncGenerator[Recorded]:
        while True:
            changed = self._changed[run]
            for recorded in await self.events(run, after=after):
                after = recorded.seq
                yield recorded
            await changed.wait()

    async def counts(self) -> dict[str, int]:
        return {owner: len(events) for owner, events in (*self._journal.items(), *self._of_workspaces.items())}

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
        rows = [row for row in self._rows.values() if status is None or row.status == status]
        rows = [row for row in rows if exit_code is None or row.exit_code == exit_code]
        rows = [row for row in rows if name is None or fnmatchcase(row.name, glob_of(name))]
        rows = [row for row in rows if projects is None or row.project in projects]
        return _page([row for row in rows if since is None or row.created >= since], before, limit)

    async def run_counts(self) -> dict[str, int]:
        return dict(Counter(row.status for row in self._rows.values()))

    async def find(self, run: str) -> RunRow:
        if run in self._rows:
            return self._rows[run]
        rows = await self.runs()
        if run == "last" and rows:
            return rows[0]
        found = begin_with(rows, run)
        return one_run(found, len(found), run)

    async def put_project(self, project: ProjectRow) -> ProjectRow:
        known = self._projects.get(project.name)
        if known is not None and known.manifest is not None and project.manifest is None:
            raise project_owned_error(known)
        self._projects[project.name] = replace(project, updated=self._now())
        return self._projects[project.name]

    async def projects(self) -> list[ProjectRow]:
        return [self._projects[name] for name in sorted(self._projects)]

    async def project(self, name: str) -> ProjectRow:
        return find_project(await self.projects(), name)

    async def put_entry(self, entry: EntryRow) -> EntryRow | None:
        key, created = (entry.kind, entry.name), entry.created if entry.version else self._now()
        known = self._entries.get(key)
        if entry.version != (known.version if known is not None else 0):
            return None
        self._entries[key] = replace(entry, version=entry.version + 1, created=created)
        return self._entries[key]

    async def entries(
        self,
        kind: str | None = None,
        *,
        name: str | None = None,
        state: str | None = None,
        before: Cursor | None = None,
        limit: int | None = None,
    ) -> list[EntryRow]:
        rows = [row for row in self._entries.values() if kind in (None, row.kind) and name in (None, row.name)]
        rows = [row for row in rows if state in (None, row.state)]
        rows.sort(key=lambda row: (row.created, row.name), reverse=True)
        return [row for row in rows if before is None or (row.created, row.name) < before][:limit]

    async def remove_entry(self, kind: str, name: str) -> bool:
        return self._entries.pop((kind, name), None) is not None

    async def pools(self) -> list[PoolRow]:
        return [self._pools[name] for name in sorted(self._pools)]

    async def put_pools(self, pools: Sequence[PoolRow]) -> None:
        self._pools = {pool.name: pool for pool in pools}

    async def resize_pools(self, sizes: Mapping[str, int]) -> None:
        self._pools = {name: replace(pool, size=sizes.get(name, pool.size)) for name, pool in self._pools.items()}

    async def slots(self) -> list[SlotRow]:
        return sorted(self._slots.values(), key=lambda slot: (slot.created, slot.id))

    async def put_slot(self, slot: SlotRow) -> SlotRow:
        assert slot.id not in self._slots
        self._slots[slot.id] = replace(slot, created=self._now())
        return self._slots[slot.id]

    async def move_slot(self, id: str, before: SlotState, after: SlotState, workspace: str | None = None) -> bool:
        assert after in NEXT[before]
        slot = self._slots.get(id)
        if slot is None or slot.state is not before:
            return False
        self._slots[id] = replace(slot, state=after, workspace=workspace)
        return True

    async def remove_slot(self, id: str) -> None:
        self._slots.pop(id, None)

    async def pool_counts(self) -> dict[str, int]:
        return dict(sorted(self._counts.items()))


def _page(rows: list[R], before: Cursor | None, limit: int | None) -> list[R]:
    """Sort rows, the newest first, and return those below a cursor, at most ``limit``."""
    ordered = sorted(rows, key=lambda row: (row.created, row.id), reverse=True)
    return [row for row in ordered if before is None or (row.created, row.id) < before][:limit]


def _project(rows: dict[str, RunRow], run: str, at: int, event: Event, runner: str | None) -> None:
    if isinstance(event, RunSubmitted) and run in rows:
        raise run_exists_error(run, event)
    if isinstance(event, RunSubmitted | RunStarted) and run not in rows:
        rows[run] = RunRow(
            id=run,
            name=event.name,
            status=Status.PENDING,
            exit_code=None,
            plan=event.plan,
            created=at,
            ended=None,
            manifests=event.manifests,
            project=event.project,
            runner=runner,
        )
    if run not in rows:
        raise StoreFailed(f"run `{run}` has not started")
    is_pending = rows[run].status == Status.PENDING
    if isinstance(event, RunStarted) and is_pending:
        rows[run] = replace(
            rows[run], status=Status.RUNNING, runner=runner, resumes=event.resumes, rehearsal=event.rehearsal
        )
    elif (isinstance(event, RunStarted) and rows[run].ended) or (
        isinstance(event, RunPlaced | RunWaits | RunWithdrawn) and not is_pending
    ):
        raise not_pending_error(run)
    if isinstance(event, RunEnded):
        if rows[run].ended is not None:
            raise RunOver(f"run `{run}` has ended already")
        rows[run] = replace(rows[run], status=event.outcome.status, exit_code=event.exit_code, ended=at)
