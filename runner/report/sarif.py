"""Findings as SARIF 2.1.0, which code hosts show beside the code: one run, and one rule for each code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from runner import __version__
from runner.core.errors import Place, RunnerError, in_order
from runner.core.sanitize import excerpt
from runner.report.diagnostics import MESSAGE
from runner.report.rules import rules

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_sarif(findings: Sequence[RunnerError], path: str) -> dict[str, object]:
    """Return a SARIF log. Findings without a place are shown at ``path``, since readers demand one."""
    codes = sorted({finding.code for finding in findings})
    known = rules()
    driver = {
        "name": "runner",
        "version": __version__,
        "rules": [
            {"id": code, "shortDescription": {"text": known[code].summary}, "help": {"text": known[code].text}}
            for code in codes
        ],
    }
    results = [_result(finding, codes.index(finding.code), path) for finding in in_order(findings)]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(finding: RunnerError, rule: int, path: str) -> dict[str, object]:
    text = excerpt(finding.message, MESSAGE) + (f"\nhint: {excerpt(finding.hint, MESSAGE)}" if finding.hint else "")
    at = _location(finding.at) if finding.at else {"physicalLocation": {"artifactLocation": {"uri": _uri(path)}}}
    related = [_location(place) for place in finding.also]
    return {
        "ruleId": finding.code,
        "ruleIndex": rule,
        "level": finding.severity,
        "message": {"text": text},
        "locations": [at],
        **({"relatedLocations": related} if related else {}),
    }


def _location(place: Place) -> dict[str, object]:
    region = {"startLine": place.line, "startColumn": place.column, "endColumn": place.column + place.width}
    return {"physicalLocation": {"artifactLocation": {"uri": _uri(place.file)}, "region": region}}


def _uri(path: str) -> str:
    """Return a URI relative to the repository if the path is relative, which is how code hosts find the file."""
    text = path.encode(errors="surrogateescape")
    return f"file://{quote(text)}" if Path(path).is_absolute() else quote(text)
