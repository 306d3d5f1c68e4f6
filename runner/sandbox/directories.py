"""A workspace as directories of this host: the tree, the private directories, and the record that names its owner.

The record is written first and removed last, so that half-made workspaces are found again. Where the runner is root,
tree and private directories belong to a uid that only this workspace has, below directories that nobody else can enter.
With a disk limit they lie in a volume of their own, and a link is in the tree's place. Workspaces that share their
project share one uid: they may add to the project's directory, but only the runner changes its ``workspaces``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from runner.core.errors import CleanUpIncomplete, PlatformError, ProtectedLink, ProviderFailed, WorkspaceLost
from runner.core.home import PROJECTS, SANDBOXES, workspace_directory
from runner.core.model import DEFAULT_PROJECT, Handle, Limits
from runner.core.patterns import pattern
from runner.ports.provider import WorkspaceRequest
from runner.safefs import trees
from runner.safefs.safe_open import open_linkless
from runner.sandbox.idmapped_mounts import why_no_idmap
from runner.sandbox.volumes import Volume, Volumes, make_template, why_no_volumes

PRIVATE = ("home", "tmp", "output", "runner")
_ID = pattern(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class WorkspaceDirectories:
    """The workspaces of one provider below one ``RUNNER_HOME``. Blocking; call it in a worker thread.

    ``own_users``: a workspace belongs to a user of its own, not to the runner's; by default where that is possible.
    ``idmaps``: the provider can show the directory of another user as the workspace's own, see ``idmapped_mounts``.
    """

    def __init__(self, home: Path, provider: str, *, own_users: bool | None = None, idmaps: bool = False) -> None:
        self.home = Path(os.path.realpath(home))  # ``resolve`` raises for links in a circle
        self.own_users = trees.can_chown() if own_users is None else own_users
        self._idmaps = idmaps
        self._provider = provider
        self._records = self.home / SANDBOXES
        self._volumes = Volumes(self.home)

    def handle(
        self,
        id: str,
        limits: Limits,
        *,
        project: str = DEFAULT_PROJECT,
        shared: bool = False,
        adopted: tuple[Path, int] | None = None,
        slot: str | None = None,
    ) -> Handle:
        """Compute the handle of a workspace; ``adopted`` is an existing tree and the user that commands run as.

        A workspace that was a ``slot`` of a warm pool keeps the slot's directories and user.
        """
        if slot is not None:
            return replace(self.handle(slot, limits), id=id, project=project)
        directory = self.home / PROJECTS / project
        private = self._volumes.place(id) if limits.disk_bytes is not None else self._records / id
        own = private / "tree" if limits.disk_bytes is not None else workspace_directory(self.home, project, id)
        tree, uid = adopted or (own, self._uid(str(directory) if shared else id))
        whole = directory if shared else None
        return Handle(
            provider=self._provider,
            id=id,
            tree=tree,
            private=private,
            uid=uid,
            limits=limits,
            project=project,
            project_tree=whole,
            adopted=adopted is not None,
        )

    def why_no_disk_limit(self) -> str | None:
        """Return why disk limits are impossible here; ``None`` where they are possible."""
        if not self.own_users:
            return f"{self._provider} limits the disk only of workspaces that root makes"
        return why_no_volumes()

    def volume(self, handle: Handle) -> Volume | None:
        """Find the volume that holds everything the workspace's commands write, if its disk is limited.

        The size is the limit itself when the file system's tables make it differ by no more than one percent.
        """
        wanted = handle.limits.disk_bytes
        found = self._volumes.find(handle.private) if wanted is not None else None
        if wanted is None or found is None or abs(found.bytes - wanted) > wanted / 100:
            return found
        return replace(found, bytes=wanted)

    async def prepare(self, request: WorkspaceRequest) -> None:
        """Prepare for ``create``. Raises ``ProviderFailed``, also for a disk limit that cannot be enforced."""
        if request.limits.disk_bytes is None:
            return
        why = self.why_no_disk_limit()
        if request.tree is not None or request.shared:
            why = "others write to the same disk"
        if why is not None:
            raise ProviderFailed(f"`{self._provider}` cannot limit the disk of workspace `{request.id}`: {why}")
        await make_template(request.limits.disk_bytes)

    def has_own_user(self, handle: Handle) -> bool:
        """Tell whether only this workspace's processes run as the handle's user."""
        return self.own_users and handle.project_tree is None and not handle.adopted

    def create(self, request: WorkspaceRequest, fill: Callable[[Path], None] = lambda private: None) -> Handle:
        """Make the directories of a workspace; ``fill`` adds a provider's own to the private one.

        Raises ``ProviderFailed``, and leaves an existing workspace as it is.
        """
        for word, what in ((request.id, "a workspace id"), (request.project, "the name of a project")):
            if not _ID.fullmatch(word):
                raise ProviderFailed(f"`{word}` is not {what}")
        if request.tree is not None and request.shared:
            raise ProviderFailed(f"`{request.tree}` is outside its project's directory, which it cannot share")
        adopted = (request.tree, self._owner(request.tree, request.id)) if request.tree is not None else None
        handle = self.handle(
            request.id, request.limits, project=request.project, shared=request.shared, adopted=adopted
        )
        try:
            self._records.mkdir(mode=0o711, parents=True, exist_ok=True)
            self._write_record(request, handle, durable=True)
        except OSError as error:
            raise ProviderFailed(f"workspace `{request.id}` cannot be recorded: {error}") from error
        try:
            self._check_neighbours(handle)
            self._make(handle)
            fill(handle.private)
        except OSError as error:
            self.destroy(handle)
            raise ProviderFailed(f"workspace `{request.id}` cannot be made: {error}") from error
        except ProviderFailed:
            self.destroy(handle)
            raise
        return handle

    def _make(self, handle: Handle) -> None:
        places = [handle.private / name for name in PRIVATE]
        if handle.limits.disk_bytes is None:
            places.insert(0, handle.private)
        else:
            self._volumes.make(handle.private, handle.limits.disk_bytes)
            trees.chown(handle.private, handle.uid)
        if not handle.adopted:
            self._make_project(self._public_path(handle).parent, handle)
            places.append(handle.tree)
        for directory in places:
            directory.mkdir(mode=0o700)
            trees.chown(directory, handle.uid)
        if handle.limits.disk_bytes is not None:
            self._public_path(handle).symlink_to(handle.tree)

    def _public_path(self, handle: Handle) -> Path:
        """Return where people look for a tree: its place, or that of a link into its volume."""
        project = DEFAULT_PROJECT if handle.slot else handle.project
        return workspace_directory(self.home, project, handle.private.name)

    def mount(self, handle: Handle) -> None:
        """Mount the workspace's volume, if it has one. Raises ``WorkspaceLost``, ``ProviderFailed``."""
        if handle.limits.disk_bytes is None:
            return
        try:
            self._volumes.mount(handle.private)
        except FileNotFoundError as error:
            raise WorkspaceLost(f"workspace `{handle.id}` is gone: `{error.filename}`") from error
        except OSError as error:
            raise ProviderFailed(f"the disk of workspace `{handle.id}` cannot be mounted: {error}") from error

    def _make_project(self, workspaces: Path, handle: Handle) -> None:
        """Make the project's directory; shared workspaces may write into it, but not into ``workspaces``."""
        workspaces.mkdir(mode=0o711, parents=True, exist_ok=True)
        if self.own_users:
            shared = handle.project_tree is not None
            for directory, mode in ((workspaces, 0o750), (workspaces.parent, 0o1770)):
                os.chown(directory, -1, handle.uid if shared else os.getgid())
                directory.chmod(mode if shared else 0o711)

    def _owner(self, tree: Path, id: str) -> int:
        """Choose the user that commands run as in an adopted directory: its owner, or another if that is root.

        Raises ``ProviderFailed`` for a directory that cannot be adopted.
        """
        if not tree.is_absolute() or self.home.is_relative_to(tree) or tree.is_relative_to(self.home):
            raise ProviderFailed(f"`{tree}` cannot become a workspace", hint="name a directory outside RUNNER_HOME")
        try:
            fd = open_linkless(tree)
        except (OSError, ProtectedLink) as error:
            raise ProviderFailed(f"`{tree}` cannot become a workspace: {error}") from error
        try:
            os.listdir(f"/proc/self/fd/{fd}")
            uid = os.fstat(fd).st_uid
            if self.own_users and uid == 0:
                return self._check_idmap(tree, fd, self._uid(id))
        except OSError as error:
            raise ProviderFailed(f"`{tree}` cannot become a workspace: {error.strerror}") from error
        finally:
            os.close(fd)
        if not self.own_users and uid != os.getuid():
            raise ProviderFailed(f"`{tree}` belongs to user {uid}, and commands run as {os.getuid()}")
        return uid

    def _check_idmap(self, tree: Path, directory: int, uid: int) -> int:
        """Refuse a directory of root that others can enter, where commands could leave set-uid programs of root."""
        why = why_no_idmap(directory, uid) if self._idmaps else f"{self._provider} cannot map owners"
        hint = "use a directory of an ordinary user"
        if why is None and not any(parent.stat().st_mode & 0o011 == 0 for parent in tree.parents):
            why = f"other users can enter `{tree.parent}`, and would find programs there that run as root"
            hint += ", or one below a directory that only root can enter"
        if why is not None:
            text = f"`{tree}` belongs to root, which runs no command, and cannot be mapped to another user: {why}"
            raise ProviderFailed(text, hint=hint)
        return uid

    def _check_neighbours(self, handle: Handle) -> None:
        """Refuse a workspace whose commands could reach one that is promised to be isolated, or the reverse.

        Called once the record is written, so that of two requests at the same time both see the other.
        """
        for id, record in self._all().items():
            if id in (handle.id, handle.slot):
                continue
            other = self._recorded(id, record)
            if handle.adopted and other.adopted and _overlap(handle.tree, other.tree):
                raise ProviderFailed(f"`{other.tree}` is already workspace `{other.id}`")
            apart = (other.project_tree is None) != (handle.project_tree is None)
            if other.project == handle.project and apart and not (handle.adopted or other.adopted):
                how = "sees itself alone" if other.project_tree is None else "sees the whole project"
                raise ProviderFailed(
                    f"workspace `{other.id}` of project `{handle.project}` {how}, and this one would not",
                    hint="destroy that workspace first: all workspaces of a project are isolated, or none",
                )

    def neighbours(self, handle: Handle) -> list[str]:
        """List the other workspaces that share a workspace's project."""
        records = self._all().items()
        return [id for id, one in records if id != handle.id and one.get("shared") and one["project"] == handle.project]

    def _recorded(self, id: str, record: dict[str, Any]) -> Handle:
        adopted = record.get("adopted")
        return self.handle(
            id,
            Limits(**record.get("limits", {})),
            project=record.get("project", DEFAULT_PROJECT),
            shared=record.get("shared", False),
            adopted=(Path(adopted[0]), adopted[1]) if adopted else None,
            slot=record.get("slot"),
        )

    def _all(self) -> dict[str, dict[str, Any]]:
        """Read the records of all workspaces by id, without those of slots that became other workspaces."""
        records = {path.stem: _read(path) for path in sorted(self._records.glob("*.json"))}
        assigned = {record.get("slot") for record in records.values()}
        return {id: record for id, record in records.items() if record and id not in assigned}

    def list_owned(self, nonce: str) -> list[Handle]:
        found = [
            self._recorded(id, record)
            for id, record in self._all().items()
            if record.get("provider") == self._provider and record.get("nonce") == nonce
        ]
        for handle in found:
            with suppress(PlatformError):  # half made or damaged: opening it raises
                self.mount(handle)
        return found

    def assign(self, slot: Handle, request: WorkspaceRequest) -> Handle:
        """Turn a slot into the requested workspace. Raises ``ProviderFailed``, having changed nothing.

        The new record is not synced to the disk, since the caller waits; until it is, the slot's record remains valid.
        """
        self.check(slot)
        handle = self.handle(request.id, slot.limits, project=request.project, slot=slot.id)
        try:
            self._write_record(replace(request, limits=slot.limits), handle, durable=False)
        except OSError as error:
            raise ProviderFailed(f"workspace `{request.id}` cannot be recorded: {error}") from error
        try:
            self._check_neighbours(handle)
        except ProviderFailed:
            self._record(handle.id).unlink()
            raise
        return handle

    def chown_to_workspace_user(self, handle: Handle) -> None:
        self.check(handle)
        self.mount(handle)
        for top in _tops(handle):
            trees.chown_tree(top, handle.uid)

    def destroy(self, handle: Handle) -> None:
        """Remove a workspace; one that is gone is no error. Raises ``CleanUpIncomplete``, ``ProviderFailed``."""
        self.check(handle)
        record, places = self._found(handle), _tops(handle)
        if not record:
            left = [str(path) for path in places if path.exists()]
            if left:
                raise CleanUpIncomplete(f"no record says who owns {left}", hint="remove them by hand")
            return
        if record.get("provider") != self._provider:
            raise ProviderFailed(f"workspace `{handle.id}` belongs to another provider")
        try:
            if handle.limits.disk_bytes is None:
                left = [what for place in places for what in trees.remove(place)]
            else:
                left = []
                self._volumes.remove(handle.private)
                self._public_path(handle).unlink(missing_ok=True)
        except OSError as error:
            left = [str(error)]
        if left:
            raise CleanUpIncomplete(f"{len(left)} entries of workspace `{handle.id}` remain, such as {left[0]}")
        for id in (handle.slot, handle.id):
            if id is not None:
                self._record(id).unlink(missing_ok=True)

    def owner(self, handle: Handle) -> tuple[str, str] | None:
        """Return the run and the store's nonce that a workspace was made for; ``None`` when it is gone."""
        record = self._found(handle)
        return (record["run"], record["nonce"]) if record else None

    def _found(self, handle: Handle) -> dict[str, Any]:
        """Read the record of a workspace, or of the slot that it was if its own was lost in a power cut."""
        return _read(self._record(handle.id)) or (_read(self._record(handle.slot)) if handle.slot else {})

    def check(self, handle: Handle) -> None:
        """Raise ``ProviderFailed`` for a handle that differs from the workspace's record."""
        if not _ID.fullmatch(handle.id) or handle != replace(self._known(handle), limits=handle.limits):
            raise ProviderFailed(f"`{handle.id}` at `{handle.tree}` is not a workspace of `{self._provider}` here")

    def _known(self, handle: Handle) -> Handle:
        if record := _read(self._record(handle.id)):
            return self._recorded(handle.id, record)
        return self.handle(
            handle.id,
            handle.limits,
            project=handle.project if _ID.fullmatch(handle.project) else DEFAULT_PROJECT,
            shared=handle.project_tree is not None,
            adopted=(handle.tree, handle.uid) if handle.adopted else None,
            slot=handle.slot,
        )

    def _uid(self, of: str) -> int:
        if not self.own_users:
            return os.getuid()
        return trees.FIRST_UID + int.from_bytes(sha256(os.fsencode(of)).digest()[:3])

    def _record(self, id: str) -> Path:
        return self._records / f"{id}.json"

    def _write_record(self, request: WorkspaceRequest, handle: Handle, *, durable: bool) -> None:
        record = {"provider": self._provider, "run": request.run, "nonce": request.nonce}
        place = {"project": request.project, "shared": request.shared}
        adopted = {"adopted": (str(handle.tree), handle.uid)} if handle.adopted else {}
        slot = {"slot": handle.slot} if handle.slot else {}
        body = json.dumps({**record, "limits": asdict(request.limits), **place, **adopted, **slot})
        part = self._records / f".{request.id}.part"
        try:
            with open(part, "w") as file:
                file.write(body)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.link(part, self._record(request.id))  # never half a record, never over another's
        finally:
            part.unlink(missing_ok=True)
        if not durable:
            return
        directory = os.open(self._records, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


class WorkspaceTraces(Struct, frozen=True):
    """Paths and mounts of a workspace; ``run`` is the one that it was made for, ``nonce`` that of its store."""

    workspace: str
    run: str
    nonce: str
    places: tuple[str, ...]


def find_workspace_traces(home: Path) -> list[WorkspaceTraces]:
    """Find the traces of every workspace of a ``RUNNER_HOME``, of any store; mounts nothing."""
    from runner.sandbox.docker_mounts import traces_of  # with the client of docker, which most callers do without

    found = []
    for id, record in WorkspaceDirectories(home, "")._all().items():
        directories = WorkspaceDirectories(home, record.get("provider", ""))
        handle = directories._recorded(id, record)
        tree = handle.tree if handle.adopted else directories._public_path(handle)
        found_there = [str(path) for path in (tree, handle.private) if os.path.lexists(path)]
        volume = [] if handle.limits.disk_bytes is None else directories._volumes.traces(handle.private)
        places = (*found_there, *volume, *traces_of(handle.private.name))
        found.append(WorkspaceTraces(id, record.get("run", ""), record.get("nonce", ""), places))
    return found


def _tops(handle: Handle) -> tuple[Path, ...]:
    """Return the directories that hold everything of a workspace that is the runner's to remove."""
    within = handle.adopted or handle.tree.is_relative_to(handle.private)
    return (handle.private,) if within else (handle.tree, handle.private)


def _overlap(one: Path, other: Path) -> bool:
    return one.is_relative_to(other) or other.is_relative_to(one)


def _read(record: Path) -> dict[str, Any]:
    """Read a record; empty when it is missing or damaged."""
    try:
        found = json.loads(record.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
