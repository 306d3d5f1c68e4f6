"""Room for another workspace: ``WORKSPACE_MAX`` of all that a store knows, on each of its hosts, whoever has them."""

from __future__ import annotations

from msgspec import Struct

from runner.core.codec import decode
from runner.lifecycle.workspace import check_limit
from runner.ports.store import Reader

SESSION = "session"  # the kind of their entries
PROVISIONING, ACTIVE = "provisioning", "active"


class _Place(Struct):
    workspace: str | None


async def require_room(store: Reader, most: int, id: str | None = None) -> None:
    """Raise ``WorkspaceLimit`` unless there is room for ``id`` beside those before it, or for another workspace.

    A session has its place from its first moment, before anything of its workspace is made.
    """
    sessions = [*await store.entries(SESSION, state=PROVISIONING), *await store.entries(SESSION, state=ACTIVE)]
    rows = await store.workspaces()  # after them: what they become in between is not lost
    made = {row.id for row in rows}
    reserved = {}
    for entry in sessions:
        place = decode(entry.body, _Place).workspace
        if place is not None and (entry.state == PROVISIONING or place in made):
            reserved[place] = entry.created
    check_limit(most, rows, id, reserved)
