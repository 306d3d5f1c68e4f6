"""Workspaces outside of runs: make, find, stop and remove them, never losing work that was not given up.

Every change is an event in the workspace's own journal, written by the holder of its lease. The intent comes first, so
that the next holder, or ``runner recover``, can complete what was interrupted.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from hashlib import file_digest
from pathlib import Path
from uuid import UUID

import trio
from msgspec import Struct
from msgspec.structs import replace

from runner.core.errors import (
    BadSource,
    ForbiddenFiles,
    HostRefused,
    NoRepository,
    Rejected,
    RunnerError,
    UnknownCommit,
    UnknownWorkspace,
    UnsavedWork,
    UsageError,
    WorkspaceState,
)
from runner.core.home import workspace_directory
from runner.core.model import DEFAULT_PROJECT, Feature, Handle, Limits, SavedWork, SlotKey, Violation, WorkspaceStatus
from runner.core.plural import plural
from runner.core.sanitize import sanitize
from runner.core.settings import Settings
from runner.events import events as ev
from runner.lifecycle.workspace import hint
from runner.manifest.load import defaults
from runner.manifest.repository import FILE, FILE_BYTES
from runner.ops.host.state import read_state
from runner.ops.planning.files import agents_file
from runner.ops.tools import unknown_tools
from runner.ops.workspaces.capacity import require_room
from runner.ops.workspaces.create_checks import (
    ChosenProvider,
    adoptable,
    choose_provider,
    limits_of,
    require_isolation,
    status_of,
)
from runner.ops.workspaces.leases import LeaseState, ask_to_end, read_states
from runner.ops.workspaces.workspace_lease import HeldWorkspace, WorkspaceEnv, hold
from runner.policy.paths import PathPolicy
from runner.ports.git import Author, ResolvedRef, Snapshot, SnapshotOptions
from runner.ports.provider import Images, Provider, WorkspaceRequest
from runner.ports.store import ProjectRow, WorkspaceRow
from runner.runtime.agents_file import replace_in_project
from runner.runtime.context import read_input, write_new
from runner.runtime.policy_scan import policy_of
from runner.runtime.tree_scan import ScanResult, scan
from runner.safefs import trees
from runner.spec.model import AGENTS_FILE, PolicyFile
from runner.spec.policies import policies_of

BRANCH = "main"  # of a repository that the runner makes
PATCH = "work.patch"
SAVED = "saved"  # in the home, a directory for each workspace whose work was saved
_NAMED = 5  # files that an error names
_CONTENT_RULES = ("forbidden:", "max-file-size")

S = WorkspaceStatus


class SavedSnapshot(Struct, frozen=True, kw_only=True):
    """A commit with the files of a workspace, in a ``repository`` of its own, and what that workspace was made of."""

    commit: str
    repository: Path
    project: str
    url: str | None
    branch: str | None
    base: str | None
    tools: tuple[str, ...] | None


class WorkspaceOptions(Struct, frozen=True, kw_only=True):
    """Options of a new workspace: from the directory ``path`` in place, from a repository's ``url``, from a
    ``snapshot``, or empty.

    ``image`` is the system that its commands see, on providers that have images. ``tools`` are those that may be called
    in it, ``None`` for all. ``limits`` hold instead of the server's defaults, or the provider is refused.
    ``isolated`` refuses a provider that does not isolate. A ``warm`` one takes the sandbox of a warm pool, if there is
    one that fits. ``id`` is the one that a ``session`` has reserved for it. It hosts an ``mcp_server``.
    """

    path: Path | None = None
    url: str | None = None
    snapshot: SavedSnapshot | None = None
    branch: str | None = None
    project: str | None = None
    provider: str | None = None
    persistent: bool = False
    image: str | None = None
    tools: tuple[str, ...] | None = None
    limits: Limits = Limits()
    isolated: bool = False
    warm: bool = False
    id: str | None = None
    session: str | None = None
    mcp_server: str | None = None


class RemovedWorkspace(Struct, frozen=True, kw_only=True):
    """A removed workspace: ``saved_work`` says what was kept in ``saved``. An adopted ``tree`` stays."""

    workspace: str
    saved: Path | None = None
    saved_work: SavedWork | None = None
    ignored: int = 0
    tree: str | None = None


# --- looking ---------------------------------------------------------------------------------------


class WorkspaceSummary(Struct, frozen=True):
    """A workspace in a listing, with its lease if anybody, alive or dead, holds it."""

    row: WorkspaceRow
    lease: LeaseState | None


async def list_workspaces(settings: Settings) -> list[WorkspaceSummary]:
    """List every workspace, newest first, those of runs as well."""
    async with read_state(settings) as store:
        rows, leases = await store.workspaces(), await read_states(store, settings)
    held = {lease.workspace: lease for lease in leases}
    return [WorkspaceSummary(row, held.get(row.id)) for row in rows]


async def find_by_path(settings: Settings, path: Path) -> WorkspaceSummary:
    """Find the workspace that contains a path, under any name. Raises ``UnknownWorkspace``."""
    listed = {one.row.id: one for one in await list_workspaces(settings)}
    if row := _around(settings, [one.row for one in listed.values()], path):
        return listed[row.id]
    raise UnknownWorkspace(f"`{sanitize(str(path))}` is in no workspace", hint="`runner workspace list` shows all")


def _around(settings: Settings, rows: Sequence[WorkspaceRow], path: Path) -> WorkspaceRow | None:
    known = {(found.st_dev, found.st_ino): row for row in rows for found in status_of(tree_of(settings, row))}
    real = Path(os.path.realpath(path))  # ``resolve`` raises for links in a circle
    for folder in (real, *real.parents):
        for found in status_of(folder):
            if row := known.get((found.st_dev, found.st_ino)):
                return row
    return None


def tree_of(settings: Settings, row: WorkspaceRow) -> Path:
    """Return the directory of a workspace's files on this host."""
    if row.path is not None:
        return Path(row.path)
    if row.slot is not None:
        return workspace_directory(settings.home, DEFAULT_PROJECT, row.slot)
    own = workspace_directory(settings.home, row.project, row.id)
    return own if row.run is None else next(settings.home.glob(f"projects/*/workspaces/{row.id}"), own)


