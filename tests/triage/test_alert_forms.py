"""What each alerting service posts becomes an incident; bodies as its public documentation has them."""

from __future__ import annotations

import copy
import json
import random
from functools import reduce
from typing import Any

import pytest

from runner.triage.alert import IncidentMetadata, incident_of, misnamed
from runner.triage.strict_json import read_object, written
from tests.triage.test_alert import message_of

MADE = IncidentMetadata("an-id", "2026-11-21T03:00:00Z")
POD = {"apiVersion": "v1", "kind": "Pod", "name": "checkout-7c9d-8wm2t", "namespace": "payments"}
DEPLOYMENT = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "checkout", "namespace": "payments"}

MESSAGES = ("grafana", "pagerduty", "pagerduty-event", "opsgenie", "datadog")
GRAFANA, PAGERDUTY, PAGERDUTY_EVENT, OPSGENIE, DATADOG = map(message_of, MESSAGES)
RESTARTS = "checkout is crash looping"
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # the message, its incident, and what makes it resolved
    "grafana": (
        GRAFANA,
        {
            "faultId": "c6eadffa33fcdf37",
            "resource": POD,
            "faultType": "High memory usage",
            "context": "Memory is high.\n[ metric='' labels={} value=14151.3 ]",
            "timestamp": "2026-11-21T02:51:03+02:00",
            "triggeringEventId": "{}:{}",
        },
        {**GRAFANA, "alerts": [{**GRAFANA["alerts"][0], "status": "resolved"}]},
    ),
    "pagerduty": (
        PAGERDUTY,
        {
            "faultId": "d3640fbd41094207a1c11e58e46b1662",
            "resource": DEPLOYMENT,
            "faultType": RESTARTS,
            "severity": "P1",
            "context": f"{RESTARTS}\nLabels:\n - namespace = payments\n - deployment = checkout\n\n"
            "PagerDuty service API Service\nhttps://acme.pagerduty.com/incidents/PGR0VU2",
            "timestamp": "2026-11-21T02:51:09Z",
            "triggeringEventId": "5ac64822-4adc-4fda-ade0-410becf0de4f",
        },
        {"event": {**PAGERDUTY["event"], "event_type": "incident.resolved"}},
    ),
    "pagerduty event": (
        PAGERDUTY_EVENT,
        {
            "faultId": "checkout/crash",
            "resource": DEPLOYMENT,
            "faultType": "CrashLoopBackOff",
            "severity": "CRITICAL",
            "context": f"{RESTARTS}\nnamespace: payments\ndeployment: checkout\nsource: prod-eu\ncomponent: checkout\n"
            "class: CrashLoopBackOff",
            "timestamp": "2026-11-21T02:51:09Z",
        },
        {**PAGERDUTY_EVENT, "event_action": "resolve", "payload": {}},
    ),
    "opsgenie": (
        OPSGENIE,
        {
            "faultId": "44f717bf-44bd-11c9-44c7-2d0cf1d07b23",
            "resource": POD,
            "faultType": RESTARTS,
            "severity": "P2",
            "context": f"{RESTARTS}\nIt restarts.\npod: checkout-7c9d-8wm2t\nservice: The Shop\nentity checkout",
            "timestamp": "2026-11-21T02:51:09Z",
            "triggeringEventId": "checkout/crash",
        },
        {**OPSGENIE, "action": "Close"},
    ),
    "datadog": (
        DATADOG,
        {
            "faultId": "2468",
            "resource": DEPLOYMENT,
            "faultType": "Restarts are high",
            "context": "[Triggered on {kube_deployment:checkout}] Restarts are high\n%%%\ncheckout restarts\n%%%",
            "timestamp": "2026-11-21T02:51:09Z",
        },
        {**DATADOG, "title": "[Recovered on {kube_deployment:checkout}] Restarts are high"},
    ),
}


@pytest.mark.parametrize("service", FORMS)
def test_a_message_of_each_service_is_an_incident(service: str) -> None:
    message, wanted, _ = FORMS[service]

    incident = incident_of(message, MADE)

    common = {"incidentId": "an-id", "status": "pending", "createdAt": MADE.created, "namespace": "payments"}
    assert incident == {**common, **wanted}
    assert misnamed(incident) is None


GONE = object()


