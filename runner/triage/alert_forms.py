"""Messages of alerting services, recognised by their shape and read into one form. Pure; nothing in them is trusted.

Alertmanager's webhook, which Grafana uses too; PagerDuty's webhook (v3) and event (v2); Opsgenie's webhook; Datadog's
webhook with its default body, and with the variables that people add to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from time import gmtime, strftime

from runner.core.ids import is_name, is_object_name

SERVICES = "Alertmanager, Grafana, PagerDuty, Opsgenie or Datadog"

_TEXT = 4096  # characters of a text that is taken over
_MOST = 10  # further alerts that are named
_LINE = re.compile(r"^[ \t]*(?:- ?)?([A-Za-z_][\w.]{0,62}) ?[=:] ?(\S{1,253})[ \t]*$", re.MULTILINE)
_RESOLVED = re.compile(r"\s*\[(resolved|recovered|closed)\b", re.IGNORECASE)
_ALIASES = {  # labels and tags of other names
    "kube_namespace": "namespace", "kube_deployment": "deployment", "kube_stateful_set": "statefulset",
    "kube_daemon_set": "daemonset", "kube_cronjob": "cronjob", "kube_job": "job_name", "pod_name": "pod",
    "kube_service": "service", "kube_node": "node", "kube_cluster_name": "cluster", "cluster_name": "cluster",
}  # fmt: skip


@dataclass(frozen=True)
class Alert:
    """One alert. ``labels`` name objects as Prometheus' do; ``told`` are its texts, the most important first."""

    labels: Mapping[str, str] = field(default_factory=dict)
    told: tuple[str, ...] = ()
    kind: str = ""
    severity: str = ""
    id: str = ""
    since: str = ""
    event: str = ""
    resolved: bool = False


def alert_of(document: Mapping[str, object]) -> Alert | None:
    """Return the alert in a message; ``None`` for a message of no known service."""
    return next((alert for form in _FORMS if (alert := form(document)) is not None), None)


def _of_alertmanager(document: Mapping[str, object]) -> Alert | None:
    """Read the first firing alert of a webhook's message, or a single one."""
    alerts = [alert for alert in items(document.get("alerts")) if isinstance(alert, Mapping)]
    if not alerts and not isinstance(document.get("labels"), Mapping):
        return None
    known = [alert for alert in alerts or [document] if alert.get("status", document.get("status")) != "resolved"]
    if not known:
        return Alert(resolved=True)
    firing = [alert for alert in known if alert.get("status") == "firing"] or known
    first = firing[0]
    labels = {**texts(document.get("commonLabels")), **texts(first.get("labels"))}
    notes = {**texts(document.get("commonAnnotations")), **texts(first.get("annotations"))}
    told = [notes.get(name, "") for name in ("summary", "description", "message", "runbook_url")]
    told.append(text(first.get("valueString")))  # Grafana's, of what it has measured
    names = dict.fromkeys(texts(alert.get("labels")).get("alertname", "an alert") for alert in firing[1:])
    if names:
        more = ", ".join([*names][:_MOST]) + (", ..." if len(names) > _MOST else "")
        told.append(f"{len(firing) - 1} more: {more}")
    return Alert(
        labels=labels,
        told=tuple(told),
        kind=labels.get("reason") or labels.get("alertname", ""),
        severity=labels.get("severity", ""),
        id=text(first.get("fingerprint")),
        since=text(first.get("startsAt")),
        event=text(document.get("groupKey")),
    )


def _of_pagerduty(document: Mapping[str, object]) -> Alert | None:
    """Read a webhook of version 3. It describes an incident in words, at best with labels in them."""
    event = mapping(document.get("event"))
    data = mapping(event.get("data"))
    if not text(event.get("event_type")).startswith("incident.") or not data:
        return None
    incident = mapping(data.get("incident")) or data  # of a note, an answer, and the like
    details = mapping(mapping(incident.get("body")).get("details")) or mapping(incident.get("custom_details"))
    words = [text(incident.get("title")) or text(incident.get("summary")), *_values(details)]
    service = text(mapping(incident.get("service")).get("summary"))
    return Alert(
        labels=_labels((details, *words)),
        told=(*words, f"PagerDuty service {service}" if service else "", text(incident.get("html_url"))),
        kind=text(incident.get("title")),
        severity=text(mapping(incident.get("priority")).get("summary")) or text(incident.get("urgency")),
        id=text(incident.get("incident_key")) or text(incident.get("id")),
        since=text(incident.get("created_at")) or text(event.get("occurred_at")),
        event=text(event.get("id")),
        resolved="resolved" in (text(incident.get("status")), text(event.get("event_type"))[len("incident.") :]),
    )