async def own_workspace(env: WorkspaceEnv, text: str) -> WorkspaceRow:
    """Find a workspace outside of runs.

    Raises ``UnknownWorkspace``, and ``WorkspaceState`` for one of a run or of another home.
    """
    row = await env.store.workspace(text)
    if row.run is not None:
        hint = f"runner runs show {row.run}; `runner recover {row.run}` ends it if its runner has died"
        raise WorkspaceState(f"workspace `{row.id}` belongs to run `{row.run}`, which removes it", hint=hint)
    env.require(row)
    return row


# --- making ----------------------------------------------------------------------------------------


def new_id() -> str:
    return str(UUID(bytes=secrets.token_bytes(16), version=4))


Prepare = Callable[[HeldWorkspace, Provider, Handle], Awaitable[None]]


async def create(
    env: WorkspaceEnv,
    options: WorkspaceOptions,
    prepare: Prepare | None = None,
    chosen: ChosenProvider | None = None,
) -> WorkspaceRow:
    """Make a workspace, ready for use once it is prepared. On failure or cancellation it is removed again.

    It is made by the ``chosen`` provider, or the first that fits.

    Raises ``UsageError``, ``BadDirectory``, ``UnknownProject``, ``WorkspaceLimit``, ``ProviderUnavailable``,
    ``IsolationTooWeak``, ``ImageMissing``, ``ForbiddenFiles``, and what provider and git raise.
    """
    async with creating(env, options, prepare, chosen) as held:
        return held.row