@pytest.mark.parametrize(
    ("service", "changes", "wanted"),
    [
        ("grafana", {"alerts.0.annotations.runbook_url": "r", "alerts.0.annotations.message": "m",
                     "commonAnnotations": {"summary": "s", "description": "d"}},
         {"context": "Memory is high.\nd\nm\nr\n[ metric='' labels={} value=14151.3 ]"}),
        ("grafana", {"commonLabels": {"severity": "high", "pod": "other"}}, {"severity": "HIGH", "resource": POD}),
        ("grafana", {"alerts": [{"status": "x", "labels": {"pod": "other"}}, *GRAFANA["alerts"]]}, {"resource": POD}),
        *(
            ("grafana", {"alerts": [{"labels": {"alertname": f"a{n}"}} for n in range(count + 1)]},
             {"context": f"{count} more: a1, a2, a3, a4, a5, a6, a7, a8, a9, a10{more}"})
            for count, more in ((10, ""), (11, ", ..."))
        ),
        ("grafana", {"alerts.0.status": "pending", "status": "resolved"}, {"faultType": "High memory usage"}),
        ("pagerduty", {"event.data.title": GONE, "event.data.summary": "s", "event.data.service": GONE},
         {"faultType": None, "context": "s\nLabels:\n - namespace = payments\n - deployment = checkout\n\n"
          "https://acme.pagerduty.com/incidents/PGR0VU2"}),
        ("pagerduty", {"event.data": {"incident": PAGERDUTY["event"]["data"]}}, {"faultType": RESTARTS}),
        ("pagerduty", {"event.data.body": GONE, "event.data.custom_details": {"pod": "p", "namespace": "n"}},
         {"resource": {**POD, "name": "p", "namespace": "n"}}),
        ("pagerduty", {"event.data.priority": GONE}, {"severity": "HIGH"}),
        ("pagerduty", {"event.data.incident_key": GONE}, {"faultId": "PGR0VU2"}),
        ("pagerduty", {"event.data.created_at": GONE}, {"timestamp": "2026-11-21T02:51:10Z"}),
        ("pagerduty", {"event.data.service": GONE, "event.data.html_url": GONE, "event.data.body": GONE},
         {"context": RESTARTS}),
        ("pagerduty", {"event.data.status": "resolved"}, None),
        ("pagerduty", {"event.event_type": "service.updated"}, "no message of"),
        ("pagerduty", {"event.data": GONE}, "no message of"),
        ("pagerduty event", {"payload.class": GONE}, {"faultType": RESTARTS}),
        ("pagerduty event", {"payload.group": "shop", "payload.source": GONE},
         {"context": f"{RESTARTS}\nnamespace: payments\ndeployment: checkout\ncomponent: checkout\ngroup: shop\n"
          "class: CrashLoopBackOff"}),
        ("pagerduty event", {"payload": GONE}, "no message of"),
        ("pagerduty event", {"event_action": GONE}, "no message of"),
        ("pagerduty event", {"event_action": "acknowledge", "payload": GONE}, "what to look at"),
        ("opsgenie", {"alert.details.alertname": "a", "alert.entity": GONE},
         {"faultType": "a", "context": f"{RESTARTS}\nIt restarts.\npod: checkout-7c9d-8wm2t\nservice: The Shop\n"
          "alertname: a"}),
        ("opsgenie", {"alert.alertId": GONE}, {"faultId": "checkout/crash"}),
        ("opsgenie", {"alert.alias": GONE, "alert.alertId": GONE}, {"faultId": None, "triggeringEventId": None}),
        ("opsgenie", {"alert.alias": GONE, "alert.tinyId": GONE}, {"triggeringEventId": None}),
        ("opsgenie", {"alert.alertId": GONE, "alert.tinyId": GONE}, {"faultId": "checkout/crash"}),
        ("opsgenie", {"alert.alertId": GONE, "alert.alias": GONE, "alert.tinyId": GONE}, "no message of"),
        ("opsgenie", {"action": GONE}, "no message of"),
        ("opsgenie", {"alert.createdAt": "today"}, {"timestamp": "today"}),
        ("opsgenie", {"action": "Delete"}, None),
        ("datadog", {"title": GONE, "alert_title": "[x] t"}, {"faultType": "t"}),
        ("datadog", {"alert_metric": "m", "link": "l", "alert_status": "s", "text_only_msg": "o", "alert_query": "q",
                     "body": "node = n1"},
         {"faultType": "m", "resource": DEPLOYMENT,
          "context": "[Triggered on {kube_deployment:checkout}] Restarts are high\ns\nnode = n1\no\nq\nl"}),
        ("datadog", {"tags": ["kube_namespace:n", " pod_name: p "], "alert_scope": "kube_node:n1"},
         {"namespace": "n", "resource": {**POD, "name": "p", "namespace": "n"}}),
        ("datadog", {"tags": "namespace:a.b,kube_deployment:x.y"},
         {"namespace": None, "resource": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "x.y"}}),
        ("pagerduty event", {"payload": {"custom_details": {**{f"k{n}": "v" for n in range(20)}, "pod": "p"}}},
         {"resource": {"apiVersion": "v1", "kind": "Pod", "name": "p"},
          "context": "\n".join(f"k{n}: v" for n in range(20))}),
        ("datadog", {"tags": GONE, "body": "It restarts.\ndeployment: web"},
         {"resource": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"}}),
        ("datadog", {"tags": "namespace:n", "alert_scope": "x:y, statefulset:s"},
         {"resource": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "s", "namespace": "n"}}),
        ("datadog", {"priority": "a", "alert_priority": "b", "alert_type": "c"}, {"severity": "A"}),
        ("datadog", {"alert_priority": "b", "alert_type": "c"}, {"severity": "B"}),
        ("datadog", {"alert_type": "c"}, {"severity": "C"}),
        ("datadog", {"id": GONE, "alert_id": 7}, {"faultId": "7", "triggeringEventId": "7"}),
        ("datadog", {"id": 8, "alert_id": True}, {"faultId": "8", "triggeringEventId": None}),
        ("datadog", {"date": GONE, "last_updated": "9" * 14}, {"timestamp": "5138-11-16T09:46:39Z"}),
        ("datadog", {"date": "9" * 15}, {"timestamp": "9" * 15}),
        ("datadog", {"date": "\u0663"}, {"timestamp": "\u0663"}),
        ("datadog", {"alert_transition": "Recovered"}, None),
        ("datadog", {"title": " [closed] x"}, None),
        *(
            ("datadog", {"last_updated": GONE, "event_type": GONE, one: "x"}, {"resource": DEPLOYMENT})
            for one in ("last_updated", "event_type", "alert_transition", "alert_status", "alert_id")
        ),
        ("datadog", {"last_updated": GONE, "event_type": GONE}, "no message of"),
    ],
)  # fmt: skip
def test_what_a_message_lacks_is_taken_from_elsewhere(service: str, changes: dict[str, Any], wanted: Any) -> None:
    message = copy.deepcopy(FORMS[service][0])
    for path, value in changes.items():
        *above, name = path.split(".")
        place = reduce(lambda found, key: found[int(key) if key.isdigit() else key], above, message)
        place.pop(name, None) if value is GONE else place.update({name: value})
    if not isinstance(wanted, dict):
        with pytest.raises(ValueError, match=wanted or "all of it is resolved"):
            incident_of(message, MADE)
    else:
        incident = incident_of(message, MADE)
        assert {name: incident.get(name) for name in wanted} == wanted


