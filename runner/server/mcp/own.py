"""Operations that MCP has and HTTP has not, or not in one call: follow runs, triage, and make projects."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any

import trio
from msgspec import Meta, Struct

from runner.client.values import NewRuns, Project, StartedRun
from runner.core.clock import now_microseconds
from runner.core.codec import encode
from runner.core.errors import BadRequest
from runner.core.model import Status
from runner.events.events import Recorded, RunEnded, as_json
from runner.ops.runs.start import RunHandle
from runner.ops.triage.incident_directory import new_incident_file
from runner.ops.triage.manifest import manifest_of, store_manifest
from runner.ops.triage.options import read_request
from runner.ops.triage.place import choose_place
from runner.ops.triage.plan import plan_triage
from runner.ops.workspaces import project
from runner.server.planning import start_planned
from runner.server.route import Call
from runner.server.routes import projects, runs

Tell = Callable[[Recorded], Awaitable[None]]

MOST_EVENTS = 200  # that one call returns
MOST_BYTES = 1 << 18  # of them, as JSON


class NewProject(Struct, kw_only=True, forbid_unknown_fields=True):
    """A project, whose workspaces see each other's files unless `workspace_isolation` is set."""

    name: Annotated[str, Meta(min_length=1, max_length=63)]
    root: Annotated[str, Meta(description="Its directory on this host, absolute.")]
    workspace_isolation: Annotated[bool, Meta(description="A workspace sees itself alone.")] = False
    protected_paths: Annotated[list[str], Meta(max_length=100, description="Paths that no agent may change.")] = []


async def create_project(call: Call, tell: Tell) -> Project:
    body, env = call.body, call.server.env
    call.require_change(None)
    if not Path(body.root).is_absolute():
        raise BadRequest("`root` is not an absolute path", hint="begin it with /")
    wanted, advice = project.new_project(
        body.name, Path(body.root), isolated=body.workspace_isolation, protected=body.protected_paths
    )
    made = await project.create_project(env.settings, wanted)
    for one in advice:
        env.advise(one)
    return projects.shown(made)


class Apply(NewRuns, kw_only=True, forbid_unknown_fields=True):
    """Runs to start: of the manifests that this was started with, of those in the call, or of a plan.

    A call that waits and is cancelled ends its runs, which save what they have.
    """

    wait: Annotated[bool, Meta(description="Waits for their end; their events are progress.")] = False


class AppliedRun(StartedRun, kw_only=True):
    """A run that was started. `message` says why it did not succeed; the rest is in `run_get`."""

    state: str
    exit_code: int | None
    message: str


class Applied(Struct):
    runs: list[AppliedRun]


async def apply_runs(call: Call, tell: Tell) -> Applied:
    started = await start_planned(call, call.body)
    return await _followed(started, tell if call.body.wait else None)


async def _followed(started: Sequence[tuple[RunHandle, bool]], tell: Tell | None) -> Applied:
    """Return runs as they are; with ``tell``, when they have ended. Cancelling that ends them."""

    async def follow(run: RunHandle, tell: Tell) -> None:
        async with run.events() as events:
            async for recorded in events:
                await tell(recorded)
        await run.wait()

    if tell is not None:
        try:
            async with trio.open_nursery() as nursery:
                for run, _ in started:
                    nursery.start_soon(follow, run, tell)
        except BaseException:
            for run, attached in started:
                if not attached:
                    run.cancel()
            raise
    return Applied([_applied(run, attached) for run, attached in started])


def _applied(run: RunHandle, attached: bool) -> AppliedRun:
    record = run.record
    outcome = None if record is None else record.outcome
    status = Status.RUNNING if run.begun.is_set() else Status.PENDING
    return AppliedRun(
        id=run.id,
        name=run.plan.name,
        attached=attached,
        state=(status if record is None else record.status).value,
        exit_code=None if record is None else record.exit_code,
        message="" if outcome is None else outcome.message,
    )


class Follow(Struct, kw_only=True, forbid_unknown_fields=True):
    """Events numbered above `after`; with `wait_seconds` those to come as well, up to the end of the run."""

    after: Annotated[int, Meta(ge=0, lt=1 << 62, description="The number of the last event that you know.")] = 0
    wait_seconds: Annotated[float, Meta(ge=0, le=3600)] = 0


class RunEvents(Struct, kw_only=True):
    """Events of a run in order, at most 200. `last` is the number of the last one here, `state` that of the run."""

    events: list[dict[str, Any]]
    last: int
    state: str


async def show_events(call: Call, tell: Tell) -> RunEvents:
    row, env, body = await runs.visible(call), call.server.env, call.body
    found: list[dict[str, Any]] = []
    last, size = body.after, 0
    waiting = trio.move_on_after(body.wait_seconds)
    if not body.wait_seconds or row.ended is not None or await call.server.running.is_lost(row.id):
        waiting.cancel()

    def take(recorded: Recorded) -> bool:
        """Add an event, and tell whether there is room for more."""
        nonlocal last, size
        found.append(event := as_json(recorded))
        last, size = recorded.seq, size + len(encode(event))
        return len(found) < MOST_EVENTS and size < MOST_BYTES and not isinstance(recorded.event, RunEnded)

    room = all(take(recorded) for recorded in await env.store.events(row.id, after=last))
    with waiting:
        async with aclosing(env.store.watch(row.id, after=last)) as events:
            while room:
                recorded = await anext(events)
                room = take(recorded)
                await tell(recorded)
    state = (await runs.shown_run(call, await runs.visible(call))).state
    return RunEvents(events=found, last=last, state=state)


class Triage(Struct, kw_only=True, forbid_unknown_fields=True):
    """An incident, in a directory of this host that has it or gets it; report and log are in its `output`.

    A call that waits and is cancelled ends the investigation, which saves what it has.
    """

    directory: Annotated[str, Meta(description="Absolute.")]
    prompt: Annotated[str, Meta(min_length=2, max_length=100_000, description="What is asked.")] | None = None
    agent: Annotated[str, Meta(description="claude, codex, gemini or goose.")] | None = None
    model: str | None = None
    context: Annotated[str, Meta(description="Of the kubeconfig of this host.")] | None = None
    namespace: str | None = None
    resource: Annotated[str, Meta(description="KIND/NAME of a new incident, with `namespace`.")] | None = None
    alert: Annotated[dict[str, Any], Meta(description="Of a new incident, as Alertmanager posts it.")] | None = None
    files_only: Annotated[bool, Meta(description="Looks at no cluster.")] = False
    timeout: Annotated[str, Meta(description="Such as 10m.")] | None = None
    wait: Annotated[bool, Meta(description="Waits for the end; its events are progress.")] = False


async def triage(call: Call, tell: Tell) -> Applied:
    call.require_change(None)
    body, settings = call.body, call.server.env.settings
    if not Path(body.directory).is_absolute():
        raise BadRequest("`directory` is not an absolute path", hint="begin it with /")
    names = ("agent", "model", "context", "namespace", "resource", "files_only", "timeout")
    given: dict[str, Any] = {name: getattr(body, name) for name in names}
    given |= {"workspace": body.directory, "prompt": None if body.prompt is None else [body.prompt]}
    given |= {"alert": None if body.alert is None else "-"}
    request = read_request(given, settings, lambda: encode(body.alert), now=now_microseconds())
    request = await choose_place(request, settings)
    with new_incident_file(request):
        planned = await plan_triage(request, store_manifest(manifest_of(request), settings), settings)
        started = await call.server.running.start(planned, None)
    return await _followed(started, tell if body.wait else None)
