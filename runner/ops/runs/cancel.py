"""Cancel a run from any process that has its store: a request that the run's own runner looks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import trio

from runner.core.errors import RunElsewhere, RunnerError
from runner.core.settings import Settings
from runner.ops.host.liveness import is_lost
from runner.ops.host.state import open_state
from runner.ops.runs.pending import cancel_pending, is_pending
from runner.ports.store import EntryRow, Store

_KIND = "cancel"  # of entries, each named after its run
_LOOK = 1.0  # seconds between looks for requests
_PATIENCE = 30.0  # seconds until a runner that does not answer is given up
_HEARING = 0.2  # seconds between looks for its answer


async def cancel_run(settings: Settings, run: str) -> str:
    """Cancel a run of this host's store, as ``request_cancel`` does, and return its id. Raises ``UnknownRun`` too."""
    async with open_state(settings) as store:
        return await request_cancel(store, settings.home, run)


async def request_cancel(store: Store, home: Path, run: str) -> str:
    """Ask the runner of a run to end its work, or at a second call its finalize phase; return once it has heard.

    Cancelling takes a request back that was not heard yet. Raises ``UnknownRun``, and ``RunElsewhere`` for a run that
    has ended, or whose runner is gone or does not answer.
    """
    row = await store.find(run)
    if is_pending(row) and await cancel_pending(store, row):
        return row.id
    if row.ended is not None:
        raise RunElsewhere(f"run `{row.id}` has ended", hint=f"see `runner runs show {row.id}`")
    if await is_lost(store, home, row):
        raise RunElsewhere(f"nobody works on run `{row.id}` any more", hint=f"`runner recover {row.id}` ends it")
    await store.put_entry(EntryRow(kind=_KIND, name=row.id, body="{}"))
    try:
        with trio.move_on_after(_PATIENCE):
            while True:
                await trio.sleep(_HEARING)
                if not await store.entries(_KIND, name=row.id):
                    return row.id
    finally:
        with trio.CancelScope(shield=True):
            await store.remove_entry(_KIND, row.id)
    hint = "see on its host whether it is stopped; `runner recover` ends it once it is known to be dead"
    raise RunElsewhere(f"the runner of run `{row.id}` has not answered for {_PATIENCE:g} s", hint=hint)


async def heed_requests(store: Store, stops: Callable[[], Mapping[str, Callable[[], None]]]) -> None:
    """Stop runs of this process whenever somebody asks for it; ``stops`` has what does it, by id. Never returns."""
    while True:
        await trio.sleep(_LOOK)
        with suppress(RunnerError):  # the store may be away for a while, and who asks waits
            for request in await store.entries(_KIND):
                stop = stops().get(request.name)
                if stop is not None and await store.remove_entry(_KIND, request.name):
                    stop()
