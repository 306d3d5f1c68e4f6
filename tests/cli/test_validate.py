"""``runner validate`` as people and machines use it."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path

import pytest

from tests.support.bad_input import called
from tests.support.situations import document

AGENT = document("AgentType", "fixer", "agent: script\nscript: {files: []}\nworkspace: {enabled: true}")
HOUSE = document("Policy", "house", 'forbidden_patterns: ["**/*.bak"]')
RUN = document("IncidentRun", "fix", "agent_type: fixer\npolicy: house")
BROKEN = document("Policy", "other", "max_file_size: 4X")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a warning in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "all.runner.yaml").write_text("---\n".join((AGENT, HOUSE, RUN)))
    return tmp_path


def validate(*arguments: str) -> tuple[int, str, str]:
    return astuple(called("validate", *arguments))


def test_a_warning_is_no_error_unless_strict(folder: Path) -> None:
    assert validate(".")[:2] == (0, "3 documents fine\n")
    code, out, err = validate(".", "--strict")
    assert (code, out) == (2, "")
    assert err.startswith("error[policy.defaults-dropped]")


@pytest.mark.parametrize("strict", [(), ("--strict",)], ids=["", "strict"])
def test_every_face_has_the_same_findings(folder: Path, strict: tuple[str, ...]) -> None:
    (folder / "broken.runner.yaml").write_text(BROKEN)
    level = "error" if strict else "warning"
    expected = [(level, "policy.defaults-dropped"), ("error", "manifest.bad-value")]

    found = json.loads(validate(".", "--output", "json", *strict)[1])["findings"]
    assert [(finding["severity"], finding["code"]) for finding in found] == expected
    results = json.loads(validate(".", "--output", "sarif", *strict)[1])["runs"][0]["results"]
    assert [(result["level"], result["ruleId"]) for result in results] == expected
    lines = validate(".", "--output", "github", *strict)[1].splitlines()
    assert sorted(line.split(" ")[0] for line in lines) == sorted(f"::{severity}" for severity, _ in expected)
    assert {validate(".", "--output", face, *strict)[0] for face in ("text", "json", "sarif", "github")} == {2}


def test_a_code_is_explained_and_all_are_listed() -> None:
    assert validate("--explain", "policy.defaults-dropped")[1].startswith("policy.defaults-dropped\n\nA policy's list")
    assert "\nplan.cycle " in validate("--explain", "list")[1]


def test_an_unknown_code_is_bad_input_with_the_nearest() -> None:
    code, _, err = validate("--explain", "policy.default-dropped")

    assert code == 2
    assert "did you mean `policy.defaults-dropped`?" in err
