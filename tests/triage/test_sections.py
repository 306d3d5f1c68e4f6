"""Headings, bodies and emptiness of a report's sections."""

from __future__ import annotations

import pytest

from runner.triage.sections import bodies_of, is_empty, known_as, section, sections_of

REPORT = """\
before
# 1. Summary #
first\r
### Detail
inner
```
## Evidence
```
## **Impact**:

- none
# Next  Steps
~~~
<!-- nothing yet -->
# Unchecked
~~~
## Summary
again
"""


@pytest.mark.parametrize(
    ("title", "known"),
    [
        ("Summary", "summary"),
        ("  *Root*  _Cause_ ## ", "root cause"),
        ("2.1) `Impact`:", "blast radius"),
        ("3 - Evidence", "evidence"),
        ("4. Evidence : ", "evidence"),
        ("Stra\u00dfe", "strasse"),
        ("Summary::", "summary:"),
        ("\u00a0Summary\u00a0:", "\u00a0summary\u00a0"),
    ],
)
def test_a_title_is_known_however_it_is_written(title: str, known: str) -> None:
    assert known_as(title) == known


def test_a_section_goes_to_the_next_heading_of_its_level_or_above() -> None:
    assert bodies_of(REPORT) == {
        "summary": "first\ninner\n```\n## Evidence\n```\n\n- none\nagain",
        "detail": "inner\n```\n## Evidence\n```",
        "blast radius": "- none",
        "next steps": "~~~\n<!-- nothing yet -->\n# Unchecked\n~~~\nagain",
    }
    assert (section(REPORT, "Impact"), section(REPORT, "Timeline")) == ("- none", "")
    assert sections_of(REPORT, ("Summary", "Next Steps", "Timeline", "Evidence")) == ("Summary", "Next Steps")


@pytest.mark.parametrize(
    ("body", "empty"),
    [("", True), ("```text\n```", True), ("<!-- a -->\n- *\n", True), ("-\nx", False), ("\u6587", False)],
)
def test_a_body_without_a_letter_is_empty(body: str, empty: bool) -> None:
    assert is_empty(body) is empty
