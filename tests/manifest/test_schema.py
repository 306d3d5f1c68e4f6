"""The schemas beside the loader where the two could drift apart: numbers, and files that are no manifests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator, Draft202012Validator
from wcmatch import glob

from runner.core.errors import Rejected
from runner.core.settings import shipped
from runner.fake_model.script import read_turns
from runner.manifest import repository, schema
from runner.manifest.load import load
from tests.support.manifest_text import ENABLED, agent_type, document, load_data, policy, run

SCHEMAS = shipped("schemas")
NUMBERS = (
    *(0, 1, 1.0, 2, 16, 16.0, 255, 255.0, 256, 0.5, 1.5, -1, -1.0, 0.0, 1 << 22, (1 << 22) + 1, 10**9 - 1, 10**9),
    *(16 << 20, 2 << 40, (2 << 40) + 1, 10**15 - 1, 10**15, 1e15, (1 << 63) - 1, 1 << 63, 10**30, 1e30, 1e300),
)
FIELDS = {
    "pids": lambda n: agent_type({**ENABLED, "resource_limits": {"pids": n}}),
    "cpu": lambda n: agent_type({**ENABLED, "resource_limits": {"cpu": n}}),
    "memory": lambda n: agent_type({**ENABLED, "resource_limits": {"memory": n}}),
    "disk": lambda n: agent_type({**ENABLED, "resource_limits": {"disk": n}}),
    "depth": lambda n: agent_type({**ENABLED, "repo_source": {"type": "task_context", "depth": n}}),
    "warm pool": lambda n: agent_type({**ENABLED, "warm_pool": {"size": n}}),
    "setup": lambda n: agent_type({**ENABLED, "setup": {"timeout": n}}),
    "stop budget": lambda n: agent_type(stop_budget=n),
    "tokens": lambda n: document("AgentType", agent="codex", budget={"tokens": n}),
    "dollars": lambda n: document("AgentType", agent="codex", budget={"cost_usd": n}),
    "size": lambda n: policy(max_file_size=n),
    "pull request": lambda n: run(task={"pull_request_number": n}),
    "least report": lambda n: run(verify={"report": {"path": "a", "min_bytes": n}}),
    "exit": lambda n: run(verify={"commands": [{"run": "a", "exit": n}]}),
    "parallel": lambda n: run(matrix={"model": ["a"], "max_parallel": n}),
    "text": lambda n: run(prompt=n),
}


@pytest.fixture(scope="module")
def forms() -> list[Any]:
    bundled = schema.bundled()
    return [Draft202012Validator(bundled), Draft7Validator(schema.as_draft_07(bundled))]


@pytest.mark.parametrize("field", FIELDS)
def test_a_number_is_judged_as_the_loader_does(field: str, tmp_path: Path, forms: list[Any]) -> None:
    wrong = []
    for number in NUMBERS:
        data = FIELDS[field](number)
        taken = not load_data(tmp_path, data)[1]
        wrong += [number for form in forms if form.is_valid(data) is not taken]

    assert wrong == []


TURNS = {
    "words": ([{"say": "a"}], True),
    "all parts": (
        [{"think": "a", "say": "b", "run": "c", "write": {"path": "p", "content": ""}, "call": {"tool": "t"}}],
        True,
    ),
    "an error": ([{"fail": {"status": 429, "retry_after": "5s"}}], True),
    "an error after a while": ([{"fail": {"status": 500}, "stall": 1, "say": None, "cut_off": False}], True),
    "a pace": ([{"say": "a", "pace": 1.5, "cut_off": True, "usage": {"input": 1.0, "output": 0}}], True),
    "none": ([], False),
    "nothing": ([{}], False),
    "nothing written": ([{"say": None}], False),
    "an error with words": ([{"fail": {"status": 429}, "say": "a"}], False),
    "an error that is cut off": ([{"fail": {"status": 429}, "cut_off": True}], False),
    "a status that is no error": ([{"fail": {"status": 200}}], False),
    "an unknown part": ([{"shout": "a"}], False),
    "no pace": ([{"say": "a", "pace": 0}], False),
    "tokens beyond 64 bits": ([{"say": "a", "usage": {"input": 1 << 63, "output": 0}}], False),
}


@pytest.mark.parametrize(("turns", "good"), TURNS.values(), ids=TURNS)
def test_turns_are_judged_as_the_reader_does(tmp_path: Path, turns: list[object], good: bool) -> None:
    data, found = {"turns": turns}, schema.others()["turns"]
    (tmp_path / "t").write_text(json.dumps(data))

    if good:
        assert len(read_turns(tmp_path / "t")) == len(turns)
    else:
        with pytest.raises(Rejected):
            read_turns(tmp_path / "t")

    assert Draft202012Validator(found).is_valid(data) is good
    assert Draft7Validator(schema.as_draft_07(found)).is_valid(data) is good


POLICIES = {
    "nothing written": ({}, True),
    "all": ({"allowedPaths": ["a"], "forbiddenPatterns": [], "allowNetwork": True, "maxFileSize": "1M"}, True),
    "bytes": ({"maxFileSize": 10485760.0}, True),
    "nulls": ({"allowedPaths": None, "maxFileSize": None}, True),
    "a manifest's words": ({"allowed_paths": ["a"]}, False),
    "no list": ({"allowedPaths": "a"}, False),
    "an empty pattern": ({"forbiddenPatterns": [""]}, False),
    "no size": ({"maxFileSize": 0}, False),
    "too many bytes": ({"maxFileSize": 10**15}, False),
    "no truth": ({"allowNetwork": 1}, False),
}


@pytest.mark.parametrize(("data", "good"), POLICIES.values(), ids=POLICIES)
def test_a_repositorys_policy_is_judged_as_the_reader_does(data: dict[str, object], good: bool) -> None:
    found = schema.others()["agentgate-policy"]

    assert (repository.read(json.dumps(data).encode())[2] == []) is good
    assert Draft202012Validator(found).is_valid(data) is good
    assert Draft7Validator(schema.as_draft_07(found)).is_valid(data) is good


@pytest.mark.parametrize("path", sorted((SCHEMAS / "v1").rglob("*.json")), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_a_schema_is_identified_by_the_name_of_its_file(path: Path) -> None:
    """So that references to its neighbours lead there, wherever the folder lies."""
    assert json.loads(path.read_text())["$id"] == path.name


def test_the_published_catalog_is_fresh_and_names_schemas_that_are_there() -> None:
    """``python -m runner.manifest.schema`` writes it."""
    published = SCHEMAS / schema.CATALOG

    assert published.read_text() == schema.text_of(schema.catalog())
    assert all((SCHEMAS / entry["url"]).is_file() for entry in schema.catalog()["schemas"])


@pytest.mark.parametrize(
    ("path", "of"),
    [
        ("a.runner.yaml", "runner"),
        ("deep/er/a.runner.yml", "runner"),
        (".runner/agent.yaml", "runner"),
        ("services/shop/.runner/house.yml", "runner"),
        ("runner.yaml", None),
        (".runner/agent.sh", None),
        ("agent.yaml", None),
        ("a.turns.yaml", "turns"),
        ("manifests/rehearsals/everything.turns.yaml", "turns"),
        (".agentgate/policy.yaml", "agentgate-policy"),
        ("policy.yaml", None),
    ],
)
def test_the_catalog_finds_the_schema_of_a_file(tmp_path: Path, path: str, of: str | None) -> None:
    """By minimatch's rules, as editors have them: a pattern without a slash is tried on the name."""
    flags = glob.GLOBSTAR | glob.DOTGLOB | glob.MATCHBASE
    found = [
        entry["url"].rpartition("/")[2].partition(".")[0]
        for entry in schema.catalog()["schemas"]
        if any(glob.globmatch(path, pattern, flags=flags) for pattern in entry["fileMatch"])
    ]

    assert found == ([of] if of else [])
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text("a: 1")
    read = "holds no manifests" not in str(load((tmp_path / path).parent)[1][0].message)
    assert read is (of == "runner")
