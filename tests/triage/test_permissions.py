"""What ``incident_cluster_permissions.json`` says, and what of it a person has to know."""

from __future__ import annotations

import json

import pytest

from runner.ports.cluster import ClusterPermissions
from runner.triage.permissions import (
    FILE,
    Permissions,
    both_texts,
    differences,
    permissions_of,
    permissions_text,
    read_permissions,
)

FULL = {
    "cluster_name": "prod-eu",
    "validated_at": "2026-11-21T02:50:00Z",
    "can_get_pods": True,
    "can_get_logs": True,
    "can_get_events": True,
    "can_get_deployments": True,
    "can_get_services": True,
    "secrets_access_allowed": False,
    "can_get_secrets": False,
    "can_get_configmaps": True,
    "can_get_nodes": False,
    "warnings": ["nodes: refused"],
}


def test_the_file_of_the_predecessor_is_read() -> None:
    permissions, document = read_permissions(json.dumps({**FULL, "audited": 1}).encode())

    assert permissions == Permissions(**{**FULL, "warnings": ("nodes: refused",)})  # type: ignore[arg-type]
    assert json.loads(permissions_text(document)) == {**FULL, "audited": 1}
    assert permissions.complaints() == ("nodes: refused",)


def test_what_a_cluster_says_is_in_the_same_form() -> None:
    rights = ClusterPermissions(
        cluster="prod-eu", namespace="payments", pods=True, logs=True, events=False, warnings=("nodes: no answer",)
    )
    permissions = permissions_of(rights.document("2026-11-21T02:50:00Z"))

    assert permissions.lacking == ("events",)
    assert permissions.complaints() == ("too few rights in the cluster: it cannot read events", "nodes: no answer")


def test_rights_that_are_not_known_are_not_said_to_lack() -> None:
    rights = ClusterPermissions(
        cluster="prod-eu", namespace="payments", warnings=("whether pods can be read is not known: no answer in 5 s",)
    )
    permissions, document = read_permissions(json.dumps(rights.document("2026-11-21T02:50:00Z")).encode())

    assert json.loads(permissions_text(document))["can_get_pods"] is None
    assert (permissions.lacking, permissions.complaints()) == ((), rights.warnings)
    alone = permissions_of({"can_get_pods": True, "can_get_logs": None, "can_get_events": False})
    assert alone.complaints() == (
        "too few rights in the cluster: it cannot read events",
        "whether logs can be read is not known",
    )
    assert Permissions(can_get_pods=True, can_get_logs=True, can_get_events=True).complaints() == ()


def test_rights_that_are_not_mentioned_are_not_there() -> None:
    assert read_permissions(b"{}")[0].lacking == ("pods", "logs", "events")


def test_where_the_file_and_the_cluster_differ_is_told_as_far_as_both_know() -> None:
    written = {**FULL, "cluster_name": "prod-us", "can_get_pods": False, "can_get_logs": None, "can_get_nodes": True}
    probed = {**FULL, "validated_at": "x", "can_get_nodes": None, "can_get_secrets": True, "warnings": []}
    del written["can_get_secrets"]

    differing = differences(permissions_of(written), written, permissions_of(probed))

    assert differing == (
        "cluster_name is `prod-us` in the file and `prod-eu` in the cluster",
        "can_get_pods is false in the file and true in the cluster",
    )
    says = f"probed\n\nThat is what the cluster answers, and it holds. {FILE} says this:\n"
    assert both_texts("probed", "stated", ["a", "b"]) == f"{says}They differ: a; b.\nstated"
    assert both_texts("probed", "stated", []) == f"{says}stated"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"yes", "incident_cluster_permissions.json is not JSON", id="no JSON"),
        pytest.param(b'{"can_get_pods": 1}', "`can_get_pods` of .* is not true or false", id="a number for a right"),
        pytest.param(b'{"cluster_name": true}', "`cluster_name` of .* is not text", id="a right for a name"),
        pytest.param(b'{"warnings": [1]}', "`warnings` of .* is not a list of texts", id="numbers for warnings"),
        pytest.param(b'{"can_get_pods": true, "can_get_pods": false}', "twice in one object", id="a right twice"),
    ],
)
def test_what_is_not_in_its_form_is_an_error_in_words(content: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_permissions(content)
