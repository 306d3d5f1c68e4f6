"""Facts that a run needs, and the demands of untrusted manifests that are refused before these are gathered."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from runner.core.errors import BadUrl, PathEscape, Place, RunnerError, Untrusted
from runner.core.model import Checkout, Pull
from runner.core.settings import Settings
from runner.manifest.load import Document
from runner.policy.toolchains import is_installed, is_language
from runner.spec.checkout import (
    SECRET_IN_URL,
    RepoSource,
    TaskContext,
    holds_secret,
    judge_url,
    resolve_checkout,
    uses_keys,
)
from runner.spec.cluster import WantedCluster, untrusted_cluster, wanted_cluster
from runner.spec.mcp import WantedServer, untrusted_mcp, wanted_servers
from runner.spec.model import Command, DependencySpec
from runner.spec.secrets import untrusted_secrets
from runner.spec.select import Selected, project_root, repository_root


class FactsRequest(Struct, frozen=True, kw_only=True):
    """The Facts that one run needs; gathering them is the only look outside before anything starts."""

    run: str
    agent: str | None  # that works with a model, with a CLI
    providers: tuple[str, ...]
    checkout: Checkout | None
    script: Path | None
    script_name: str
    incident: Path | None
    project: Path | None  # the root of the run's project, where an AGENTS.md may be
    toolchains: tuple[str, ...]
    dependencies: tuple[str, ...]
    dependency_commands: tuple[DependencySpec, ...]
    untrusted: bool
    base_image: str | None
    pull: Pull  # when the registry is asked for it
    skills: tuple[str, ...]
    uses_keys: bool  # the repository is reached with the ssh keys or the netrc of this host's user
    cluster: WantedCluster | None
    tools: tuple[str, ...]  # whose hosts networks name
    mcp_servers: tuple[WantedServer, ...] = ()


def facts_request(
    selected: Selected, settings: Settings, *, untrusted: bool = False
) -> tuple[FactsRequest, list[RunnerError]]:
    """List the facts that resolving this run needs."""
    findings: list[RunnerError] = []
    checkout = _checkout(selected)
    if untrusted and checkout is not None and checkout.path is not None:
        checkout = replace(checkout, within=repository_root(selected.agent_type.directory))
    if checkout is not None and checkout.url is not None and (fault := judge_url(checkout.url)):
        at = source_place(selected)
        if "@" in checkout.url or "?" in checkout.url:
            at = at._replace(text="")  # the line may hold a password
        findings.append(BadUrl(fault.message, at=at, hint=fault.hint))
    elif (task := selected.spec.task) is not None and holds_secret(task.repository_url or ""):
        at = selected.run.place("task", "repository_url")
        findings.append(BadUrl(SECRET_IN_URL, at=at._replace(text=""), hint="write the URL of the task without them"))
    agent = selected.agent
    script, incident = agent.script.path if agent.script is not None else None, selected.incident
    image = agent.workspace.base_image
    request = FactsRequest(
        run=selected.name,
        agent=agent.agent if agent.model is not None else None,
        providers=_providers(selected, settings),
        checkout=checkout,
        script=_inside(selected, selected.agent_type, script, ("script", "path"), findings) if script else None,
        script_name=script or "",
        incident=_incident_directory(selected, incident, findings) if incident is not None else None,
        project=project_root(selected, selected.project) if selected.project else None,
        toolchains=tuple(agent.workspace.toolchains),
        dependencies=tuple(one for one in agent.workspace.dependencies if isinstance(one, str)),
        dependency_commands=tuple(_dependency_commands(selected)),
        untrusted=untrusted,
        base_image=image.ref if image is not None else None,
        pull="never" if image is None or untrusted else image.pull,  # credentials for registries are the user's
        skills=tuple(agent.skills),
        uses_keys=checkout is not None
        and checkout.url is not None
        and uses_keys(checkout.url, settings.git_credentials),
        cluster=wanted_cluster(selected, settings),
        tools=() if untrusted else selected.tools,
        mcp_servers=wanted_servers(selected, settings),
    )
    return request, findings


def _dependency_commands(selected: Selected) -> Iterator[DependencySpec]:
    for one in selected.agent.workspace.dependencies:
        if not isinstance(one, str):
            keep = tuple(path.rstrip("/") for path in one.keep)
            yield DependencySpec(argv_of(one.run), tuple(one.from_), keep)


def argv_of(command: str | Sequence[str]) -> Command:
    """Return the argv of a command of a manifest."""
    return ("sh", "-c", command) if isinstance(command, str) else tuple(command)


def source_place(selected: Selected) -> Place:
    """The manifest line that says what is cloned."""
    source = selected.agent.workspace.repo_source
    if source.type == "task_context" and selected.spec.task is not None:
        return selected.run.place("task", "repository_url")
    keys = ("workspace", "repo_source", "url") if source.type == "fixed" else ("workspace", "repo_source")
    return selected.agent_type.place(*keys)


def _incident_directory(selected: Selected, written: str, findings: list[RunnerError]) -> Path | None:
    """The incident's directory: in the manifest's project, or by its absolute path anywhere on this host."""
    if os.path.isabs(written):
        return Path(os.path.realpath(written))
    return _inside(selected, selected.run, written, selected.incident_keys, findings)


def _inside(
    selected: Selected,
    document: Document,
    relative: str,
    keys: tuple[str | int, ...],
    findings: list[RunnerError],
) -> Path | None:
    """The file that a manifest names beside itself, if it lies in the manifest's project, links followed."""
    path = Path(os.path.realpath(document.directory / relative))  # ``resolve`` raises for links in a circle
    if path.is_relative_to(project_root(selected, document)):
        return path
    hint = "it must stay in the project's root" if selected.project else "it must stay in the repository"
    findings.append(PathEscape(f"`{relative}` leads out of the project", at=document.place(*keys), hint=hint))
    return None


