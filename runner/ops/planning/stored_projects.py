"""Projects that runs name and no manifest describes, as documents from the store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from runner.core.settings import Settings
from runner.manifest import text
from runner.manifest.kinds.incident_run import Spec as IncidentRunSpec
from runner.manifest.load import API_VERSION, Document, judge
from runner.ops.host.state import read_state
from runner.ports.store import ProjectRow

RECORD = "recorded project"  # in place of a file's name


async def recorded_projects(documents: Sequence[Document], settings: Settings) -> list[Document]:
    """Return a document for each such project that the store has."""
    written = {document.name for document in documents if document.kind == "Project"}
    named = {document.spec.project for document in documents if isinstance(document.spec, IncidentRunSpec)}
    wanted = named - written - {None}
    if not wanted:
        return []
    async with read_state(settings) as store:
        return [_document(row) for row in await store.projects() if row.name in wanted]


def _document(row: ProjectRow) -> Document:
    """Make the document. Its root is not part of the written fields: a plan's digest has no host paths."""
    spec = {"workspace_isolation": row.workspace_isolation, "protected_paths": row.protected_paths}
    written = {"apiVersion": API_VERSION, "kind": "Project", "metadata": {"name": row.name}, "spec": spec}
    (tree,), _ = text.parse(RECORD, json.dumps(written, indent=2).encode())
    document = judge(tree, Path(RECORD))[0].document
    assert document is not None  # a store takes no other
    return replace(document, directory=Path(row.root))
