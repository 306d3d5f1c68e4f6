"""Validate manifests without looking at the host that will run them.

Each stage goes as far as findings of earlier ones allow: a document with an error is left out, and references to it are
not judged, while all others are selected and resolved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from runner.core.errors import (
    BadEncoding,
    BadSyntax,
    BadValue,
    NothingToRun,
    OverBudget,
    PathEscape,
    RunnerError,
    UnknownReference,
    UnreadableManifest,
    distinct,
    in_order,
)
from runner.core.settings import Settings
from runner.manifest.kinds.incident_run import Spec as IncidentRunSpec
from runner.manifest.kinds.incident_run import Task
from runner.manifest.load import Document, defaults, survey
from runner.ops.planning.facts import unknown_provider, uses_images
from runner.ops.planning.files import context_file, skill_files
from runner.ops.planning.model_faults import model_faults
from runner.spec.document_faults import document_faults
from runner.spec.facts_request import FactsRequest, facts_request
from runner.spec.model import Facts, Missing, RunFacts, RunSpec, Wanted, no_image
from runner.spec.policies import dropped_defaults
from runner.spec.resolve import outputs_of, resolve
from runner.spec.select import Selected, select

_NO_DOCUMENT = (BadEncoding, BadSyntax, OverBudget, PathEscape, UnreadableManifest)  # that it could be known by name

_STAND_IN = "x"


class _Anything(dict[str, object]):
    """Stand-in for any field of an incident that nobody has seen, in templates."""

    def __missing__(self, key: str) -> _Anything:
        return _Anything()

    def __str__(self) -> str:
        return _STAND_IN


def validate(path: Path, settings: Settings) -> tuple[list[Document], list[RunnerError]]:
    """Return the readable documents of a file or folder, and every finding of every stage, by place.

    Files beside the manifests are read; providers, commits and incidents are not. Task fields that a run does not set
    may be given when it is planned.
    """
    drafts, found = survey(path)
    documents = [draft.document for draft in drafts if draft.document is not None]
    blind = any(isinstance(finding, _NO_DOCUMENT) for finding in found) or any(
        draft.kind is None or draft.name is None for draft in drafts
    )
    broken = {(draft.kind, draft.name) for draft in drafts if draft.document is None}
    chosen, unresolved = select(documents, defaults(), lambda kind, name: blind or (kind, name) in broken)
    found += [finding for finding in unresolved if not isinstance(finding, NothingToRun)]
    if any(isinstance(finding, OverBudget) for finding in unresolved):
        return documents, in_order(distinct(found))
    reached = {id(document) for selected in chosen for document in selected.documents}
    for document in documents:
        found += document_faults(document) if id(document) not in reached else []
    found += _resolved(chosen, settings)
    return documents, in_order(distinct(found))


def _resolved(chosen: Sequence[Selected], settings: Settings) -> list[RunnerError]:
    found: list[RunnerError] = []
    runs: dict[str, RunFacts] = {}
    for selected in chosen:
        want, outside = facts_request(selected, settings)
        found += outside
        runs[selected.name] = RunFacts(incident=_Anything(), missing=tuple(_missing(want)))
    facts = Facts({}, runs)
    outputs = outputs_of(chosen)
    for selected in chosen:
        found += dropped_defaults(selected, defaults())
        run = replace(selected.run, spec=_with_any_task(selected.spec))
        spec, complaints = resolve(replace(selected, run=run), settings, facts, outputs)
        found += complaints + model_faults(selected, spec) + _imageless(spec)
    return found


def _imageless(spec: RunSpec) -> list[RunnerError]:
    """Report a provider that needs an image when none is named, as planning does."""
    if spec.base_image is not None:
        return []
    return [no_image(spec, name) for name in spec.providers if uses_images(name)]


def _missing(want: FactsRequest) -> Iterator[Missing]:
    for name in want.providers:
        if error := unknown_provider(name):
            yield Missing(Wanted.PROVIDERS, error)
    for skill in want.skills:
        try:
            skill_files(skill)
        except UnknownReference as error:
            yield Missing(Wanted.SKILL, error, skill)
    try:
        if want.script is not None:
            context_file(want.script)
    except OSError as error:
        yield Missing(Wanted.SCRIPT, BadValue(f"`{want.script_name}` cannot be read: {error.strerror}"))


def _with_any_task(spec: IncidentRunSpec) -> IncidentRunSpec:
    given = dict.fromkeys(Task.model_fields, _STAND_IN) | {"pull_request_number": 1}
    written = spec.task.model_dump(exclude_none=True) if spec.task is not None else {}
    return spec.model_copy(update={"task": Task.model_construct(**given | written)})
