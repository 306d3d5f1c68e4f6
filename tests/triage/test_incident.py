"""``incident.json`` in the one form that templates and prompts see."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from runner.triage.incident import incident_text, read_incident

STRUCT = {
    "incidentId": "5f7d",
    "cluster": "prod-eu",
    "namespace": "payments",
    "resource": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "checkout", "namespace": "payments"},
    "faultType": "CrashLoopBackOff",
    "severity": "CRITICAL",
    "context": "restarts since 02:40",
}


def read(document: Any) -> dict[str, object]:
    return read_incident(json.dumps(document).encode())


def test_the_struct_form_stays_as_it_is() -> None:
    assert read(STRUCT) == STRUCT


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        pytest.param("Deployment/checkout", {"kind": "Deployment", "name": "checkout"}, id="kind and name"),
        pytest.param("checkout-7c9d", {"name": "checkout-7c9d"}, id="a name"),
        pytest.param("a/b/c", {"name": "a/b/c"}, id="something else"),
        pytest.param("7/x", {"name": "7/x"}, id="no kind"),
    ],
)
def test_a_resource_of_text_becomes_an_object(written: str, normal: dict[str, str]) -> None:
    assert read({"resource": written})["resource"] == normal
    assert read({"resource": written, "namespace": ""})["resource"] == normal
    assert read({"resource": written, "namespace": 7})["resource"] == normal
    assert read({"resource": written, "namespace": "n"})["resource"] == {**normal, "namespace": "n"}


def test_a_context_of_an_object_becomes_text() -> None:
    context = {"pods": 3, "since": "02:40", "last": {"exit": "é"}}

    assert read({"context": context})["context"] == 'pods: 3\nsince: 02:40\nlast: {"exit": "é"}'


def test_null_is_as_if_it_was_not_there_and_what_is_unknown_stays() -> None:
    assert read({"resource": None, "context": None, "team": ["a", {"b": None}]}) == {"team": ["a", {"b": None}]}


def nested(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"{", "incident.json is not JSON", id="no JSON"),
        pytest.param(b"[]", "not an object", id="a list"),
        pytest.param(b'{"a": 1, "b": {"d": 0, "c": 1, "c": 2}}', '"c" is twice in one object', id="a key twice"),
        pytest.param(b'{"a": NaN}', "`NaN` is not a number", id="no number"),
        pytest.param(b'{"a": ' + b"9" * 5000 + b"}", "has a number that is too large", id="a number of 5,000 digits"),
        pytest.param(b'{"a": [-1.5e999]}', "has a number that is too large", id="a number beyond any other"),
        pytest.param(b'{"a": 1e+}', "not JSON", id="half a number"),
        pytest.param(b'"' + rb"\"" * 100_000, "not JSON", id="a text without end"),
        pytest.param(b'{"%s": 1, "%s": 2}' % (b"k" * 70, b"k" * 70), f'"{"k" * 60}" is twice', id="a long key"),
        pytest.param(nested(65), "nested too deeply", id="65 levels"),
        pytest.param(b'{"a":%s1%s}' % (b"[" * 64, b"]" * 64), "nested too deeply", id="64 lists"),
        pytest.param(b"[" * 100_000, "nested too deeply", id="levels without end"),
        pytest.param(b'{"a": "\xff"}', "not UTF-8", id="not UTF-8"),
        pytest.param(b'{"a": "\\ud800"}', "half a character", id="half a character"),
        pytest.param(b'{"resource": 7}', "`resource` of incident.json is neither", id="a resource that is a number"),
        pytest.param(b'{"context": []}', "`context` of incident.json is neither", id="a context that is a list"),
    ],
)
def test_what_is_malformed_is_an_error_in_words(content: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_incident(content)


def test_digits_in_a_text_are_no_number() -> None:
    told = {"title": 'a"' + "9" * 5000, "restarts": 10**307, "load": 1.5e-3}

    assert read(told) == told
    assert read_incident(nested(64)) == json.loads(nested(64))


def test_text_for_the_prompt_is_json_on_lines_with_escapes_for_what_is_invisible() -> None:
    assert incident_text({"a": ["\u00e9\u202e\U000e0041"]}) == '{\n  "a": [\n    "\u00e9\\u202e\\udb40\\udc41"\n  ]\n}'


def test_text_for_the_prompt_is_the_same_json_with_nothing_invisible() -> None:
    seeded = random.Random(35)
    odd = [
        "\x1b[31m",
        "\0",
        "\x7f",
        "\x9b",
        "\u202e",
        "\u2066",
        "\u200b",
        "\U000e0041",
        "\u2028",
        "\u00a0",
        "é",
        "文",
        "😀",
    ]
    for _ in range(300):
        text = "".join(seeded.choice([*odd, "a", '"', "\\", "\n"]) for _ in range(seeded.randrange(40)))
        incident = {**STRUCT, "context": text, text or "x": [text]}

        shown = incident_text(incident)

        assert json.loads(shown) == incident
        assert shown.replace("\n", "").isprintable()
