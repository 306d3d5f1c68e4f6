"""Whatever the bytes: documents or errors, never a traceback, and every error can be shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.manifest.load import defaults, load
from runner.report.diagnostics import as_json, render

few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

SAMPLE = Path(__file__).parent.parent / "cases" / "diagnostics" / "manifest.bad-value.yaml"

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 1 << 70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["none", "4G", "5m"]),
)
fields = st.sampled_from(
    sorted(
        {key for d in defaults().values() for key in d.written}
        | {"agent", "script", "task", "files", "provider", "type"}
    )
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(fields | st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
documents = st.fixed_dictionaries(
    {"kind": st.sampled_from(["AgentType", "Policy", "IncidentRun"]) | values},
    optional={
        "apiVersion": st.just("runner/v1") | values,
        "metadata": st.just({"name": "a"}) | values,
        "spec": st.dictionaries(fields, values, max_size=6) | values,
    },
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "f.yaml"


def check(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    found = load(path)[1]

    assert all(line.isprintable() for line in render(found).splitlines())
    json.dumps([as_json(finding) for finding in found])
    assert all(len(finding.message) <= 4096 for finding in found)


@few
@given(st.binary(max_size=200))
def test_any_bytes(path: Path, raw: bytes) -> None:
    check(path, raw)


@few
@given(st.text(alphabet="ab:-?[]{},&*!|>'\"#%@` \n\t0.~<é日", max_size=80))
def test_any_yaml_like_text(path: Path, text: str) -> None:
    check(path, text.encode())


@few
@given(st.integers(0, SAMPLE.stat().st_size), st.integers(0, 40), st.text(alphabet="a: -[]{}&*\n\"'", max_size=4))
def test_a_damaged_manifest(path: Path, start: int, length: int, replacement: str) -> None:
    raw = SAMPLE.read_bytes()
    check(path, raw[:start] + replacement.encode() + raw[start + length :])


@few
@given(documents)
def test_any_document_tree(path: Path, document: dict[str, Any]) -> None:
    check(path, json.dumps(document).encode())
