"""A workspace as directories of this host: the tree, the private directories, and the record that names its owner.

The record is written first and removed last, so whatever was half made is found again. Where we are
root, tree and private directories belong to a uid that only this workspace has, below directories
that nobody else can enter.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from runner import trees
from runner.errors import CleanUpIncomplete, ProviderFailed
from runner.model import Handle, Limits
from runner.ports.provider import WorkspaceRequest

PRIVATE = ("home", "tmp", "output", "runner")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Directories:
    """The workspaces of one provider below one ``RUNNER_HOME``. Blocking; call it in a worker thread.

    ``own_users``: a workspace belongs to a user of its own, and not to us. By default where that is possible.
    """

    def __init__(self, home: Path, provider: str, *, own_users: bool | None = None) -> None:
        self.home = home.resolve()
        self.own_users = trees.can_give() if own_users is None else own_users
        self._provider = provider
        self._records = self.home / "sandboxes"

    def handle(self, id: str, limits: Limits) -> Handle:
        tree = self.home / "projects" / "default" / "workspaces" / id
        return Handle(self._provider, id, tree, self._records / id, self._uid(id), limits)

    def create(self, request: WorkspaceRequest, fill: Callable[[Path], None] = lambda private: None) -> Handle:
        """Make the directories of a workspace; ``fill`` adds a provider's own to the private one.

        Raises ``ProviderFailed``, and leaves an existing workspace as it is.
        """
        if not _ID.fullmatch(request.id):
            raise ProviderFailed(f"`{request.id}` is not a workspace id")
        handle = self.handle(request.id, request.limits)
        try:
            for parent in (self._records, handle.tree.parent):
                parent.mkdir(mode=0o711, parents=True, exist_ok=True)
            self._write_record(request)
        except OSError as error:
            raise ProviderFailed(f"workspace `{request.id}` cannot be recorded: {error}") from error
        try:
            for directory in (handle.tree, handle.private, *(handle.private / name for name in PRIVATE)):
                directory.mkdir(mode=0o700)
                trees.own(directory, handle.uid)
            fill(handle.private)
        except OSError as error:
            self.destroy(handle)
            raise ProviderFailed(f"workspace `{request.id}` cannot be made: {error}") from error
        return handle

    def owned(self, nonce: str) -> list[Handle]:
        found = []
        for path in sorted(self._records.glob("*.json")):
            record = _read(path)
            if record.get("provider") == self._provider and record.get("nonce") == nonce:
                found.append(self.handle(path.stem, Limits(**record["limits"])))
        return found

    def give(self, handle: Handle) -> None:
        self.check(handle)
        for top in (handle.tree, handle.private):
            trees.give(top, handle.uid)

    def destroy(self, handle: Handle) -> None:
        """Remove a workspace; one that is gone is no error. Raises ``CleanUpIncomplete``, ``ProviderFailed``."""
        self.check(handle)
        record = self._record(handle.id)
        if not record.exists():
            left = [str(path) for path in (handle.tree, handle.private) if path.exists()]
            if left:
                raise CleanUpIncomplete(f"nothing says whose {left} are", hint="remove them by hand")
            return
        if _read(record).get("provider") != self._provider:
            raise ProviderFailed(f"workspace `{handle.id}` belongs to another provider")
        try:
            left = trees.remove(handle.tree) + trees.remove(handle.private)
        except OSError as error:
            left = [str(error)]
        if left:
            raise CleanUpIncomplete(f"{len(left)} entries of workspace `{handle.id}` remain, such as {left[0]}")
        record.unlink()

    def check(self, handle: Handle) -> None:
        """Refuse a handle that does not name the places that its id stands for."""
        if not _ID.fullmatch(handle.id) or handle != self.handle(handle.id, handle.limits):
            raise ProviderFailed(f"`{handle.id}` at `{handle.tree}` is not a workspace of `{self._provider}` here")

    def _uid(self, id: str) -> int:
        if not self.own_users:
            return os.getuid()
        return trees.FIRST_UID + int.from_bytes(sha256(id.encode()).digest()[:3])

    def _record(self, id: str) -> Path:
        return self._records / f"{id}.json"

    def _write_record(self, request: WorkspaceRequest) -> None:
        record = {"provider": self._provider, "run": request.run, "nonce": request.nonce}
        body = json.dumps({**record, "limits": asdict(request.limits)})
        part = self._records / f".{request.id}.part"
        try:
            with open(part, "w") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            os.link(part, self._record(request.id))  # never half a record, never over another's
        finally:
            part.unlink(missing_ok=True)
        directory = os.open(self._records, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _read(record: Path):  # type: ignore[no-untyped-def]  # JSON of ours, or nothing
    try:
        found = json.loads(record.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