@asynccontextmanager
async def creating(
    env: WorkspaceEnv,
    options: WorkspaceOptions,
    prepare: Prepare | None = None,
    chosen: ChosenProvider | None = None,
    *,
    command: str = "create",
) -> AsyncIterator[HeldWorkspace]:
    """Make a workspace as ``create`` does, and hold it for the block from its very beginning, in the name of
    ``command``.
    """
    _check(options)
    settings = env.settings
    rows = await env.store.workspaces()
    await require_room(env.store, settings.max_workspaces, options.id)
    path = adoptable(settings, options.path, rows) if options.path else None
    project = await env.store.project(options.project) if options.project is not None else None
    if chosen is None:
        chosen = await choose_provider(env, options.provider, options.image, adopting=path is not None)
    if options.isolated:
        require_isolation(chosen.probe)
    source: ResolvedRef | SavedSnapshot | None = options.snapshot
    if options.url is not None:
        source = await env.deps.git.resolve_url(options.url, branch=options.branch, commit=None)
    on_shared_disk = path is not None or (project is not None and not project.workspace_isolation)
    probe = chosen.probe.on_shared_disk() if on_shared_disk else chosen.probe
    limits, not_enforced = limits_of(settings, probe, options.limits)
    requested = ev.WorkspaceRequested(
        provider=chosen.provider.name,
        project=project.name if project else DEFAULT_PROJECT,
        persistent=options.persistent,
        limits=limits,
        ttl_seconds=settings.workspace_ttl,
        max_age_seconds=settings.workspace_max_age,
        path=str(path) if path else None,
        inode=path.stat().st_ino if path else None,
        url=options.snapshot.url if options.snapshot else options.url,
        branch=source.branch if source else None,
        not_enforced=not_enforced,
        image=chosen.image,
        tools=options.tools,
        session=options.session,
        mcp_server=options.mcp_server,
    )
    id = options.id or new_id()
    async with hold(env, _row(id, requested), command, intent=requested) as held:
        try:
            await require_room(env.store, settings.max_workspaces, id)
            if chosen.image is not None and options.image is not None and isinstance(chosen.provider, Images):
                await chosen.provider.pull(chosen.image, options.image)
            protected = project.protected_paths if project is not None else ()
            pool = slot_key(chosen, limits, protected) if options.warm else None
            await _make(held, chosen.provider, project, source, prepare, pool=pool)
        except BaseException as error:
            with trio.CancelScope(shield=True):
                await _end(held, f"it could not be made: {error}" if isinstance(error, RunnerError) else "cancelled")
            raise
        held.row = await env.store.workspace(id)
        yield held


def _check(options: WorkspaceOptions) -> None:
    if options.path is not None and options.url is not None:
        raise UsageError("a workspace is made from a directory or a URL, not both", hint="leave one of them out")
    if options.branch is not None and options.url is None:
        raise UsageError("--branch is the branch of a --url")
    if unknown := unknown_tools(options.tools or ()):
        raise unknown


def _row(id: str, wanted: ev.WorkspaceRequested) -> WorkspaceRow:
    return WorkspaceRow(
        id=id,
        provider=wanted.provider,
        status=S.CREATING,
        created=0,
        used=0,
        path=wanted.path,
        inode=wanted.inode,
    )


async def _make(
    held: HeldWorkspace,
    provider: Provider,
    project: ProjectRow | None,
    source: ResolvedRef | SavedSnapshot | None,
    prepare: Prepare | None,
    *,
    pool: SlotKey | None,
) -> None:
    row, env = held.row, held.env
    shared = project is not None and not project.workspace_isolation and row.path is None
    request = WorkspaceRequest(
        id=row.id,
        run="",
        nonce=env.deps.nonce,
        limits=row.limits or Limits(),
        project=row.project,
        shared=shared,
        tree=Path(row.path) if row.path else None,
        image=row.image,
    )
    handle = await _take_warm(held, provider, pool, request) if pool is not None and not shared else None
    handle = handle or await provider.create(request)
    await held.write(ev.WorkspaceStatusChanged(S.PROVISIONING))
    base = await _fill(held, handle, source)
    if base is not None:
        await held.write(ev.BaseCommitRecorded(base))
        held.row = replace(row, base=base)
    if row.path is None:
        await validate(held.env, held.row, handle)
        if project is not None:
            await _place_agents_file(held, handle, Path(project.root))
        await provider.chown_to_workspace_user(handle)
    if prepare is not None:
        await prepare(held, provider, handle)
    await held.write(ev.WorkspaceStatusChanged(S.READY))


def slot_key(chosen: ChosenProvider, limits: Limits, protected: Sequence[str] = ()) -> SlotKey | None:
    """Return the key of the slots that an empty workspace can come from, where there can be any."""
    if not chosen.probe.enforces(Feature.WARM_POOL):
        return None
    return SlotKey(
        provider=chosen.provider.name,
        image=chosen.image,
        limits=limits,
        protected=tuple(protected) if chosen.probe.protects_at_start else (),
        place=chosen.probe.place,
    )


async def _take_warm(held: HeldWorkspace, provider: Provider, key: SlotKey, request: WorkspaceRequest) -> Handle | None:
    """Take a workspace that was kept warm; a miss is counted, where somebody keeps a pool."""
    found = await held.env.deps.warm(provider, key, request)
    if isinstance(found, Handle):
        await held.write(ev.SlotClaimed(request.id, str(found.slot)))
        held.row = replace(held.row, slot=found.slot)
        return found
    if found is not None:
        await held.write(ev.PoolMissed(request.id, found))
    return None


