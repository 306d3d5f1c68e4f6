"""Manifests by short words, for the tests of this room."""

from __future__ import annotations

import json
from pathlib import Path

from runner.core.errors import RunnerError
from runner.manifest.load import Document, load

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
