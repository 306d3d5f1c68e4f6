"""Manifests by short words, and the runs that they make."""

from __future__ import annotations

import json
from pathlib import Path

from runner.core.errors import RunnerError
from runner.core.settings import Settings
from runner.manifest.load import Document, defaults, load
from runner.spec.model import Facts, RunSpec
from runner.spec.resolve import outputs_of, resolve
from runner.spec.select import select

AGENT = {"agent": "script", "script": {"files": []}}
ENABLED = {"enabled": True}


def agent_type(workspace: dict[str, object] | None = None, /, **spec: object) -> dict[str, object]:
    return document("AgentType", **{**AGENT, **({"workspace": workspace} if workspace is not None else {}), **spec})


def policy(**spec: object) -> dict[str, object]:
    return document("Policy", **spec)


def run(**spec: object) -> dict[str, object]:
    return document("IncidentRun", **{"agent_type": "fixer", **spec})


def document(kind: str, name: str = "fixer", **spec: object) -> dict[str, object]:
    return {"apiVersion": "runner/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def load_text(folder: Path, *texts: str) -> tuple[list[Document], list[RunnerError]]:
    """Load one file that holds these documents."""
    (folder / "f.yaml").write_text("\n---\n".join(texts))
    documents, found = load(folder / "f.yaml")
    return documents, found


def load_data(folder: Path, *documents: object) -> tuple[list[Document], list[RunnerError]]:
    return load_text(folder, *(json.dumps(data, ensure_ascii=False) for data in documents))


def resolved(
    folder: Path,
    workspace: dict[str, object] | None = None,
    /,
    *others: dict[str, object],
    run: dict[str, object] | None = None,
    agent: dict[str, object] | None = None,
    env: dict[str, str] | None = None,
    facts: Facts | None = None,
    untrusted: bool = False,
) -> tuple[RunSpec, list[RunnerError]]:
    """Resolve one run of an agent type with this workspace, beside these documents."""
    agent = agent if agent and "agent" in agent else {**AGENT, **(agent or {})}
    types = document("AgentType", workspace={"enabled": True, **(workspace or {})}, **agent)
    runs = document("IncidentRun", "fix", agent_type="fixer", **(run or {}))
    documents, faults = load_data(folder, types, runs, *others)
    (selected,), unresolved = select(documents, defaults())
    assert faults + unresolved == []
    facts = facts or Facts({}, open=True)
    return resolve(selected, Settings.from_env(env or {}), facts, outputs_of([selected]), untrusted=untrusted)
