"""Plans that requests ask for, and which of them a token may have.

The manifests that the server was started with are its operator's: they may name files, secrets and repositories of its
host. Those in a request are anybody's who has a token, so they are judged as those of a fork, and take ``admin``. A
token of a project starts what the operator's manifests have for its project, for the repository that they name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from runner.client.values import NewRuns, Planned
from runner.core.errors import BadRequest, NoManifests, OutOfScope, Rejected
from runner.ops.planning.make_plan import PlanResult, Request, draft_plan
from runner.ops.planning.saved_plan import load_plan
from runner.ops.planning.task import checked_task
from runner.ops.planning.uploads import find_plan, shown, store_manifests
from runner.ops.runs.start import RunHandle
from runner.server.route import Call
from runner.steps.provision.plan import project_of

_OF_MANIFESTS = "repository_url"  # the field of the task that only they give when a project's token asks


async def planned_runs(call: Call, wanted: Planned) -> PlanResult:
    """Plan what a request asks for. Starts nothing.

    Raises ``OutOfScope`` for what the token may not have, ``BadRequest``, ``NoManifests``, ``UnknownPlan``, and what
    planning raises.
    """
    settings, served = call.server.env.settings, call.server.manifests
    _check_task(call, wanted.task)
    if isinstance(wanted, NewRuns) and wanted.plan is not None:
        if wanted.manifests is not None or wanted.run is not None or wanted.task:
            raise BadRequest("a plan is carried out as it is", hint="leave `run`, `task` and `manifests` out")
        planned = await load_plan(find_plan(wanted.plan, settings), settings)
    elif wanted.manifests is not None:
        call.require_change(None)
        sent = store_manifests(wanted.manifests, settings)
        request = Request(only=wanted.run, task=checked_task("task", wanted.task), untrusted=True)
        try:
            planned = await draft_plan(sent, settings, request)
        except Rejected as rejected:
            raise Rejected(shown(finding, sent) for finding in rejected.findings) from rejected
    elif served is not None:
        request = Request(only=wanted.run, task=checked_task("task", wanted.task))
        planned = await draft_plan(served, settings, request)
    else:
        raise NoManifests("the server has no manifests to run", hint="start it with --manifests DIR, or send some")
    _check_scope(call, planned)
    return planned


async def start_planned(call: Call, wanted: NewRuns) -> list[tuple[RunHandle, bool]]:
    """Start what a request asks for; of each run, tell whether an earlier one has its key.

    Raises what ``planned_runs`` and ``Running.start`` raise, and ``Rejected`` for what this host lacks.
    """
    plan = await planned_runs(call, wanted)
    if plan.missing:
        raise Rejected((*plan.missing, *plan.warnings))
    for run in plan.plan.runs:
        call.require_change(project_of(run))
    return await call.server.running.start(plan, wanted.key)


def _check_scope(call: Call, planned: PlanResult) -> None:
    token, served = call.token, call.server.manifests
    if token.admin:
        return
    if served is None or not os.path.exists(planned.path) or not os.path.samefile(planned.path, served):
        raise OutOfScope(f"token `{token.name}` may plan the server's manifests only", hint="use a token with admin")
    if not all(token.may_see(project_of(run)) for run in planned.plan.runs):
        message = f"not all of these runs are of a project of token `{token.name}`"
        raise OutOfScope(message, hint="name one that is in `run`")
    _check_task(call, planned.request.task)


def _check_task(call: Call, task: Mapping[str, object]) -> None:
    if not call.token.admin and _OF_MANIFESTS in task:
        token = call.token
        message = f"token `{token.name}` may not name another repository than the manifests"
        raise OutOfScope(message, hint=f"leave `{_OF_MANIFESTS}` out of the task, or use a token with admin")
