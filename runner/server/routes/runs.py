"""Routes of runs: start them, look at them and what they leave, follow them, and end what was started here.

A token sees the runs of its projects, and no others exist.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import trio
from msgspec import UNSET, Meta, Struct, UnsetType, field

from runner.artifacts.export import list_files
from runner.client.values import Artifact, Artifacts, Logs, NewRuns, Run, RunListing, Runs, StartedRun, StartedRuns
from runner.core.errors import RunnerError, UnknownRun
from runner.core.model import Status
from runner.core.sanitize import excerpt
from runner.events.record import replay
from runner.ops.host.liveness import is_lost
from runner.ops.runs.fetched import read_back
from runner.ops.runs.header import header_of
from runner.ops.runs.history import DEADLINE, TIMED_OUT, StoredRun, find_run, logs_of, state_of
from runner.ops.runs.secret_values import make_redactor
from runner.ops.runs.step_output import translator_of, words_of
from runner.ops.runs.watch import planned
from runner.plan.model import Json
from runner.ports.store import RunRow
from runner.report.json import record_document
from runner.report.text import render_run
from runner.safefs.safe_open import open_beneath
from runner.server.events import EventStream, event_frames
from runner.server.planning import start_planned
from runner.server.route import BASE, Call, Reply, api
from runner.server.routes.workspaces import moment, read_cursor
from runner.server.stream import PieceStream

_CHUNK = 1 << 18  # bytes of a file that are read as one


class After(Struct, kw_only=True):
    """The number of an event; those above it are sent. The header ``Last-Event-ID`` says the same."""

    after: Annotated[int, Meta(ge=0, lt=1 << 62)] = 0


class LastEvent(Struct):
    """The number of the last event that a client has."""

    last: Annotated[str, Meta(pattern="^[0-9]{1,18}$")] = field(default="0", name="last-event-id")


class SentEvent(Struct):
    """An event of a run as JSON. What the stream says of itself, such as `lost`, has no number."""

    event: str
    data: str
    id: str | UnsetType = UNSET


async def visible(call: Call, *, change: bool = False) -> RunRow:
    """Return the run that a path names. Raises ``UnknownRun``, and ``OutOfScope`` for a change by one that reads."""
    id = call.path["id"]
    row = None
    with suppress(UnknownRun):
        row = await call.server.env.store.find(id)
    if row is None or row.id != id or not call.token.may_see(row.project):
        raise UnknownRun(f"there is no run `{excerpt(id)}`")
    if change:
        call.require_change(row.project)
    return row


async def _list(call: Call) -> Runs:
    store, query = call.server.env.store, call.query
    state = None if query.state is UNSET else query.state
    stored = {TIMED_OUT: Status.FAILED.value, Status.LOST.value: Status.RUNNING.value}
    name = None if query.name is UNSET else query.name
    projects = call.token.projects
    if query.project is not UNSET:
        projects = [query.project] if call.token.may_see(query.project) else []
    before = None if query.cursor is UNSET else read_cursor(query.cursor)
    code = DEADLINE if state == TIMED_OUT else None
    read = partial(store.runs, name=name, projects=projects, exit_code=code)
    found: list[tuple[RunRow, Run]] = []
    while len(found) <= query.limit:
        status = None if state is None else stored.get(state, state)
        rows = await read(status=status, before=before, limit=query.limit + 1)
        shown = [(row, await shown_run(call, row)) for row in rows]
        found += [one for one in shown if state in (None, one[1].state)]
        if len(rows) <= query.limit:
            break
        before = (rows[-1].created, rows[-1].id)
    page = found[: query.limit]
    last = page[-1][0] if len(found) > query.limit else None
    return Runs([run for _, run in page], None if last is None else f"{last.created}.{last.id}")


async def _start(call: Call) -> Reply:
    ids = [StartedRun(id=run.id, name=run.plan.name, attached=old) for run, old in await start_planned(call, call.body)]
    return Reply(value=StartedRuns(ids), status=202, headers={"location": f"{BASE}/runs/{ids[0].id}"})


async def _stored(call: Call) -> StoredRun:
    return await find_run(call.server.env.settings, (await visible(call)).id)


async def _with_files(call: Call, *, whole: bool = False) -> StoredRun:
    stored = await _stored(call)
    if stored.record.status is not Status.PENDING:
        await read_back(stored, call.server.env.settings, whole=whole)
    return stored


async def _get(call: Call) -> Json:
    return record_document((await _stored(call)).record)


async def _report(call: Call) -> Reply:
    stored = await _stored(call)
    with suppress(RunnerError):  # the record is all there
        await read_back(stored, call.server.env.settings)
    return Reply(value=render_run(stored.record, stored.evidence))


async def _artifacts(call: Call) -> Artifacts:
    """List the regular files that a run has left, as far as they are written."""
    directory = (await _with_files(call, whole=True)).directory

    def look() -> list[Artifact]:
        return [
            Artifact(name=name, bytes=(directory / name).lstat().st_size) for name in sorted(list_files(directory)[0])
        ]

    return Artifacts(await trio.to_thread.run_sync(look))


async def _artifact(call: Call) -> PieceStream:
    """Send a file with every secret that this host knows redacted."""
    stored, name = await _with_files(call, whole=True), call.path["name"]
    try:
        file = open_beneath(stored.directory, name)
    except (OSError, ValueError) as error:
        raise UnknownRun(f"run `{stored.record.id}` left no file `{excerpt(name)}`") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise UnknownRun(f"run `{stored.record.id}` left no file `{excerpt(name)}`")
    redacted = make_redactor(call.server.env.settings).stream()

    def pieces() -> Iterator[bytes]:
        with open(file, "rb") as opened:
            while chunk := opened.read(_CHUNK):
                yield redacted.feed(chunk)
        yield redacted.end()

    return PieceStream(pieces(), name=name)


async def _logs(call: Call) -> PieceStream:
    stored = await _with_files(call)
    step = None if call.query.step is UNSET else call.query.step
    return PieceStream(_printed(stored, logs_of(stored, step), headed=step is None))


def _printed(stored: StoredRun, files: list[Path], *, headed: bool) -> Iterator[bytes]:
    """Yield what steps have printed, and an agent's stream in its words."""
    say = translator_of(header_of(planned(stored)).agent)
    for file in files:
        if headed:
            yield f"--- {file.stem} {file.suffix[1:]}\n".encode()
        if say is not None and stored.record.steps[file.stem].kind == "agent" and file.suffix == ".stdout":
            yield from (f"{line}\n".encode(errors="replace") for line in words_of(file, say))
            continue
        with file.open("rb") as opened:
            while chunk := opened.read(_CHUNK):
                yield chunk