async def _fill(held: HeldWorkspace, handle: Handle, source: ResolvedRef | SavedSnapshot | None) -> str | None:
    """Fill the tree with its initial files; return the commit that its work is compared with.

    Of a snapshot that is the one of the workspace that it was made of: what an agent has written sets no policy.
    """
    row, git, repository = held.row, held.env.deps.git, held.env.repository(held.row.id)
    if isinstance(source, SavedSnapshot):
        await trio.to_thread.run_sync(copy_repository, source.repository, repository)
        branch = source.branch or BRANCH
        await git.check_out(repository, source.commit, into=handle.tree, branch=branch, origin=source.url)
        return source.base
    if row.url is not None and source is not None:
        await git.fetch_url(row.url, source.commit, into=repository, depth=1)
        await git.check_out(repository, source.commit, into=handle.tree, branch=source.branch, origin=row.url)
        return source.commit
    if not _has(handle.tree, ".git"):
        await git.initialise(handle.tree, branch=BRANCH)
    if not handle.adopted:
        await git.create_empty(repository)
        return None
    try:
        return await git.resolve(handle.tree, branch=None, commit=None)
    except (BadSource, UnknownCommit):  # another user's, or nothing is committed yet
        return None


async def _place_agents_file(held: HeldWorkspace, handle: Handle, root: Path) -> None:
    """Write the project's ``AGENTS.md`` where commands look for it, unless the tree has one."""
    try:
        wanted = await trio.to_thread.run_sync(agents_file, root)
    except (OSError, ValueError) as error:
        raise HostRefused(f"`{root / AGENTS_FILE}` cannot be copied: {error}") from error
    if wanted is None:
        return
    content = await trio.to_thread.run_sync(read_input, wanted)
    if handle.project_tree is not None:
        await trio.to_thread.run_sync(replace_in_project, handle.project_tree, content, handle.uid)
    elif not _has(handle.tree, AGENTS_FILE):
        await held.write(ev.FileInjected(AGENTS_FILE, wanted.sha256))
        await trio.to_thread.run_sync(write_new, handle.tree / AGENTS_FILE, content, 0o644)


def _has(tree: Path, name: str) -> bool:
    return os.path.lexists(tree / name)


# --- judging ---------------------------------------------------------------------------------------


async def policy_for(env: WorkspaceEnv, row: WorkspaceRow) -> PathPolicy:
    """Return the policy of a workspace: the built-in one and that of its base commit. Raises ``Rejected``."""
    file = None
    if row.base is not None:
        place = Path(row.path) if row.path else env.repository(row.id)
        try:
            content = await env.deps.git.read_file(place, row.base, FILE, limit=FILE_BYTES)
        except (BadSource, NoRepository, UnknownCommit) as error:
            raise HostRefused(f"the policy of workspace `{row.id}` cannot be read: {error.message}") from error
        file = None if content is None else PolicyFile(row.base, content)
    specs, _, findings = policies_of((defaults()["Policy"],), file, untrusted=False)
    if any(finding.severity == "error" for finding in findings):
        raise Rejected(findings)
    return policy_of(specs)


async def look_through(handle: Handle, policy: PathPolicy, *, without: Sequence[str] = ()) -> ScanResult:
    """Scan a tree for everything that breaks policy or cannot be saved. Can be cancelled."""

    def stopping() -> bool:
        trio.from_thread.check_cancelled()
        return False

    skipped = (".git", *without)
    try:
        return await trio.to_thread.run_sync(lambda: scan(handle.tree, policy, skip_top=skipped, should_stop=stopping))
    except OSError as error:
        raise HostRefused.of(error) from error


async def validate(env: WorkspaceEnv, row: WorkspaceRow, handle: Handle) -> None:
    """Raise ``ForbiddenFiles`` when the workspace has files that its policy forbids.

    Other findings of a scan, such as links out of the tree, only matter when work is saved or published.
    """
    found = await look_through(handle, await policy_for(env, row))
    bad = [each for each in found.violations if each.rule.startswith(_CONTENT_RULES)]
    if bad or found.truncated:
        hint = "remove them, or allow them in .agentgate/policy.yaml of the commit that the workspace starts from"
        raise ForbiddenFiles(
            f"workspace `{row.id}` holds what policy forbids: {_names(bad or found.violations)}", hint=hint
        )


