"""Rendered findings: where the carets are, and what hostile text may not do."""

from __future__ import annotations

import json
import re

import pytest

from runner.core.errors import BadValue, DefaultsDropped, Place
from runner.report.diagnostics import COLUMNS, as_json, render


def at(text: str, value: str) -> Place:
    return Place("f.yaml", 7, text.index(value) + 1, len(value), text)


def shown_columns(text: str, value: str) -> tuple[str, str]:
    """What a terminal shows above the carets, and the source line."""
    source, carets = re.findall(r"^\s*(?:7 )?\| (.*)$", render([BadValue("m", at=at(text, value))]), re.MULTILINE)[-2:]
    cells = [c for character in source for c in ([character, ""] if character > "\u2e80" else [character])]
    return "".join(cells[carets.index("^") : len(carets)]), source


@pytest.mark.parametrize(
    ("text", "value", "above"),
    [
        pytest.param("key: value", "value", "value", id="plain"),
        pytest.param("日本: 値段, x", "値段", "値段", id="wide characters"),
        pytest.param("日本: 値段, x", "x", "x", id="behind wide characters"),
        pytest.param("a:\t\tb", "b", "b", id="behind tabs"),
        pytest.param("\x1b[31m\u202e\u2066: b", "b", "b", id="behind control and direction characters"),
        pytest.param("a: \u202eb\u202c", "\u202eb\u202c", "\\u202eb\\u202c", id="direction characters in the value"),
        pytest.param("x" * 1000 + " value " + "y" * 1000, "value", "value", id="far to the right"),
        pytest.param("x" * 100 + " " + "v" * 1000, "v" * 1000, "v" * 101, id="very long value"),
        pytest.param("日" * 500 + " value", "value", "value", id="far behind wide characters"),
    ],
)
def test_the_carets_are_under_the_value_in_a_line_of_bounded_width(text: str, value: str, above: str) -> None:
    over, source = shown_columns(text, value)

    assert over == above or (len(value) > COLUMNS and over.startswith(above[:50]))
    assert sum(2 if c > "\u2e80" else 1 for c in source) <= COLUMNS
    assert source.isprintable()


def test_findings_are_in_the_order_of_their_places() -> None:
    found = [
        BadValue(f"m{n}", at=Place(file, line, column))
        for n, (file, line, column) in enumerate([("b", 1, 1), ("a", 10, 1), ("a", 9, 5), ("a", 9, 4)])
    ]

    assert re.findall(r"m\d", render(found)) == ["m3", "m2", "m1", "m0"]


def test_a_warning_is_shown_like_an_error() -> None:
    assert render([DefaultsDropped("m", at=Place("f", 1, 2))]) == "warning[policy.defaults-dropped]: m\n --> f:1:2"


def test_a_finding_without_a_place_still_has_its_hint() -> None:
    assert render([BadValue("m", hint="h")]) == "error[manifest.bad-value]: m\n  = hint: h"


def test_colour_changes_nothing_but_colour() -> None:
    found = [BadValue("m", at=at("a: b", "b"), hint="h", also=(at("a: b", "a"),))]

    assert re.sub(r"\x1b\[[0-9;]*m", "", render(found, colour=True)) == render(found)
    assert render(found, colour=True) != render(found)


def test_a_finding_as_json_is_bounded_and_printable() -> None:
    finding = BadValue("\x1b" + "x" * 10_000, at=Place("f\n", 1, 2, 3, "y" * 10_000), hint="\u202eh")

    shown = json.dumps(as_json(finding), ensure_ascii=False)

    assert shown.isprintable()
    assert len(shown) < 5000
    assert as_json(finding)["at"] == {"file": "f\\n", "line": 1, "column": 2, "width": 3}
