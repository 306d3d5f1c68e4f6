"""Route of plans: what starting runs would do. It is kept for a request that starts them."""

from __future__ import annotations

from runner.client.values import Form, Plan, Planned
from runner.core.errors import RunnerError
from runner.ops.planning.compare import compare
from runner.ops.planning.make_plan import PlanResult
from runner.ops.planning.refusals import outside_of, refusals
from runner.ops.planning.uploads import store_plan
from runner.report.diagnostics import render
from runner.report.html.plan import render_plan as render_page
from runner.report.plan import render_plan
from runner.server.border import advice_of
from runner.server.planning import planned_runs
from runner.server.route import Call, Reply, api

_TEXT, _HTML = "text/plain; charset=utf-8", "text/html; charset=utf-8"


async def _make(call: Call) -> Reply:
    settings = call.server.env.settings
    made = await planned_runs(call, call.body)
    missing = await refusals(made, made.plan.runs, settings, outside_of(settings))
    if call.query.format == "json":
        return Reply(value=_document(made, missing, None if missing else store_plan(made, settings)))
    compared = await compare(made, settings, None)
    if call.query.format == "html":
        return Reply(value=render_page(made.plan, compared, missing), media=_HTML)
    findings = [render([*missing, *made.warnings])] if missing or made.warnings else []
    return Reply(
        value="\n\n".join([*findings, render_plan(made.plan, compared=compared, missing=len(missing))]), media=_TEXT
    )


def _document(made: PlanResult, missing: list[RunnerError], id: str | None) -> Plan:
    return Plan(
        id=id,
        digest=made.plan.digest,
        plan=made.plan.document(),
        warnings=[advice_of(one) for one in made.warnings],
        missing=[advice_of(one) for one in missing],
    )


ROUTES = (
    api(
        "POST",
        "/plans",
        "Show what starting runs would do",
        _make,
        body=Planned,
        query=Form,
        answer=Plan,
        forms=(_TEXT, _HTML),
    ),
)
