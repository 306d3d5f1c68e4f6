"""Manifests of a triage, as text: an AgentType and an IncidentRun, planned and applied as any others are."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path

from runner.core.errors import (
    StoreFailed,
)
from runner.core.settings import Settings
from runner.manifest.emit import Value, emit
from runner.ops.triage.options import check_names
from runner.ops.triage.request import MEMORY, NAME, REPORT, SKILL, TriageRequest
from runner.spec.template import is_template
from runner.triage.reader_account import reader_manifest
from runner.triage.sections import SECTIONS

MIN_REPORT = 100  # bytes
FILES_ONLY = """\
There is no cluster in this run, and kubectl has none to ask: the files in /incident are all there is. What one of them
says of rights in a cluster is not about you. Say in the report that no cluster was looked at.
"""


def manifest_of(triage: TriageRequest) -> str:
    """Write an AgentType and an IncidentRun, with absolute paths only."""
    strict = triage.memory is not None or triage.cpus is not None or triage.image is not None
    limits: dict[str, Value] = {"memory": triage.memory or MEMORY, **({"cpu": triage.cpus} if triage.cpus else {})}
    if not strict:  # a default: where this host cannot enforce it, the run warns and starts
        limits["enforcement"] = "best_effort"
    workspace: dict[str, Value] = {
        "enabled": True,
        "providers": list(triage.providers),
        **_image(triage),
        "repo_source": {"type": "none"},
        "resource_limits": limits,
        **({"toolchains": list(triage.toolchains)} if triage.toolchains else {}),
    }
    agent: dict[str, Value] = {
        "agent": triage.agent,
        **({"model": triage.model} if triage.model else {}),
        "prompt": {"system": _literal(triage.system), **_files_only_prompt(triage)},
        "skills": [SKILL],
        **({"cli_tools": list(triage.tools)} if triage.tools is not None else {}),
        **({"budget": {"turns": triage.turns}} if triage.turns is not None else {}),
        **({"env": {"INCIDENT_ID": _literal(triage.incident_id)}} if triage.incident_id else {}),
        "timeouts": {"agent": triage.seconds},
        "workspace": workspace,
    }
    cluster: dict[str, Value] = {}
    if triage.kubeconfig is not None:
        cluster = {"kubeconfig": triage.kubeconfig, "access": "read"}
        cluster |= {"context": triage.context} if triage.context else {}
        cluster |= {"namespace": triage.namespace} if triage.namespace else {}
    told = {
        "incident": triage.new_incident is not None or os.path.exists(triage.directory / "incident.json"),
        "permissions": bool(cluster) or os.path.exists(triage.directory / "incident_cluster_permissions.json"),
        "baseline": bool(cluster) and triage.baseline,
    }
    preload: list[Value] = [name for name, known in told.items() if known]
    work: dict[str, Value] = {
        "agent_type": NAME,
        "prompt": _literal(triage.prompt),
        "incident": {"directory": str(triage.directory), **cluster},
        **({"context": {"preload": preload}} if preload else {}),
        "verify": {"report": {"path": REPORT, "min_bytes": MIN_REPORT, "sections": list(SECTIONS)}},
        **({"debug": True} if triage.debug else {}),
        "timeout": triage.seconds,
    }
    return "---\n".join((emit("AgentType", NAME, agent), emit("IncidentRun", NAME, work)))


def account_manifest(namespace: str | None) -> str:
    """Write the Kubernetes manifest of an account that may only read. Raises ``UsageError``."""
    check_names("--namespace", {"namespace": namespace})
    return reader_manifest(namespace)


def _files_only_prompt(triage: TriageRequest) -> dict[str, Value]:
    """Tell the agent that there is no cluster, if there is none."""
    if triage.kubeconfig is not None:
        return {}
    why = f"It was to be looked at, but {triage.away_reason}.\n" if triage.away_reason else ""
    return {"user": f"{_literal(f'{FILES_ONLY}{why}')}\n{{{{ run.prompt }}}}"}


def store_manifest(text: str, settings: Settings) -> Path:
    """Store the text below ``RUNNER_HOME``, for ``resume``; equal texts are one file. Raises ``StoreFailed``."""
    folder = settings.home / NAME
    path = folder / f"{sha256(text.encode()).hexdigest()[:16]}.runner.yaml"
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.path.exists(path):
            os.utime(path)  # gc goes by its latest use
        else:
            half.write_text(text, encoding="utf-8")
            half.replace(path)
    except OSError as error:
        raise StoreFailed(f"`{folder}` cannot be written: {error.strerror}", hint="set RUNNER_HOME") from error
    return path


def _image(triage: TriageRequest) -> dict[str, Value]:
    if triage.image is None:
        return {}
    return {"base_image": {"ref": triage.image, "pull": "never"} if triage.has_own_image else triage.image}


def _literal(text: str) -> str:
    """Quote text so that as a template it renders to itself."""
    if not is_template(text):
        return text
    quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return '{{ "' + quoted + '" }}'
