"""Choose a provider and make the workspace, with the run's inputs in it."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from runner.core.model import DEFAULT_PROJECT, Feature, IsolationClass, Limits, Pull
from runner.plan.model import RunPlan, Step
from runner.spec.incident import incident_advice
from runner.spec.model import AGENTS_FILE, ContextFile, Facts, RunFacts, RunSpec, Warm

NEEDS = (("lease",),)
ANEW = True


class ProvisionBody(Struct, frozen=True, kw_only=True):
    """``must`` are the features without which a provider of the chain is refused when it is opened.

    ``agents_file`` is for the project's directory when that is ``shared``, else for the tree. ``image`` is what
    ``base_image`` means, by digest or id, and is downloaded unless ``pull`` is never.
    """

    providers: tuple[str, ...]
    isolation: IsolationClass
    limits: Limits
    must: tuple[Feature, ...]
    incident: tuple[tuple[str, ContextFile], ...]
    inputs_in_tree: bool
    script: ContextFile | None
    files: tuple[tuple[str, str, bool], ...]
    project: str
    shared: bool
    unprotected: tuple[str, ...]
    agents_file: ContextFile | None
    image: str | None
    warm: Warm
    base_image: str | None = None
    pull: Pull = "never"
    skills: tuple[tuple[str, ContextFile], ...] = ()
    advice: tuple[tuple[str, str], ...] = ()  # code and message: what is to be said of the incident


BODY = ProvisionBody


def inputs(body: ProvisionBody) -> dict[str, object]:
    return {
        "isolation": (body.isolation, body.must),
        "limits": body.limits,
        "files": body.files,
        "project": (body.project, body.shared),
        "image": body.image,
    }


def plan(spec: RunSpec, facts: Facts, needs: tuple[str, ...]) -> Step:
    found = facts.of(spec.name)
    must = tuple(d.feature for d in spec.demands if d.written and not spec.best_effort)
    return Step(
        id="provision",
        kind="provision",
        routine=True,
        what=f"{_chain(spec, facts)}{_place(spec, facts)}{_warm(spec)}",
        phase="work",
        needs=needs,
        deadline_seconds=spec.timeouts["provision"] + (spec.timeouts["pull"] if spec.pull != "never" else 0),
        origin=spec.origins["provision"],
        repeated_on_fallback=True,
        body=ProvisionBody(
            providers=spec.providers,
            isolation=spec.isolation,
            limits=spec.limits,
            must=must,
            incident=tuple(sorted((found.incident_files or {}).items())),
            inputs_in_tree=spec.checkout is None,
            script=found.script,
            files=spec.script.files,
            project=spec.project,
            shared=spec.shared,
            unprotected=spec.unprotected,
            agents_file=found.agents_file if spec.shared or spec.checkout is None else None,
            image=found.image,
            warm=replace(spec.warm, protected=_protected(spec, found)),
            base_image=spec.base_image,
            pull=spec.pull,
            skills=tuple(sorted(found.skills.items())),
            advice=tuple((one.code, one.message) for one in incident_advice(found)),
        ),
    )


def _protected(spec: RunSpec, found: RunFacts) -> tuple[str, ...]:
    """Return all paths that the agent's sandbox protects, its inputs among them; those of directories end in ``/``."""
    files = (found.incident_files or {}) if spec.checkout is None else {}
    inputs = {name.partition("/")[0] + name.partition("/")[1] for name, file in files.items() if file.whole}
    return tuple(sorted({*spec.protected, *inputs}))


def _chain(spec: RunSpec, facts: Facts) -> str:
    """The providers that will be asked, in turn, and why not those that are not there."""
    there = [name for name in spec.providers if facts.open or facts.probes[name].available]
    gone = [f"{name} is not available: {facts.probes[name].reason}" for name in spec.providers if name not in there]
    if not there:  # no plan to be carried out here
        return ", then ".join(spec.providers)
    shown = [f"{name}, by {makes}" if (makes := _makes(facts, name)) else name for name in there]
    return ", then ".join(shown) + (f" ({'; '.join(gone)})" if gone else "")


def _makes(facts: Facts, name: str) -> str:
    return "" if facts.open else facts.probes[name].makes


def _warm(spec: RunSpec) -> str:
    return f"; from a warm pool of {spec.warm.size} if it has one" if spec.warm.size else ""


def _place(spec: RunSpec, facts: Facts) -> str:
    """Return what commands see at ``/workspace``, and where they start, in a run that has a project."""
    whole, alone = "; project {} whole, starting in /workspace/workspaces/ID", "; alone in project {}"
    words = whole if spec.shared else alone if spec.project != DEFAULT_PROJECT else ""
    return words.format(spec.project) + (f", with its {AGENTS_FILE}" if facts.of(spec.name).agents_file else "")


def project_of(run: RunPlan) -> str:
    """Return the project that a run belongs to."""
    body = run.body(ProvisionBody)
    return DEFAULT_PROJECT if body is None else body.project
