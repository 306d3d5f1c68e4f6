"""Records of hosted servers in the store: how each one is, what was approved of it, and what a person asks of it.

The process that hosts a server writes how it is; a command of a person writes the rest, and the host looks for it.
Homes that share a store each have their own servers, whatever those are called. What runs use is of all of them: it is
called by a digest of what is started.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from secrets import token_hex
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from runner.core.codec import decode, encode
from runner.core.errors import StoreFailed, UnknownMcpServer, nearest
from runner.core.sanitize import excerpt
from runner.core.settings import Settings
from runner.ports.mcp import Lists
from runner.ports.store import EntryRow, Reader, Store

KIND = "mcp_server"
OF_RUNS = "of runs"  # the state of one that no home hosts
_ID = "mcp-home"  # in a home whose store others may share


class Approved(Struct, frozen=True, kw_only=True):
    """Parts of a server that change only with a person's consent. ``None`` for what has not been looked at yet.

    What it lists is as it has it: tools and prompts by name, resources by URI, and templates of those by theirs.
    """

    image: str | None = None
    command: tuple[str, ...] | None = None
    tools: dict[str, dict[str, Any]] | None = None
    prompts: dict[str, dict[str, Any]] | None = None
    resources: dict[str, dict[str, Any]] | None = None
    templates: dict[str, dict[str, Any]] | None = None


class HostedRecord(Struct, frozen=True, kw_only=True):
    """A hosted server, or one of runs, whose name ends in ``@`` and a digest of what is started.

    ``home`` identifies the home of a hosted one where homes may share the store.

    ``since`` is the time of its last change, in microseconds since the epoch, UTC.

    ``folder`` has its manifest. ``seen`` is what it has, ``approved`` what was consented to. ``restarts`` counts those
    that a person asked for, ``crashes`` those since the host has started.
    """

    name: str
    home: str = ""
    state: str = "starting"
    detail: str = ""
    since: int = 0
    folder: str = ""
    workspace: str | None = None
    crashes: int = 0
    restarts: int = 0
    seen: Approved = Approved()
    approved: Approved = Approved()

    @property
    def pending(self) -> bool:
        """Tell whether something of it waits for consent."""
        return self.seen != self.approved


def home_of(settings: Settings) -> str:
    """Identify a home among those that may share its store; nothing does where the store is in it.

    Raises ``StoreFailed``.
    """
    if settings.database_url is None:
        return ""
    file = settings.home / _ID
    part = file.with_name(f".{_ID}-{token_hex(8)}")
    try:
        if not file.exists():
            part.write_text(token_hex(8))
            with suppress(FileExistsError):  # another process was first
                os.link(part, file)
            part.unlink()
        return file.read_text()
    except OSError as error:
        raise StoreFailed(f"`{file}` cannot be used: {error.strerror}", hint="set RUNNER_HOME") from error


async def list_hosted(store: Reader, home: str) -> list[HostedRecord]:
    """List the servers of a home, and those of runs."""
    found = [decode(row.body, HostedRecord) for row in await store.entries(KIND)]
    own = (one for one in found if one.home == home or one.state == OF_RUNS)
    return sorted(own, key=lambda one: one.name)


async def take_over(store: Store, home: str, own: Callable[[HostedRecord], bool]) -> None:
    """Give a home what is its ``own`` of what a shared store has from before homes were told apart there.

    What was approved of it holds on. Anything else is left to its home, and is nobody's until then.
    """
    for row in await store.entries(KIND):
        one = decode(row.body, HostedRecord)
        if home and not one.home and one.state != OF_RUNS and own(one):
            await change(store, one.name, home, partial(_given, one, home))
            await remove(store, one.name, "")


def _given(old: HostedRecord, home: str, now: HostedRecord) -> HostedRecord:
    """Return the record that a home has, or an old one as its own."""
    return now if now.since else replace(old, home=home)


async def find_hosted(store: Reader, name: str, home: str) -> HostedRecord:
    """Return a record. Raises ``UnknownMcpServer``."""
    found = {one.name: one for one in await list_hosted(store, home)}
    if name not in found:
        raise UnknownMcpServer(f"there is no hosted server `{excerpt(name)}`", hint=nearest(name, [*found]))
    return found[name]


async def remove(store: Store, name: str, home: str) -> None:
    await store.remove_entry(KIND, _key(name, home))


def _key(name: str, home: str) -> str:
    return f"{home}/{name}" if home else name


async def change(store: Store, name: str, home: str, of: Callable[[HostedRecord], HostedRecord]) -> HostedRecord:
    """Change a record, or make it, whoever else changes it meanwhile."""
    key = _key(name, home)
    while True:
        rows = await store.entries(KIND, name=key)
        before = decode(rows[0].body, HostedRecord) if rows else HostedRecord(name=name, home=home)
        after = of(before)
        if rows and after == before:
            return before
        body = encode(after).decode()
        row = EntryRow(kind=KIND, name=key, body=body, version=rows[0].version if rows else 0)
        if await store.put_entry(row) is not None:
            return after


async def approve_first(store: Store, name: str, found: Lists) -> Lists:
    """Note what the server of a run lists. Return what of it is as it was approved; the first of each list is."""
    now = await store.now()

    def seen(one: HostedRecord) -> HostedRecord:
        first = {kind: items for kind, items in found.items() if getattr(one.approved, kind) is None}
        state = OF_RUNS if one.state == "starting" else one.state
        noted = replace(one, state=state, seen=replace(one.seen, **found), approved=replace(one.approved, **first))
        return noted if noted == one else replace(noted, since=now)

    return approved_of(await change(store, name, "", seen), found)


def approved_of(record: HostedRecord, found: Lists) -> Lists:
    """Return what of each list is as it was approved."""
    return {
        kind: {key: item for key, item in items.items() if (getattr(record.approved, kind) or {}).get(key) == item}
        for kind, items in found.items()
    }


async def ask_restart(store: Store, name: str, home: str) -> HostedRecord:
    """Ask the host of a server to start it anew, also one that is not started any more. Raises ``UnknownMcpServer``."""
    found = await find_hosted(store, name, home)
    return await change(store, name, found.home, lambda one: replace(one, restarts=one.restarts + 1))


async def approve(store: Store, record: HostedRecord) -> HostedRecord:
    """Consent to what a ``record`` says was seen of a server."""
    return await change(store, record.name, record.home, lambda one: replace(one, approved=record.seen))
