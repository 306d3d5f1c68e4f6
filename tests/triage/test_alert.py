"""Alerts and words of a command line become incidents in struct form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.triage.alert import IncidentMetadata, incident_of, incident_of_words, misnamed, same_incident

ALERTS = Path(__file__).parents[1] / "cases" / "alerts"
MADE = IncidentMetadata("an-id", "2026-11-21T03:00:00Z", "prod-eu")


def message_of(service: str) -> dict[str, Any]:
    """What an alerting service posts, as its public documentation has it."""
    found: dict[str, Any] = json.loads((ALERTS / f"{service}.json").read_text())
    return found


MESSAGE = message_of("alertmanager")


def test_a_webhook_message_is_the_incident_of_its_first_firing_alert() -> None:
    assert incident_of(MESSAGE, MADE) == {
        "incidentId": "an-id",
        "status": "pending",
        "createdAt": "2026-11-21T03:00:00Z",
        "cluster": "prod-eu",
        "faultId": "c7f9e2b04d6a1835",
        "namespace": "payments",
        "resource": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "checkout", "namespace": "payments"},
        "faultType": "CrashLoopBackOff",
        "severity": "CRITICAL",
        "context": "Pod is crash looping.\ncheckout restarts.\n1 more: KubeDeploymentReplicasMismatch",
        "timestamp": "2026-11-21T02:51:09Z",
        "triggeringEventId": '{}:{alertname="KubePodCrashLooping"}',
    }


@pytest.mark.parametrize(
    ("labels", "resource"),
    [
        ({"node": "n1", "namespace": "kube-system"}, {"apiVersion": "v1", "kind": "Node", "name": "n1"}),
        ({"service": "web", "job": "x"}, {"apiVersion": "v1", "kind": "Service", "name": "web"}),
        ({"service": "the Web", "namespace": "n"}, {"apiVersion": "v1", "kind": "Namespace", "name": "n"}),
        ({"job_name": "nightly"}, {"apiVersion": "batch/v1", "kind": "Job", "name": "nightly"}),
        ({"alertname": "Watchdog"}, None),
    ],
    ids=["node", "service", "service of another kind", "job", "nothing"],
)
def test_a_single_alert_names_what_its_labels_do(labels: dict[str, str], resource: object) -> None:
    assert incident_of({"labels": labels}, MADE).get("resource") == resource


def test_a_cluster_that_was_not_named_is_the_alert_s() -> None:
    alert = {"labels": {"cluster": "prod-us"}, "annotations": {"summary": "slow"}}

    found = {name: incident_of(alert, replace(MADE, cluster=name))["cluster"] for name in ("", "prod-eu")}

    assert found == {"": "prod-us", "prod-eu": "prod-eu"}


@pytest.mark.parametrize(
    "odd",
    [{}, {"alerts": []}, {"alerts": "x"}, {"alerts": [1, None]}, {"labels": []}],
    ids=["empty", "no alert", "text", "no objects", "list"],
)
def test_what_is_no_alert_is_refused(odd: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Alertmanager"):
        incident_of(odd, MADE)


def test_values_that_are_no_text_and_endless_ones_do_no_harm() -> None:
    made = incident_of({"labels": {"pod": 7, "namespace": "x" * 10_000, "severity": None}, "startsAt": {}}, MADE)

    assert made == {
        "incidentId": "an-id",
        "status": "pending",
        "createdAt": MADE.created,
        "cluster": "prod-eu",
        "namespace": "x" * 4096,
    }


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"alerts": [{"status": "resolved", "labels": {"pod": "p"}}]}, "all of it is resolved"),
        ({"status": "resolved", "alerts": [{"labels": {"pod": "p"}}]}, "all of it is resolved"),
        ({"status": "resolved", "labels": {"pod": "p"}}, "all of it is resolved"),
        ({"alerts": [{"labels": {}}]}, "what to look at"),
        ({"alerts": [{}], "commonLabels": {"severity": "critical"}}, "what to look at"),
    ],
    ids=["resolved", "resolved as a whole", "one that is resolved", "no labels", "a label that names nothing"],
)
def test_an_alert_with_nothing_to_look_into_is_refused(message: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        incident_of(message, MADE)


@pytest.mark.parametrize(
    ("incident", "words"),
    [
        ({"namespace": "-A"}, "`-A` is not a Kubernetes namespace"),
        ({"namespace": "P_ X"}, "`P_ X` is not a Kubernetes namespace"),
        ({"namespace": "x" * 64}, "is not a Kubernetes namespace"),
        ({"resource": {"kind": "Pod", "name": "--help; touch x"}}, "`--help; touch x` is not a Kubernetes name"),
        ({"resource": {"kind": "Pod", "name": "x" * 254}}, "is not a Kubernetes name"),
        ({"resource": {"kind": "--raw", "name": "x"}}, "`--raw` is not a Kubernetes kind"),
        ({"resource": {"name": "x", "namespace": "a.b"}}, "`a.b` is not a Kubernetes namespace"),
        ({"resource": "Pod/--help"}, "`--help` is not a Kubernetes name"),
        ({"resource": "v1/Pod/--help"}, "`--help` is not a Kubernetes name"),
    ],
)
def test_what_can_be_no_name_in_a_cluster_is_told(incident: dict[str, Any], words: str) -> None:
    assert words in (misnamed(incident) or "")


def test_names_of_a_cluster_are_fine() -> None:
    pod = {"kind": "widgets.acme.io", "name": "checkout-7c9d64bf5b-8wm2t.v1", "namespace": "n"}

    assert misnamed({"namespace": "payments", "resource": pod}) is None
    assert misnamed({"resource": "Deployment/checkout"}) is None
    assert misnamed({"namespace": None, "resource": 7}) is None


@pytest.mark.parametrize(
    ("words", "kind", "version"),
    [
        ("deploy/checkout", "Deployment", "apps/v1"),
        ("pods/checkout", "Pod", "v1"),
        ("STS/checkout", "StatefulSet", "apps/v1"),
        ("ingress/checkout", "Ingress", "networking.k8s.io/v1"),
        ("widgets.acme.io/checkout", "widgets.acme.io", None),
    ],
)
def test_words_name_an_object_as_kubectl_takes_them(words: str, kind: str, version: str | None) -> None:
    incident = incident_of_words(words, "payments", MADE)

    api = {"apiVersion": version} if version else {}
    assert incident["resource"] == {**api, "kind": kind, "name": "checkout", "namespace": "payments"}
    assert (incident["namespace"], incident["incidentId"]) == ("payments", "an-id")


@pytest.mark.parametrize("words", ["checkout", "/x", "deploy/", "deploy/a/b", "deploy/a b", "deploy/a\x1b[2J"])
def test_other_words_are_refused(words: str) -> None:
    with pytest.raises(ValueError, match="KIND/NAME"):
        incident_of_words(words, "payments", MADE)


def test_an_incident_stays_the_same_whatever_becomes_of_it() -> None:
    one = incident_of(MESSAGE, MADE)

    fields = ["incidentId", "createdAt", "status", "startedAt", "completedAt", "exitCode", "failureReason", "logPaths"]
    assert same_incident(one, {**one, **dict.fromkeys(fields, "other")})
    assert not same_incident(one, {**one, "namespace": "other"})
