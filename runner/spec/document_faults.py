"""Faults of values whose form another room decides, of templates, and of facts that are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import asdict
from pydantic import BaseModel

from runner.core.errors import BadName, BadRef, BadValue, Place, RunnerError
from runner.core.ids import BRANCH_HINT, is_branch
from runner.core.sanitize import excerpt
from runner.manifest.kinds.agent_type import Spec as AgentTypeSpec
from runner.manifest.kinds.incident_run import Spec as IncidentRunSpec
from runner.manifest.kinds.policy import Spec as PolicyKindSpec
from runner.manifest.load import Document
from runner.manifest.network import TOOLS
from runner.manifest.used_mcp import used_servers
from runner.policy.paths import check_pattern
from runner.policy.protected import check_protected
from runner.policy.toolchains import check_toolchain
from runner.spec import template
from runner.spec.cluster import keys_of
from runner.spec.facts_request import source_place
from runner.spec.model import Missing, RunSpec, Wanted
from runner.spec.select import Selected

Outputs = Mapping[str, tuple[tuple[str, ...], bool]]


def template_faults(
    selected: Selected, spec: RunSpec, incident: Mapping[str, object], outputs: Outputs
) -> list[RunnerError]:
    """Try every templatable field with stand-in values, so that a wrong name is an error before anything starts."""
    stand_in = {"id": "0" * 12, "name": spec.name}
    values: dict[str, object] = {
        "run": stand_in,
        "task": {key: value for key, value in asdict(spec.task).items() if value is not None},
        "outputs": {run: {name: ["0"] if many else "0" for name in names} for run, (names, many) in outputs.items()},
    }
    if spec.incident is not None:
        values["incident"] = incident
    with_prompt = {**values, "run": {**stand_in, "prompt": ""}}
    findings: list[RunnerError] = []
    for document in (selected.run, selected.agent_type):
        for keys, text in _templated(document.spec):
            known = with_prompt if document is selected.agent_type and keys[0] == "prompt" else values
            if template.check(text):
                continue  # among the document's document_faults
            at = document.place(*keys)
            try:
                filled = template.render(text, known, at=at)
            except RunnerError as error:
                findings.append(error)
            else:
                if text and keys == ("snapshot", "branch") and not is_branch(filled):
                    findings.append(BadRef(f"`{excerpt(filled)}` is not a branch name", at=at, hint=BRANCH_HINT))
    return findings


def missing_faults(selected: Selected, missing: Iterable[Missing]) -> Iterator[RunnerError]:
    """Report what a run does not get at the manifest line that wants it."""
    for one in missing:
        yield type(one.error)(one.error.message, at=_place(selected, one), hint=one.error.hint)


def _place(selected: Selected, missing: Missing) -> Place:  # noqa: PLR0911  # one for each thing
    agent, run = selected.agent_type, selected.run
    match missing.what:
        case (
            Wanted.PROVIDERS | Wanted.TOOLCHAINS | Wanted.DEPENDENCIES | Wanted.NETWORK | Wanted.SUBMODULES | Wanted.LFS
        ):
            return agent.place("workspace", *missing.what.value.split("."))
        case Wanted.IMAGE:
            return agent.place("workspace", "base_image")
        case Wanted.CHECKOUT:
            return source_place(selected)
        case Wanted.SCRIPT:
            return agent.place("script")
        case Wanted.SKILL:
            return agent.place("skills", selected.agent.skills.index(missing.skill))
        case Wanted.MCP:
            names = [one.name for one in used_servers(selected.agent.mcp_servers)]
            return agent.place("mcp_servers", names.index(missing.skill))
        case Wanted.INCIDENT:
            return run.place(*selected.incident_keys)
        case Wanted.CLUSTER:
            return run.place(*keys_of(selected, missing.error))
        case Wanted.AGENTS_FILE:
            assert selected.project is not None  # or there would be no such file to look for
            return selected.project.place("root")


def document_faults(document: Document) -> list[RunnerError]:
    """Values of a document whose form only another room can judge, and templates that are malformed."""
    found: list[RunnerError] = [
        BadValue(f"`{text[:60]}` {complaint}", at=document.place(*keys, position))
        for keys, texts, check in _checked(document.kind, document.spec)
        for position, text in enumerate(texts)
        if isinstance(text, str) and (complaint := check(text))
    ]
    if document.kind == "NetworkSet" and document.name in TOOLS:
        at = document.tree.place("metadata", "name")
        found.append(BadName(f"`{document.name}` means the hosts of that tool", at=at, hint="rename the set"))
    malformed = (template.check(text, at=document.place(*keys)) for keys, text in _templated(document.spec))
    return found + [error for error in malformed if error]


Checked = tuple[tuple[str | int, ...], Sequence[object], Callable[[str], str | None]]


def _checked(kind: str, spec: Any) -> Iterator[Checked]:
    """Lists of values with where they are written and who judges one of them."""
    match spec:  # the classes of rare kinds are not imported for those that are not there
        case AgentTypeSpec():
            yield ("workspace", "protected_paths"), spec.workspace.protected_paths, check_protected
            yield ("workspace", "toolchains"), spec.workspace.toolchains, check_toolchain
            yield ("workspace", "dependencies"), spec.workspace.dependencies, check_protected
            for position, one in enumerate(spec.workspace.dependencies):
                if not isinstance(one, str):
                    keep = [path.removeprefix("~/") for path in one.keep]
                    yield ("workspace", "dependencies", position, "keep"), keep, check_protected
        case _ if kind == "McpServer":
            yield ("toolchains",), spec.toolchains, check_toolchain
        case _ if kind == "Project":
            yield ("protected_paths",), spec.protected_paths, check_protected
        case PolicyKindSpec():
            yield ("allowed_paths",), spec.allowed_paths, check_pattern
            yield ("forbidden_patterns",), spec.forbidden_patterns, check_pattern
        case IncidentRunSpec() if spec.verify is not None and spec.verify.files is not None:
            yield ("verify", "files", "required"), spec.verify.files.required, check_pattern
            yield ("verify", "files", "forbidden"), spec.verify.files.forbidden, check_pattern


def _templated(spec: BaseModel) -> Iterator[tuple[tuple[str, ...], str]]:
    """The templates of a document with where they are written."""
    match spec:
        case AgentTypeSpec():
            yield ("prompt", "system"), spec.prompt.system
            yield ("prompt", "user"), spec.prompt.user
            yield from ((("env", name), value) for name, value in spec.env.items())
        case IncidentRunSpec():
            yield ("prompt",), spec.prompt
            yield ("snapshot", "message"), (spec.snapshot and spec.snapshot.message) or ""
            yield ("snapshot", "branch"), (spec.snapshot and spec.snapshot.branch) or ""