def untrusted_faults(selected: Selected, want: FactsRequest) -> list[RunnerError]:
    """List what a manifest from a fork must not ask for, before anything that it names is looked at."""
    types = selected.agent_type
    findings: list[RunnerError] = []

    def refuse(what: str, key: str) -> None:
        at = types.place("workspace", key)
        findings.append(Untrusted(f"an untrusted manifest may not {what}", at=at, hint="apply it without --untrusted"))

    if not all(map(is_language, want.toolchains)):
        refuse("mount directories of the host", "toolchains")
    if not all(map(is_installed, want.dependencies)):
        refuse("see directories but those of package managers", "dependencies")
    if selected.agent.credentials == "env":
        at = types.place("credentials")
        message = "an untrusted manifest may not have the key of a model"
        findings.append(Untrusted(message, at=at, hint="write credentials: gateway, or leave it out"))
    findings += untrusted_secrets(selected)
    findings += untrusted_cluster(selected)
    host = selected.host_policy
    findings += untrusted_mcp(selected, named=(selected.policy(host).mcp_servers or ()) if host is not None else ())
    if want.incident is not None and not want.incident.is_relative_to(project_root(selected, selected.run)):
        at = selected.run.place(*selected.incident_keys)
        message = f"an untrusted manifest may not have `{want.incident}` for its incident"
        findings.append(Untrusted(message, at=at, hint="apply it without --untrusted"))
    if want.uses_keys:
        refuse("reach a repository with your keys", "repo_source")
    source = want.checkout.path if want.checkout is not None else None
    if source is not None and not source.is_relative_to(project_root(selected, types)):
        refuse(f"take its code from `{source}`", "repo_source")
    if selected.project is None:
        return findings
    root = project_root(selected, selected.project)
    if not root.is_relative_to(repository_root(selected.project.directory)):
        message = f"an untrusted manifest may not have `{root}` for its project"
        findings.append(Untrusted(message, at=selected.project.place("root"), hint="apply it without --untrusted"))
    if selected.shares_project:
        message = "an untrusted manifest may not see a project with the workspaces of others"
        at = selected.project.place("workspace_isolation")
        findings.append(Untrusted(message, at=at, hint="write workspace_isolation: true"))
    return findings


def _providers(selected: Selected, settings: Settings) -> tuple[str, ...]:
    if not selected.agent_type.wrote("workspace", "providers") and settings.providers is not None:
        return settings.providers
    return tuple(selected.agent.workspace.providers)


def _checkout(selected: Selected) -> Checkout | None:
    if not selected.agent.workspace.checkout_on_start:
        return None
    source = selected.agent.workspace.repo_source
    task = selected.spec.task
    directory = selected.agent_type.directory
    path = Path(os.path.realpath(directory / source.path)) if source.path is not None else None
    return resolve_checkout(
        RepoSource(
            type=source.type,
            url=source.url,
            path=path,
            branch=source.branch,
            depth=source.depth,
            include_dirty=source.include_dirty,
            submodules=source.submodules,
            lfs=source.lfs,
        ),
        TaskContext(**dict(task)) if task else TaskContext(),
    )
