"""Saved plans, carried out as they are, and refused when this host or their manifests have changed.

Nothing is compiled again, and the manifests need not be there. Where they are, their documents must still read as they
did. What the runs ask of the host is gathered as for any plan, and must be what was planned; then the steps are bound
to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path

import trio
from msgspec.structs import replace

from runner.core import errors
from runner.core.errors import Rejected, RunnerError
from runner.core.settings import Settings
from runner.manifest.load import Document, load
from runner.ops.planning.binding import Foreign, bind
from runner.ops.planning.carried_incident import carried_incident, unpack_incident
from runner.ops.planning.facts import gather, with_kept_layers
from runner.ops.planning.make_plan import PlanResult, deciding_settings
from runner.ops.planning.plan_file import SavedPlan, Warned, not_compiled, read_saved
from runner.ops.planning.staleness import Now, require_fresh
from runner.ops.planning.stored_projects import recorded_projects
from runner.plan.model import Plan
from runner.spec.model import ContextFile, Facts, RunFacts, Wanted


async def load_plan(file: Path, settings: Settings) -> PlanResult:
    """Return a saved plan as it is, bound to this host.

    Raises ``BadPlanFile``, ``OpenPlan``, ``Rejected`` for what this host lacks, and ``StalePlan`` when manifests,
    context files, settings or capabilities have changed, or a commit is gone.
    """
    saved, site = read_saved(file)
    if not site.found and (carried := carried_incident(saved)) is not None:
        saved, site = read_saved(file, (carried, await trio.to_thread.run_sync(unpack_incident, saved, settings.home)))
    documents = await _documents(saved, site.manifests, settings) if site.found else None
    pinned = Facts(saved.probes, saved.facts)
    facts = await gather([*saved.wanted.values()], settings, pinned=pinned)
    if documents is None:
        facts = replace(facts, runs={name: _with_texts(saved, name, run) for name, run in facts.runs.items()})
    if missing := [one.error for run in facts.runs.values() for one in run.missing]:
        raise Rejected(errors.distinct(missing))
    require_fresh(file, saved, Now(deciding_settings(settings), documents, facts))
    try:
        runs = tuple(bind(run, saved.wanted[run.name], facts.of(run.name)) for run in saved.runs)
    except (Foreign, KeyError) as error:
        raise not_compiled(file, str(error)) from error
    return PlanResult(
        plan=Plan(saved.digest, tuple(with_kept_layers(runs, facts, settings)), max_cost_usd=saved.max_cost_usd),
        facts=facts,
        path=site.manifests,
        warnings=tuple(_warnings(saved.warnings)),
        request=saved.request,
        documents=documents or {},
        settings=saved.settings,
        wanted=saved.wanted,
        secrets=saved.secrets,
        probed=-math.inf,
    )


def _warnings(saved: Iterable[Warned]) -> Iterator[RunnerError]:
    kinds = {kind.code: kind for kind in errors.Advice.__subclasses__()}
    return (kinds[one.code](one.message, at=one.at, hint=one.hint) for one in saved if one.code in kinds)


async def _documents(saved: SavedPlan, manifests: Path, settings: Settings) -> dict[str, Document]:
    """Return the documents of the plan as they are now, by kind and name."""
    documents, findings = load(manifests)
    if broken := [finding for finding in findings if finding.severity == "error"]:
        raise Rejected(broken)
    documents += await recorded_projects(documents, settings) if saved.recorded else []
    found = {f"{document.kind} {document.name}": document for document in documents}
    return {key: found[key] for key in saved.documents if key in found}


def _with_texts(saved: SavedPlan, name: str, found: RunFacts) -> RunFacts:
    """Add the script and the agents file that the plan brings along, in place of those that are not here."""
    planned = saved.facts.get(name, RunFacts())

    def brought(file: ContextFile | None) -> ContextFile | None:
        text = saved.texts.get(file.sha256) if file is not None else None
        if file is None or text is None or sha256(text.encode()).hexdigest() != file.sha256:
            return None
        return replace(file, text=text)

    script, agents_file = found.script or brought(planned.script), found.agents_file or brought(planned.agents_file)
    missing = tuple(one for one in found.missing if one.what is not Wanted.SCRIPT or script is None)
    return replace(found, script=script, agents_file=agents_file, missing=missing)
