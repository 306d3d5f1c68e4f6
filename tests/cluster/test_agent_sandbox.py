"""What of a pod counts as asked for, when somebody else makes it."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from runner.cluster.agent_sandbox import difference, sandbox_of
from runner.cluster.pod_access import probe_pod
from tests.support.cluster import sandboxes

ADD = "securityContext.a.add"


def test_a_sandbox_meets_the_definition_and_its_pod_is_as_asked_for() -> None:
    asked = probe_pod("gvisor", "fast")
    jsonschema.validate(sandbox_of(asked), sandboxes.schema())
    made = sandboxes.pod_of({**sandbox_of(asked), "metadata": {**asked["metadata"], "uid": "1"}})

    assert difference({"spec": asked["spec"]}, made) is None
    assert made["metadata"]["labels"].items() >= asked["metadata"]["labels"].items()


@pytest.mark.parametrize(
    ("asked", "found", "place"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}, None),
        ({"cpu": "2000m", "memory": "1024Ki"}, {"cpu": "2", "memory": "1Mi"}, None),
        ({"mounts": [{"readOnly": False}], "limits": {}}, {"mounts": [{}]}, None),
        ({"drop": ["ALL"]}, {"drop": ["ALL", "MORE"]}, None),
        ({"hostNetwork": False}, {}, None),
        ({"securityContext": {"a": 1}}, {"securityContext": {"a": 1, "procMount": "Default", "c": None}}, None),
        ({"hostNetwork": False}, {"hostNetwork": True}, "hostNetwork"),
        (
            {"securityContext": {"a": {"drop": ["ALL"]}}},
            {"securityContext": {"a": {"drop": ["ALL"], "add": ["X"]}}},
            ADD,
        ),
        ({"securityContext": {"a": 1}}, {"securityContext": {"a": 1, "runAsUser": 0}}, "securityContext.runAsUser"),
        ({"securityContext": {}}, {"securityContext": {"runAsNonRoot": False}}, "securityContext.runAsNonRoot"),
        ({"token": False}, {}, "token"),
        ({"mounts": [{"readOnly": True}]}, {"mounts": [{}]}, "mounts[0].readOnly"),
        ({"drop": ["ALL"]}, {"drop": []}, "drop[0]"),
        ({"drop": ["ALL"]}, {}, "drop[0]"),
        ({"cpu": "2"}, {"cpu": "3"}, "cpu"),
        ({"a": {"b": 1}}, {"a": "b"}, "a.b"),
        ({"name": "1/0"}, {"name": "x"}, "name"),
    ],
)
def test_more_is_no_difference_and_less_is_one(asked: Any, found: Any, place: str | None) -> None:
    assert difference(asked, found) == place
