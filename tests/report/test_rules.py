"""Every code is explained, and the examples are what they claim to be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.core.errors import RunnerError, UsageError
from runner.core.settings import Settings
from runner.ops.planning.validate import validate
from runner.report.rules import explain, listing, rules

_EXAMPLES = re.compile(r"Breaks it:\n\n```(\w+)\n(.*?)```\n\nRight:\n\n```\1\n(.*?)```\Z", re.DOTALL)

BY_HOST = {"policy.isolation", "plan.unenforceable"}  # manifests are to blame, but only a look at providers shows it


def codes(of: type[RunnerError] = RunnerError) -> Iterator[str]:
    if "code" in vars(of) and of is not RunnerError:
        yield of.code
    for kind in of.__subclasses__():
        yield from codes(kind)


def test_every_code_is_explained() -> None:
    assert sorted(rules()) == sorted(set(codes()))


def test_the_listing_has_every_code_on_one_line() -> None:
    assert [line.split()[0] for line in listing().splitlines()] == list(rules())


@pytest.mark.parametrize("code", rules())
def test_an_explanation_has_a_sentence_and_both_examples(code: str) -> None:
    rule = rules()[code]

    assert rule.summary.endswith(".")
    assert _EXAMPLES.search(rule.text), rule.text
    assert explain(code).startswith(f"{code}\n\n")


@pytest.mark.parametrize("code", [code for code, rule in rules().items() if "```yaml" in rule.text])
def test_one_example_breaks_the_rule_and_the_other_is_fine(code: str, tmp_path: Path) -> None:
    found = _EXAMPLES.search(rules()[code].text)

    for name, text, expected in (("bad", found[2], {code} - BY_HOST), ("good", found[3], set())):
        (tmp_path / f"{name}.yaml").write_text(text)
        findings = validate(tmp_path / f"{name}.yaml", Settings.from_env({}))[1]
        assert {finding.code for finding in findings} == expected


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        pytest.param("policy.providr", "did you mean `policy.provider`?", id="near miss"),
        pytest.param("nonsense", "`runner validate --explain list` shows every code", id="nothing like a code"),
    ],
)
def test_an_unknown_code_suggests_what_to_ask(word: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        explain(word)

    assert caught.value.hint == hint
