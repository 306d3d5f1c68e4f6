"""Incident of ``incident.json``, in one form for templates and prompts, whichever historic shape the file has."""

from __future__ import annotations

import json
from collections.abc import Mapping

from runner.triage.strict_json import read_object, written

FILE = "incident.json"


def read_incident(content: bytes) -> dict[str, object]:
    """Read the incident: ``resource`` is an object, ``context`` a text, and neither is ``null``.

    A resource written as the text ``KIND/NAME`` gets the incident's ``namespace``. Everything else stays. Raises
    ``ValueError`` with a message for people.
    """
    incident = dict(read_object(content, FILE))
    for name, normal in (("resource", _resource), ("context", _context)):
        if name in incident and (value := normal(incident[name], incident)) is not None:
            incident[name] = value
        else:
            incident.pop(name, None)
    return incident


def incident_text(incident: Mapping[str, object]) -> str:
    """Format an incident for a prompt, as JSON."""
    return written(incident)


def _resource(value: object, incident: Mapping[str, object]) -> object:
    if isinstance(value, str):
        kind, _, name = value.rpartition("/")
        named = {"kind": kind, "name": name} if kind.isalpha() else {"name": value}
        namespace = incident.get("namespace")
        return {**named, "namespace": namespace} if isinstance(namespace, str) and namespace else named
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"`resource` of {FILE} is neither an object nor a text such as Deployment/checkout")
    return value


def _context(value: object, incident: Mapping[str, object]) -> object:
    if isinstance(value, dict):
        return "\n".join(f"{name}: {_words(each)}" for name, each in value.items())
    if value is not None and not isinstance(value, str):
        raise ValueError(f"`context` of {FILE} is neither a text nor an object")
    return value


def _words(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