def _names(violations: Sequence[Violation]) -> str:
    more = f", and {len(violations) - _NAMED} more" if len(violations) > _NAMED else ""
    return ", ".join(map(str, violations[:_NAMED])) + more


# --- stopping and resuming -------------------------------------------------------------------------


async def stop(env: WorkspaceEnv, text: str) -> WorkspaceRow:
    """Kill what runs in a workspace and let nothing start there; its files stay. A stopped one stays so."""
    row = await own_workspace(env, text)
    if row.status is S.STOPPED:
        return row
    async with hold(env, row, "stop") as held:
        await finish_stop(held)
    return await env.store.workspace(row.id)


async def finish_stop(held: HeldWorkspace) -> None:
    """Kill what runs in a workspace, also after an interrupted stop."""
    provider, handle = await held.handle()
    if held.row.status is not S.STOPPING:
        await held.write(ev.WorkspaceStatusChanged(S.STOPPING))
    await provider.evict(handle)
    await held.write(ev.WorkspaceStatusChanged(S.STOPPED), use_of(held.env.settings))


async def resume(env: WorkspaceEnv, text: str) -> WorkspaceRow:
    """Let a stopped workspace be used again; a ready one stays ready. Raises ``WorkspaceState``."""
    row = await own_workspace(env, text)
    if row.status is S.READY:
        return row
    async with hold(env, row, "resume") as held:
        await held.handle()
        await held.write(ev.WorkspaceStatusChanged(S.READY), use_of(env.settings))
    return await env.store.workspace(row.id)


def use_of(settings: Settings) -> ev.WorkspaceUsed:
    return ev.WorkspaceUsed(settings.workspace_ttl, settings.workspace_max_age)


def require_ready(row: WorkspaceRow) -> None:
    """Raise ``WorkspaceState`` unless the workspace is ready."""
    if row.status is not S.READY:
        raise WorkspaceState(f"workspace `{row.id}` is {row.status}", hint=hint(row.id, row.status))


# --- removing --------------------------------------------------------------------------------------


async def destroy(env: WorkspaceEnv, text: str, *, discard: bool = False, reason: str = "") -> RemovedWorkspace:
    """Save unsaved work of a workspace and remove it; the files of an adopted directory stay.

    Terminates a command that runs in it, and completes an interrupted removal. ``discard`` gives unsaved work up.
    Raises ``UnknownWorkspace``, ``LeaseHeld`` for a holder that is not a command, and ``UnsavedWork`` for work that
    cannot be saved: then everything stays as it is.
    """
    row = await own_workspace(env, text)
    stubborn = await ask_to_end(env, row)
    async with hold(env, row, "destroy", over=stubborn) as held:
        return await finish_destroy(held, discard=discard, reason=reason)


async def delete(env: WorkspaceEnv, text: str, *, discard: bool = False) -> RemovedWorkspace:
    """Forget an adopted directory; destroy any other workspace, unless it has unsaved work and no ``discard``."""
    row = await own_workspace(env, text)
    async with hold(env, row, "delete") as held:
        provider, handle = await env.find(row)
        if handle is not None and not handle.adopted and not discard:
            work = await work_of(held, provider, handle)
            if work.changed or work.lost:
                hint = f"`runner workspace destroy {row.id}` saves it first; --discard gives it up"
                raise UnsavedWork(f"workspace `{row.id}` has {work}", hint=hint)
        return await finish_destroy(held, discard=True)


async def finish_destroy(held: HeldWorkspace, *, discard: bool, reason: str = "") -> RemovedWorkspace:
    """Do what ``destroy`` does, for a held workspace."""
    env, row = held.env, held.row
    history = [recorded.event for recorded in await env.store.workspace_events(row.id)]
    settled = _is_settled(history)
    provider, handle = await env.find(row)
    removed = RemovedWorkspace(workspace=row.id, tree=row.path)
    begun = row.status is S.DESTROYING
    if handle is not None and not handle.adopted and not (begun and settled):
        if discard:
            await held.write(ev.UnsavedWorkDiscarded())
        else:
            work = await work_of(held, provider, handle)
            if work.lost:
                hint = f"remove it, or give all of it up: runner workspace destroy --discard {row.id}"
                raise UnsavedWork(f"workspace `{row.id}` has {work}", hint=hint)
            if not begun:
                await held.write(ev.WorkspaceStatusChanged(S.DESTROYING, reason))
                begun = True
            removed = await save(held, work)
    if not begun:
        await held.write(ev.WorkspaceStatusChanged(S.DESTROYING, reason))
    if handle is not None:
        await provider.destroy(handle)
    await held.end(ev.WorkspaceStatusChanged(S.DESTROYED))
    await trio.to_thread.run_sync(trees.remove, env.folder(row.id))
    return removed


