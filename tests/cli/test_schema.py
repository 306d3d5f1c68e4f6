"""``runner schema`` prints what an editor or another tool can use by itself."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from jsonschema.validators import validator_for

from runner.cli.main import main
from runner.cli.output import Output
from tests.manifest.build import policy


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


def test_an_unknown_kind_is_told_the_nearest() -> None:
    code, text = printed("Polici")

    assert code == 2
    assert "error[manifest.unknown-kind]: `Polici` is not a known kind" in text
    assert "did you mean `Policy`?" in text
