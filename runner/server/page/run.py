"""Page of a run: as it happens, and when it has ended what its file of HTML shows."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import partial

import trio

from runner.artifacts.run_files import read_account
from runner.core.errors import RunnerError
from runner.core.model import Status
from runner.core.settings import Settings
from runner.events.record import RunRecord, fold
from runner.ops.runs.fetched import read_back
from runner.ops.runs.header import header_of
from runner.ops.runs.history import StoredRun, find_run
from runner.ops.runs.page import read_page
from runner.ops.runs.secret_values import make_redactor
from runner.ops.runs.step_output import StepOutput, translator_of
from runner.ops.runs.watch import planned
from runner.ports.store import Reader
from runner.report.html.excerpt import Excerpt, end_of
from runner.report.html.graph import MOST, Drawing, steps_graph
from runner.report.html.run import RunContents, values_of
from runner.report.triage import Result
from runner.server.events import EventStream
from runner.server.page.app import Page, View, Visit, fragment
from runner.server.routes.runs import visible

LOOK = 1.0  # seconds between looks at a run that goes on
_LINES = (60, 32 << 10)  # of what a step prints that are shown, and their characters


class LiveRun:
    """A run that goes on: its record, and the end of what its present steps print."""

    def __init__(self, stored: StoredRun, settings: Settings) -> None:
        self._directory = stored.directory
        self._redact = make_redactor(settings).text
        self._agent = header_of(planned(stored)).agent
        self.record = RunRecord(id=stored.record.id, name=stored.record.name)
        self._account = read_account(self.record, stored.directory)
        self._seen = 0
        self._outputs: dict[str, StepOutput] = {}
        self._lines: dict[str, deque[str]] = {}

    async def look(self, store: Reader) -> dict[str, object]:
        """Return what there is to see now."""
        for recorded in await store.events(self.record.id, after=self._seen):
            fold(self.record, recorded)
            self._seen = recorded.seq
        return await trio.to_thread.run_sync(self._values)

    def close(self) -> None:
        for output in self._outputs.values():
            output.close()

    def _values(self) -> dict[str, object]:
        shown = {step: self._printed(step) for step in self.record.unfinished()}
        contents = RunContents(
            account=self._account,
            result=Result(),
            actions=(),
            printed={},
            commands=(),
            patch=Excerpt(),
            cited=(),
            files=(),
        )
        return {**values_of(contents), "output": {step: printed for step, printed in shown.items() if printed.lines}}

    def _printed(self, step: str) -> Excerpt:
        if step not in self._outputs:
            say = translator_of(self._agent) if self.record.steps[step].kind == "agent" else None
            self._outputs[step] = StepOutput(self._directory, step, say)
            self._lines[step] = deque(maxlen=_LINES[0])
        self._lines[step].extend(map(self._redact, self._outputs[step].lines()))
        return end_of(self._lines[step], *_LINES)


async def _run(visit: Visit) -> Page:
    settings = visit.server.env.settings
    row = await visible(visit.call())
    stored = await find_run(settings, row.id)
    with suppress(RunnerError):  # what the journal has is shown all the same
        await read_back(stored, settings)
    record = stored.record
    if record.status in (Status.PENDING, Status.RUNNING):
        live = await trio.to_thread.run_sync(LiveRun, stored, settings)
        try:
            seen = await live.look(visit.server.env.store)
            return Page(template="live_run.html", more={**seen, "may_change": visit.token.may_change(row.project)})
        finally:
            live.close()
    contents = await read_page(stored, settings)
    over = record.status in (Status.SUCCEEDED, Status.SKIPPED, Status.LOST) or record.rehearsal is not None
    return Page(
        template="one_run.html",
        more={**values_of(contents), "resumable": visit.token.may_change(None) and not over, "graph": _graph(stored)},
    )


def _graph(stored: StoredRun) -> Drawing | None:
    plan = planned(stored)
    if plan is None or len(plan.steps) > MOST:
        return None
    return steps_graph(plan, {name: step.status for name, step in stored.record.steps.items()})


async def _live(visit: Visit) -> EventStream:
    settings = visit.server.env.settings
    row = await visible(visit.call())
    stored = await find_run(settings, row.id)
    return EventStream(visit.server, row.id, _parts(stored, settings, visit.server.env.store))


async def _parts(stored: StoredRun, settings: Settings, store: Reader) -> AsyncGenerator[str]:
    """Yield the changing part of a run's page whenever it has changed, to the end of the run."""
    shown = ""
    live = await trio.to_thread.run_sync(LiveRun, stored, settings)
    try:
        while live.record.ended is None:
            if live.record.started:  # what a run elsewhere prints comes here piece by piece
                with suppress(RunnerError):
                    await read_back(stored, settings)
            values = await live.look(store)
            part = await trio.to_thread.run_sync(partial(fragment, "live.html", **values))
            if part != shown:
                shown = part
                yield f"event: part\ndata: {json.dumps(part)}\n\n"
            if live.record.ended is None:
                await trio.sleep(LOOK)
        yield "event: end\ndata: {}\n\n"
    finally:
        live.close()


async def _cancel(visit: Visit) -> str:
    await visit.ask("POST", "/runs/{id}/cancel")
    return f"/runs/{visit.request.path_params['id']}"


async def _resume(visit: Visit) -> str:
    started = await visit.ask("POST", "/runs/{id}/resume")
    return f"/runs/{started.id}"


VIEWS = (
    View(path="/runs/{id}", show=_run),
    View(path="/runs/{id}/live", show=_live),
    View(path="/runs/{id}/cancel", do=_cancel),
    View(path="/runs/{id}/resume", do=_resume),
)
