"""From a path to a plan: load, select, gather, resolve, compile. Starts nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from runner.app.facts import gather
from runner.compiler import compile_plan
from runner.errors import BadPlanFile, Rejected, RunnerError, StalePlan, UnknownReference, nearest
from runner.git import open_git
from runner.manifest.load import Document, defaults, load
from runner.model import Feature, IsolationClass
from runner.plan.model import FORMAT, Json, Plan, plain
from runner.ports.provider import Probe
from runner.settings import Settings
from runner.spec.model import CommitFact, Facts, RunSpec
from runner.spec.resolve import Selected, dropped_defaults, resolve, select, wanted


@dataclass(frozen=True)
class Planned:
    """A plan with what it was made from; ``warnings`` stop nothing."""

    plan: Plan
    facts: Facts
    path: Path
    warnings: tuple[RunnerError, ...]


def validate(path: Path) -> tuple[list[Document], list[RunnerError]]:
    """Everything that can be said about manifests without looking at anything else."""
    documents, findings = load(path)
    if any(f.severity == "error" for f in findings):
        return documents, findings
    chosen, unresolved = select(documents, defaults())
    findings += [f for f in unresolved if f.code != "manifest.nothing-to-run"]
    for selected in chosen:
        findings += dropped_defaults(selected, defaults())
    return documents, findings


async def make_plan(path: Path, settings: Settings, *, only: str | None = None, pinned: Facts | None = None) -> Planned:
    """Plan the runs of a manifest file or folder. Raises ``Rejected`` with every finding."""
    documents, findings = load(path)
    _reject(findings)
    chosen, unresolved = select(documents, defaults())
    findings += unresolved
    if only is not None:
        chosen = _only(chosen, only)
    _reject(findings)
    wants = []
    for selected in chosen:
        want, complaints = wanted(selected, settings)
        wants.append(want)
        findings += complaints
    _reject(findings)
    facts = await gather(wants, settings, open_git(settings), pinned)
    specs: list[RunSpec] = []
    for selected in chosen:
        findings += dropped_defaults(selected, defaults())
        spec, complaints = resolve(selected, settings, facts)
        findings += complaints
        specs.append(spec)
    _reject(findings)
    plan, complaints = compile_plan(specs, facts, documents=_written(chosen), settings=_deciding(settings))
    findings += complaints
    _reject(findings)
    return Planned(plan, facts, path, tuple(findings))


def _reject(findings: Sequence[RunnerError]) -> None:
    if any(f.severity == "error" for f in findings):
        raise Rejected(findings)


def _only(chosen: Sequence[Selected], name: str) -> list[Selected]:
    found = [selected for selected in chosen if selected.run.name == name]
    if not found:
        raise UnknownReference(f"there is no run `{name}`", hint=nearest(name, [s.run.name for s in chosen]))
    return found


def _written(chosen: Sequence[Selected]) -> list[object]:
    """The documents that the plan rests on, as written, once each."""
    used = {
        (document.kind, document.name): document.data
        for selected in chosen
        for document in (*defaults().values(), selected.run, selected.agent_type, *selected.policies)
    }
    return [used[key] for key in sorted(used)]


def _deciding(settings: Settings) -> dict[str, object]:
    """The settings that change plans."""
    return {
        "cpus": settings.default_cpus,
        "memory": settings.default_memory,
        "disk": settings.default_disk,
        "providers": settings.providers,
    }


def save(planned: Planned, to: Path, *, only: str | None) -> None:
    """Write a plan with what it takes to make it again and see that it is the same. Raises ``BadPlanFile``."""
    text = json.dumps(_saved(planned, to, only), indent=1, ensure_ascii=False)
    half = to.with_name(f".{to.name}.{token_hex(4)}")
    try:
        half.write_text(text + "\n", encoding="utf-8")
        half.replace(to)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise BadPlanFile(f"`{to}` can not be written: {error.strerror}") from error


def _saved(planned: Planned, to: Path, only: str | None) -> Json:
    document = planned.plan.document()
    assert isinstance(document, dict)
    path = os.path.relpath(planned.path.resolve(), to.resolve().parent)
    pinned = {"commits": plain(planned.facts.commits), "probes": plain(planned.facts.probes)}
    return {**document, "manifests": path, "only": only, "pinned": pinned}


async def make_saved_plan(file: Path, settings: Settings) -> Planned:
    """The plan that a file promises, made again from its manifests with its commits, and equal to it.

    Raises ``BadPlanFile``, and ``StalePlan`` when manifests, context files, settings or capabilities have changed.
    """
    promised, path, pinned = _read(file)
    planned = await make_plan(path, settings, only=promised["only"], pinned=pinned)
    if planned.plan.digest != promised["digest"]:
        raise StalePlan(
            f"`{file}` is stale: it promises {promised['digest'][:19]}, and its manifests now give "
            f"{planned.plan.digest[:19]}",
            hint="plan again, look at what changed, and apply that",
        )
    return planned


def _read(file: Path) -> tuple[dict[str, str], Path, Facts]:
    try:
        content = json.loads(file.read_bytes()[: 256 << 20])
        if content["format"] != FORMAT:
            raise BadPlanFile(
                f"`{file}` has format `{str(content['format'])[:60]}`", hint=f"this version reads {FORMAT}"
            )
        commits = {name: CommitFact(**fact) for name, fact in content["pinned"]["commits"].items()}
        probes = {name: _probe(fact) for name, fact in content["pinned"]["probes"].items()}
        promised = {key: content[key] for key in ("digest", "manifests", "only")}
    except OSError as error:
        raise BadPlanFile(f"`{file}` can not be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadPlanFile(f"`{file}` is not a saved plan", hint="make one with: runner plan --save FILE") from error
    return promised, file.resolve().parent / promised["manifests"], Facts(probes, commits)


def _probe(fact: dict[str, Any]) -> Probe:
    isolation = IsolationClass[fact["isolation"].upper()]
    missing = {Feature(name): reason for name, reason in fact["missing"].items()}
    return Probe(**{**fact, "isolation": isolation, "missing": missing})
