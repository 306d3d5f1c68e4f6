"""``runner schema`` prints what an editor or another tool can use by itself."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from jsonschema.validators import validator_for

from runner.cli.main import main
from runner.cli.output import Output
from tests.support.manifest_text import policy


def printed(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    return main(("schema", *arguments), Output(out, out)), out.getvalue()


@pytest.mark.parametrize(
    ("arguments", "dialect"),
    [
        pytest.param(("Policy",), "2020-12", id="kind"),
        pytest.param(("Policy", "--draft-07"), "draft-07", id="kind in draft-07"),
        pytest.param((), "2020-12", id="all"),
        pytest.param(("--draft-07",), "draft-07", id="all in draft-07"),
    ],
)
def test_a_printed_schema_judges_documents_alone(arguments: tuple[str, ...], dialect: str) -> None:
    code, text = printed(*arguments)
    schema: dict[str, Any] = json.loads(text)
    validator = validator_for(schema, default=None)(schema)

    assert code == 0
    assert dialect in schema["$schema"]
    assert validator.is_valid(policy(max_file_size="1M"))
    assert not validator.is_valid(policy(max_file_sise="1M"))


def test_what_is_no_manifest_has_a_schema_and_all_are_in_the_catalog() -> None:
    turns, repository, catalog = (json.loads(printed(word)[1]) for word in ("turns", "agentgate-policy", "catalog"))

    assert validator_for(turns, default=None)(turns).is_valid({"turns": [{"say": "a"}]})
    assert validator_for(repository, default=None)(repository).is_valid({"maxFileSize": 1})
    assert len(catalog["schemas"]) == 3
    assert "draft-07" in json.loads(printed("turns", "--draft-07")[1])["$schema"]


def test_an_unknown_kind_is_told_the_nearest() -> None:
    code, text = printed("Polici")

    assert code == 2
    assert "error[manifest.unknown-kind]: `Polici` is not a known kind" in text
    assert "did you mean `Policy`?" in text
