"""Every page but that of a run: lists, the plan of the server's manifests, and the host."""

from __future__ import annotations

from msgspec.structs import asdict

from runner.core.errors import NoManifests
from runner.ops.planning.make_plan import Request, draft_plan
from runner.ops.planning.refusals import outside_of, refusals
from runner.ops.pool import pool
from runner.ops.runs.history import STATES
from runner.report.html.plan import values_of
from runner.server.page.app import Page, View, Visit
from runner.server.page.run import VIEWS as OF_A_RUN


def _asked(visit: Visit) -> dict[str, str]:
    """Return the query without the fields that were left empty."""
    return {name: value for name, value in visit.request.query_params.items() if value}


async def _runs(visit: Visit) -> Page:
    asked = _asked(visit)
    found = await visit.ask("GET", "/runs", asked)
    fields = {"name": "", "state": "", "cursor": ""} | asked
    return Page(template="runs.html", more={"found": found, "asked": fields, "states": STATES})


async def _plan(visit: Visit) -> Page:
    """Plan the manifests of the server, as a start of them would; what this host lacks is on the page."""
    visit.call().require_change(None)
    server = visit.server
    if server.manifests is None:
        raise NoManifests("the server has no manifests to plan", hint="start it with --manifests DIR")
    settings = server.env.settings
    planned = await draft_plan(server.manifests, settings, Request())
    missing = await refusals(planned, planned.plan.runs, settings, outside_of(settings))
    return Page(template="plans.html", more=values_of(planned.plan, missing=missing))


async def _workspaces(visit: Visit) -> Page:
    return Page(template="workspaces.html", more={"found": await visit.ask("GET", "/workspaces", _asked(visit))})


async def _sessions(visit: Visit) -> Page:
    return Page(template="sessions.html", more={"found": await visit.ask("GET", "/sessions", _asked(visit))})


async def _host(visit: Visit) -> Page:
    found = await visit.ask("GET", "/providers")
    kept = await pool.status(visit.server.env) if visit.token.admin else None
    return Page(template="host.html", more={**asdict(found), "pool": kept})


VIEWS = (
    View(path="/", show=_runs),
    View(path="/plan", show=_plan),
    View(path="/workspaces", show=_workspaces),
    View(path="/sessions", show=_sessions),
    View(path="/host", show=_host),
    *OF_A_RUN,
)
