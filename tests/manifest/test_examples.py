"""The examples show every kind, and what they show is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runner.manifest.load import kinds, load
from runner.settings import shipped
from tests.situations import Project

EXAMPLES = shipped("manifests") / "examples"
RUNS = [document.name for document in load(EXAMPLES)[0] if document.kind == "IncidentRun"]


def test_every_kind_has_an_example() -> None:
    documents, found = load(EXAMPLES)

    assert not found
    assert {document.kind for document in documents} == {*kinds()}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda p: p.name)
def test_a_file_holds_one_document(path: Path) -> None:
    assert len(load(path)[0]) == 1


@pytest.mark.parametrize("name", RUNS)
def test_an_example_compiles(project: Project, name: str) -> None:
    done = project.runner("plan", str(EXAMPLES), "--run", name)

    of_this_host = (
        r"plan\.not-enforced|agent\.cli-missing|gateway\.key-missing"  # limits that root alone keeps, CLIs, keys
    )
    assert re.findall(rf"^\w+\[(?!{of_this_host}\]).*", done.err, re.MULTILINE) == []
    assert "Nothing started." in done.out
