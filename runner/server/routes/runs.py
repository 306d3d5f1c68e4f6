"""Routes of runs: start those of the server's manifests, look at any, follow them, and end what was started here.

Only ``admin`` tokens see runs, which belong to no project.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from runner.core.errors import BadRequest, NoManifests, UnknownRun
from runner.core.model import Status
from runner.core.sanitize import excerpt
from runner.ops.host.liveness import is_lost
from runner.ops.planning.make_plan import Request, make_plan
from runner.ops.planning.task import checked_task
from runner.ops.runs.history import STATES, TIMED_OUT, find_run, state_of
from runner.plan.model import Json
from runner.ports.store import RunRow
from runner.report.json import record_document
from runner.report.text import render_run
from runner.server.events import EventStream
from runner.server.route import BASE, Call, Reply, Route
from runner.server.routes.workspaces import Moment, moment, read_cursor


class Run(Struct, kw_only=True):
    """A run in a list. ``state`` is its status, ``timed-out``, or ``lost`` when nobody works on it any more."""

    id: str
    name: str
    state: str
    exit_code: int | None
    plan: str
    created_at: Moment
    ended_at: Moment | None
    resumes: str | None


class Runs(Struct):
    """Runs, newest first. ``next`` is the cursor of those after them, ``null`` at the end."""

    runs: list[Run]
    next: str | None


class NewRuns(Struct, kw_only=True, forbid_unknown_fields=True):
    """Runs to start, of the manifests that the server was started with."""

    run: Annotated[str, Meta(description="This one and those that it needs; default: all.")] | None = None
    task: Annotated[dict[str, Any], Meta(description="Fields of the task, over those in the manifest.")] = {}
    key: (
        Annotated[str, Meta(min_length=1, max_length=200, description="A second request with it starts nothing.")]
        | None
    ) = None


class StartedRun(Struct, kw_only=True):
    """A run that was started; ``attached`` if an earlier request with the same key had started it."""

    id: str
    name: str
    attached: bool


class StartedRuns(Struct):
    runs: list[StartedRun]


class RunListing(Struct, kw_only=True):
    """A page of the list of runs."""

    state: str | UnsetType = UNSET
    name: Annotated[str, Meta(description="With `*` for any characters.")] | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    cursor: str | UnsetType = UNSET


class After(Struct, kw_only=True):
    """The number of an event; those above it are sent. The header ``Last-Event-ID`` says the same."""

    after: Annotated[int, Meta(ge=0)] = 0


async def _visible(call: Call) -> RunRow:
    """Return the run that a path names. Raises ``UnknownRun``."""
    id = call.path["id"]
    with suppress(UnknownRun):
        row = await call.server.env.store.find(id)
        if row.id == id and call.token.admin:
            return row
    raise UnknownRun(f"there is no run `{excerpt(id)}`")


async def _list(call: Call) -> Runs:
    store, query = call.server.env.store, call.query
    if not call.token.admin:
        return Runs([], None)
    state = None if query.state is UNSET else query.state
    if state is not None and state not in STATES:
        raise BadRequest(f"`{excerpt(state)}` is not the state of a run", hint=f"one of {', '.join(STATES)}")
    stored = {TIMED_OUT: Status.FAILED.value, Status.LOST.value: Status.RUNNING.value}
    name = None if query.name is UNSET else query.name
    before = None if query.cursor is UNSET else read_cursor(query.cursor)
    found: list[tuple[RunRow, Run]] = []
    while len(found) <= query.limit:
        status = None if state is None else stored.get(state, state)
        rows = await store.runs(status=status, name=name, before=before, limit=query.limit + 1)
        shown = [(row, await _shown(call, row)) for row in rows]
        found += [one for one in shown if state in (None, one[1].state)]
        if len(rows) <= query.limit:
            break
        before = (rows[-1].created, rows[-1].id)
    page = found[: query.limit]
    last = page[-1][0] if len(found) > query.limit else None
    return Runs([run for _, run in page], None if last is None else f"{last.created}.{last.id}")


async def _start(call: Call) -> Reply:
    call.require_change(None)
    server, body = call.server, call.body
    if server.manifests is None:
        raise NoManifests("the server has no manifests to run", hint="start it with --manifests DIR")
    request = Request(only=body.run, task=checked_task("task", body.task))
    planned = await make_plan(server.manifests, server.env.settings, request)
    ids = [
        StartedRun(id=run.id, name=run.plan.name, attached=old)
        for run, old in await server.running.start(planned, body.key)
    ]
    return Reply(value=StartedRuns(ids), status=202, headers={"location": f"{BASE}/runs/{ids[0].id}"})


async def _get(call: Call) -> Json:
    stored = await find_run(call.server.env.settings, (await _visible(call)).id)
    return record_document(stored.record)


async def _report(call: Call) -> Reply:
    stored = await find_run(call.server.env.settings, (await _visible(call)).id)
    return Reply(value=render_run(stored.record, stored.directory))


async def _events(call: Call) -> EventStream:
    row = await _visible(call)
    last = call.headers.get("last-event-id", "0")
    if not last.isdecimal() or len(last) > 18:
        raise BadRequest(f"`{excerpt(last)}` is not the number of an event")
    return EventStream(call.server, row.id, max(call.query.after, int(last)))


async def _cancel(call: Call) -> None:
    row = await _visible(call)
    call.require_change(None)
    call.server.running.cancel(row.id)


async def _shown(call: Call, row: RunRow) -> Run:
    env = call.server.env
    lost = row.ended is None and await is_lost(env.store, env.settings.home, row)
    return Run(
        id=row.id,
        name=row.name,
        state=Status.LOST.value if lost else state_of(row),
        exit_code=row.exit_code,
        plan=row.plan,
        created_at=moment(row.created),
        ended_at=None if row.ended is None else moment(row.ended),
        resumes=row.resumes,
    )


def _route(method: str, path: str, **more: Any) -> Route:
    return Route(method=method, path=f"{BASE}/runs{path}", **more)


ROUTES = (
    _route("GET", "", summary="List runs", handle=_list, answer=Runs, query=RunListing),
    _route(
        "POST",
        "",
        summary="Start runs of the server's manifests",
        handle=_start,
        body=NewRuns,
        answer=StartedRuns,
        status=202,
    ),
    _route("GET", "/{id}", summary="Show the record of a run", handle=_get, answer=dict[str, Any]),
    _route(
        "GET",
        "/{id}/report",
        summary="Show the report of a run for people",
        handle=_report,
        answer=str,
        media="text/plain; charset=utf-8",
    ),
    _route(
        "GET",
        "/{id}/events",
        summary="Follow a run: its events, past and coming, to its end",
        handle=_events,
        answer=str,
        query=After,
        media="text/event-stream",
    ),
    _route(
        "POST",
        "/{id}/cancel",
        summary="End the work of a run; again: end its finalize phase too",
        handle=_cancel,
    ),
)