@pytest.mark.parametrize("service", FORMS)
def test_what_is_resolved_is_no_incident(service: str) -> None:
    with pytest.raises(ValueError, match="all of it is resolved"):
        incident_of(FORMS[service][2], MADE)


def test_the_key_of_a_pagerduty_event_is_not_taken_over() -> None:
    assert "R0123456789" not in json.dumps(incident_of(PAGERDUTY_EVENT, MADE))


def test_words_that_are_no_names_of_kubernetes_name_nothing() -> None:
    incident = incident_of({**OPSGENIE, "alert": {**OPSGENIE["alert"], "details": {"pod": "--help", "x": "y"}}}, MADE)

    assert incident["resource"] == {"apiVersion": "v1", "kind": "Namespace", "name": "payments"}


HUGE = "x" * 900_000
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    10**300,
    1.5,
    "",
    "\u202e\x00",
    HUGE,
    [],
    [[]] * 50,
    {},
    {"a": {}},
    "a: b\n" * 999,
)


@pytest.mark.parametrize("seed", range(25))
def test_hostile_messages_are_refused_or_bounded_and_never_a_fault_of_ours(seed: int) -> None:
    chance = random.Random(seed)
    for message, _, _ in FORMS.values():
        changed = json.loads(json.dumps(message))
        for _ in range(chance.randint(1, 4)):
            mutate(changed, chance)
        raw = json.dumps(changed).encode()
        raw = raw[: chance.randrange(len(raw))] if chance.random() < 0.2 else raw
        assert len(outcome(raw)) < 200_000


def outcome(raw: bytes) -> str:
    try:
        return written(incident_of(read_object(raw, "it"), MADE))
    except ValueError as error:
        return str(error) * 400  # a line


def mutate(value: Any, chance: random.Random) -> None:
    """Put something odd, or nothing, at some place below."""
    keys = [*value] if isinstance(value, dict) else [*range(len(value))]
    if not keys:
        return
    key = chance.choice(keys)
    if isinstance(value[key], dict | list) and chance.random() < 0.8:
        mutate(value[key], chance)
    elif chance.random() < 0.3:
        del value[key]
    else:
        value[key] = chance.choice(ODD)