def _is_settled(history: Sequence[ev.Event]) -> bool:
    """Tell whether nothing of a workspace is left to save: a snapshot of before its removal was not the last word."""
    settled = False
    for event in history:
        match event:
            case ev.WorkspaceStatusChanged(status=S.DESTROYING):
                settled = any(isinstance(each, ev.UnsavedWorkDiscarded) for each in history)
            case ev.WorkspaceSaved() | ev.UnsavedWorkDiscarded():
                settled = True
    return settled


async def _end(held: HeldWorkspace, reason: str) -> None:
    """Remove a workspace that was never ready."""
    held.row = await held.env.store.workspace(held.row.id)
    await finish_destroy(held, discard=True, reason=reason)


class UnsavedChanges(Struct, frozen=True):
    """Work that exists only in a workspace: a snapshot of it, and what cannot be in one, with the reason."""

    snapshot: Snapshot
    changed: int
    lost: tuple[Violation, ...]

    def __str__(self) -> str:
        if self.lost:
            return f"unsaved work that cannot be saved: {_names(self.lost)}"
        return f"unsaved work: {plural(self.changed, 'changed file')}"


async def work_of(held: HeldWorkspace, provider: Provider, handle: Handle) -> UnsavedChanges:
    """Find unsaved work. Nothing may run in the workspace."""
    env, row = held.env, held.row
    await provider.retrieve(handle)
    history = await env.store.workspace_events(row.id)
    placed = [recorded.event.path for recorded in history if isinstance(recorded.event, ev.FileInjected)]
    found = await look_through(handle, await policy_for(env, row), without=placed)
    git, repository = env.deps.git, env.repository(row.id)
    author = Author("runner", "runner@localhost", env.deps.now() // 1_000_000)
    left_out = found.offending | {name.encode() for name in placed}
    wanted = SnapshotOptions(f"unsaved work of workspace {row.id}", author, left_out)
    snapshot = await git.snapshot(repository, handle.tree, row.base, wanted)
    changes = await git.changes(repository, row.base, snapshot.commit)
    return UnsavedChanges(snapshot, len(changes), found.violations)


async def save(held: HeldWorkspace, work: UnsavedChanges, *, unchanged: bool = False) -> RemovedWorkspace:
    """Save a snapshot, its repository and its patch durably; without a change only a receipt, unless ``unchanged``."""
    env, row = held.env, held.row
    commit = work.snapshot.commit
    if not work.changed and not unchanged:
        saved_work = SavedWork(commit=commit, patch=None, patch_sha256=None, patch_bytes=0, changed=0)
        await held.write(ev.WorkspaceSaved(saved_work))
        return RemovedWorkspace(workspace=row.id, saved=None, saved_work=saved_work, ignored=work.snapshot.ignored)
    to = env.settings.home / SAVED / row.id
    repository = env.repository(row.id)
    await trio.to_thread.run_sync(partial(to.mkdir, mode=0o700, parents=True, exist_ok=True))
    (to / PATCH).unlink(missing_ok=True)
    size = await env.deps.git.patch(repository, row.base, commit, to / PATCH)
    digest = await trio.to_thread.run_sync(_sha256, to / PATCH)
    await trio.to_thread.run_sync(copy_repository, repository, to / repository.name)
    saved_work = SavedWork(commit=commit, patch=PATCH, patch_sha256=digest, patch_bytes=size, changed=work.changed)
    await held.write(ev.WorkspaceSaved(saved_work))
    return RemovedWorkspace(workspace=row.id, saved=to, saved_work=saved_work, ignored=work.snapshot.ignored)


def copy_repository(source: Path, to: Path) -> None:
    """Copy a repository, objects by hard links: they never change."""
    trees.remove(to)
    for folder, _, files in os.walk(source):
        place = Path(folder).relative_to(source)
        (to / place).mkdir(parents=True)
        copy = os.link if place.parts[:1] == ("objects",) else shutil.copyfile
        for name in files:
            copy(Path(folder, name), to / place / name)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return file_digest(file, "sha256").hexdigest()