async def _events(call: Call) -> EventStream:
    row = await visible(call)
    last = int(call.headers.get("last-event-id", "0"))
    frames = event_frames(call.server.env.store, row, max(call.query.after, last))
    return EventStream(call.server, row.id, frames)


async def _cancel(call: Call) -> None:
    row = await visible(call, change=True)
    await call.server.running.cancel(row)


async def _resume(call: Call) -> Reply:
    row = await visible(call, change=True)
    call.require_change(None)  # its manifests are planned anew, with the secrets of this host
    stored = await find_run(call.server.env.settings, row.id)
    run = await call.server.running.resume(stored)
    started = StartedRun(id=run.id, name=run.plan.name, attached=False)
    return Reply(value=started, status=202, headers={"location": f"{BASE}/runs/{run.id}"})


async def shown_run(call: Call, row: RunRow) -> Run:
    env = call.server.env
    is_pending = row.status == Status.PENDING.value
    lost = not is_pending and row.ended is None and await is_lost(env.store, env.settings.home, row)
    waits = replay(row.id, await env.store.events(row.id)).waits if is_pending else ""
    return Run(
        id=row.id,
        name=row.name,
        project=row.project,
        state=Status.LOST.value if lost else state_of(row),
        exit_code=row.exit_code,
        plan=row.plan,
        created_at=moment(row.created),
        ended_at=None if row.ended is None else moment(row.ended),
        resumes=row.resumes,
        waits=waits or None,
    )


ROUTES = (
    api("GET", "/runs", "List runs", _list, answer=Runs, query=RunListing),
    api(
        "POST",
        "/runs",
        "Start runs: of the server's manifests, of those in the request, or of a plan",
        _start,
        body=NewRuns,
        answer=StartedRuns,
        status=202,
    ),
    api("GET", "/runs/{id}", "Show the record of a run", _get, answer=dict[str, Any]),
    api(
        "GET",
        "/runs/{id}/report",
        "Show the report of a run for people",
        _report,
        answer=str,
        media="text/plain; charset=utf-8",
    ),
    api("GET", "/runs/{id}/artifacts", "List the files that a run has left", _artifacts, answer=Artifacts),
    api(
        "GET",
        "/runs/{id}/artifacts/{name:path}",
        "Get a file that a run has left",
        _artifact,
        answer=str,
        media="application/octet-stream",
    ),
    api(
        "GET",
        "/runs/{id}/logs",
        "Show what the steps of a run have printed",
        _logs,
        answer=str,
        query=Logs,
        media="text/plain; charset=utf-8",
    ),
    api(
        "GET",
        "/runs/{id}/events",
        "Follow a run: its events, past and coming, to its end",
        _events,
        answer=SentEvent,
        query=After,
        headers=LastEvent,
        media="text/event-stream",
    ),
    api("POST", "/runs/{id}/cancel", "End the work of a run; again: end its finalize phase too", _cancel),
    api(
        "POST",
        "/runs/{id}/resume",
        "Continue a run that did not succeed, as a new one",
        _resume,
        answer=StartedRun,
        status=202,
    ),
)