def _of_pagerduty_event(document: Mapping[str, object]) -> Alert | None:
    """Read an event as sent to PagerDuty. Its ``routing_key`` is a secret, and is left out."""
    payload = mapping(document.get("payload"))
    if not text(document.get("event_action")) or (not payload and document["event_action"] == "trigger"):
        return None
    details = mapping(payload.get("custom_details"))
    own = {name: text(payload.get(name)) for name in ("source", "component", "group", "class")}
    words = (text(payload.get("summary")), *_values(details), *(f"{name}: {own[name]}" for name in own if own[name]))
    return Alert(
        labels=_labels((details, *words)),
        told=words,
        kind=own["class"] or text(payload.get("summary")),
        severity=text(payload.get("severity")),
        id=text(document.get("dedup_key")),
        since=text(payload.get("timestamp")),
        resolved=document["event_action"] == "resolve",
    )


def _of_opsgenie(document: Mapping[str, object]) -> Alert | None:
    alert = mapping(document.get("alert"))
    action = text(document.get("action"))
    if not action or not {"alertId", "tinyId", "alias"} & {*alert}:
        return None
    details, tags = mapping(alert.get("details")), [text(tag) for tag in items(alert.get("tags"))]
    words = (text(alert.get("message")), text(alert.get("description")), *_values(details))
    return Alert(
        labels=_labels((details, *words, *tags)),
        told=(*words, f"entity {text(alert.get('entity'))}" if text(alert.get("entity")) else ""),
        kind=texts(details).get("alertname") or text(alert.get("message")),
        severity=text(alert.get("priority")),
        id=text(alert.get("alertId")) or text(alert.get("alias")),
        since=_moment(alert.get("createdAt")),
        event=text(alert.get("alias")),
        resolved=action in ("Close", "Delete"),
    )


def _of_datadog(document: Mapping[str, object]) -> Alert | None:
    """Read title, text, date and author of the default body, and what people add to it."""
    title = text(document.get("title")) or text(document.get("alert_title"))
    own = {"last_updated", "event_type", "alert_transition", "alert_status", "alert_id"} & {*document}
    if not title or not own:
        return None
    told = [title, *(text(document.get(name)) for name in ("alert_status", "body", "text_only_msg", "alert_query"))]
    tags = [tag for name in ("tags", "alert_scope") for tag in _tags(document.get(name))]
    moment = document.get("date") if document.get("date") else document.get("last_updated")
    return Alert(
        labels=_labels([*tags, text(document.get("body"))]),
        told=(*told, text(document.get("link"))),
        kind=text(document.get("alert_metric")) or re.sub(r"^\s*\[[^\]]*\]\s*", "", title),
        severity=text(document.get("priority"))
        or text(document.get("alert_priority"))
        or text(document.get("alert_type")),
        id=_plain(document.get("id")) or _plain(document.get("alert_id")),
        since=_moment(moment),
        event=_plain(document.get("alert_id")),
        resolved=text(document.get("alert_transition")) == "Recovered" or _RESOLVED.match(title) is not None,
    )


_FORMS: tuple[Callable[[Mapping[str, object]], Alert | None], ...] = (
    _of_alertmanager,
    _of_pagerduty,
    _of_pagerduty_event,
    _of_opsgenie,
    _of_datadog,
)


def _labels(sources: Iterable[Mapping[str, object] | str]) -> dict[str, str]:
    """Read mappings and lines such as ``pod: x`` and ``pod=x``.

    Only values that can be names in Kubernetes count, since these services use the same keys for other things.
    """
    found: dict[str, str] = {}
    for source in sources:
        pairs = _LINE.findall(source) if isinstance(source, str) else texts(source).items()
        for name, value in pairs:
            known = _ALIASES.get(name.lower(), name.lower())
            if (is_name if "namespace" in known else is_object_name)(value):
                found.setdefault(known, value)
    return found


def _values(details: Mapping[str, object]) -> tuple[str, ...]:
    """Return the texts of details, each behind its name unless it has several lines."""
    named = texts(details).items()
    return tuple(value if "\n" in value else f"{name}: {value}" for name, value in named if value)[: 2 * _MOST]


def _tags(value: object) -> list[str]:
    """Return tags, from a list or a text with commas."""
    parts = value.split(",") if isinstance(value, str) else map(text, items(value))
    return [part.strip() for part in parts]


def _moment(value: object) -> str:
    """Return a time as text; a number, or its digits, is milliseconds since the epoch."""
    digits = _plain(value)
    if not digits.isascii() or not digits.isdigit() or len(digits) > 14:
        return text(value)
    return strftime("%Y-%m-%dT%H:%M:%SZ", gmtime(int(digits) / 1000))


def _plain(value: object) -> str:
    """Return a text, or a whole number as text."""
    return str(value)[:_TEXT] if isinstance(value, int) and not isinstance(value, bool) else text(value)


def mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def items(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def texts(value: object) -> dict[str, str]:
    return {str(k): v[:_TEXT] for k, v in mapping(value).items() if isinstance(v, str)}


def text(value: object) -> str:
    return value[:_TEXT] if isinstance(value, str) else ""
