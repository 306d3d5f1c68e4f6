"""SARIF as code hosts demand it, judged by what version 2.1.0 requires of the properties that we write."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

from runner.core.errors import BadValue, DefaultsDropped, DuplicateKey, Place, RunnerError, UnreadableManifest
from runner.report.sarif import as_sarif


def closed(required: list[str], **properties: object) -> dict[str, object]:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


def many(items: object) -> dict[str, object]:
    return {"type": "array", "items": items, "uniqueItems": True}


TEXT: dict[str, object] = {"type": "string"}
NUMBER = {"type": "integer", "minimum": 1}
MESSAGE = closed(["text"], text=TEXT)
LOCATION = closed(
    [],
    physicalLocation=closed(
        ["artifactLocation"],
        artifactLocation=closed([], uri={"type": "string", "pattern": r"^[A-Za-z0-9%._~/:@!$&'()*+,;=-]+$"}),
        region=closed([], startLine=NUMBER, startColumn=NUMBER, endColumn=NUMBER),
    ),
)
RULE = closed(["id"], id=TEXT, shortDescription=MESSAGE, help=MESSAGE)
RESULT = closed(
    ["message"],
    ruleId=TEXT,
    ruleIndex={"type": "integer", "minimum": -1},
    level={"enum": ["none", "note", "warning", "error"]},
    message=MESSAGE,
    locations=many(LOCATION),
    relatedLocations=many(LOCATION),
)
RUN = closed(
    ["tool"],
    tool=closed(["driver"], driver=closed(["name"], name=TEXT, version=TEXT, rules=many(RULE))),
    columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
    results={"type": "array", "items": RESULT},
)
SCHEMA = closed(
    ["version", "runs"], **{"$schema": TEXT, "version": {"enum": ["2.1.0"]}, "runs": {"type": "array", "items": RUN}}
)


def results(*findings: RunnerError) -> list[dict[str, Any]]:
    log = json.loads(json.dumps(as_sarif(findings, "my folder")))
    jsonschema.validate(log, SCHEMA)
    (run,) = log["runs"]
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
    found: list[dict[str, Any]] = run["results"]
    return found


def location(result: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = result["locations"][0]["physicalLocation"]
    return found


def test_a_finding_has_its_code_level_place_and_hint() -> None:
    (result,) = results(BadValue("`4X` is not a size", at=Place("a.yaml", 7, 3, 2, "  4X"), hint="for example 4G"))

    assert (result["ruleId"], result["level"]) == ("manifest.bad-value", "error")
    assert result["message"]["text"] == "`4X` is not a size\nhint: for example 4G"
    assert location(result) == {
        "artifactLocation": {"uri": "a.yaml"},
        "region": {"startLine": 7, "startColumn": 3, "endColumn": 5},
    }


def test_findings_are_in_the_order_of_their_places_and_share_rules() -> None:
    places = [Place("b", 1, 1), Place("a", 2, 1), Place("a", 1, 1)]

    found = results(*(BadValue(str(place), at=place) for place in places), DefaultsDropped("w", at=Place("c", 1, 1)))

    assert [result["message"]["text"] for result in found] == ["a:1:1", "a:2:1", "b:1:1", "w"]
    assert [result["level"] for result in found] == ["error", "error", "error", "warning"]


def test_further_places_are_related_locations() -> None:
    (result,) = results(DuplicateKey("m", at=Place("a", 2, 1), also=(Place("a", 1, 1),)))

    assert result["relatedLocations"][0]["physicalLocation"]["region"]["startLine"] == 1


def test_a_finding_without_a_place_is_at_the_path_that_was_given() -> None:
    assert location(results(UnreadableManifest("m"))[0]) == {"artifactLocation": {"uri": "my%20folder"}}


def test_names_of_files_become_references() -> None:
    names = ["a b/ü#?.yaml", "/x%y.yaml", "\udcff.yaml"]

    uris = [location(result)["artifactLocation"]["uri"] for name in names for result in results(at(name))]

    assert uris == ["a%20b/%C3%BC%23%3F.yaml", "file:///x%25y.yaml", "%FF.yaml"]


def at(file: str) -> RunnerError:
    return BadValue("m", at=Place(file, 1, 1))


def test_no_findings_are_an_empty_log() -> None:
    assert results() == []
