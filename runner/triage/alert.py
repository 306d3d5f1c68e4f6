"""An alert as an incident, in struct form: what Alertmanager posts to a webhook, or the few words of a command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.errors import shown
from runner.ids import is_name, is_object_name

# A label that names an object: its kind, and its API version. The more a label says, the earlier it stands.
_LABELS = {
    "deployment": ("Deployment", "apps/v1"),
    "statefulset": ("StatefulSet", "apps/v1"),
    "daemonset": ("DaemonSet", "apps/v1"),
    "cronjob": ("CronJob", "batch/v1"),
    "job_name": ("Job", "batch/v1"),
    "horizontalpodautoscaler": ("HorizontalPodAutoscaler", "autoscaling/v2"),
    "persistentvolumeclaim": ("PersistentVolumeClaim", "v1"),
    "ingress": ("Ingress", "networking.k8s.io/v1"),
    "pod": ("Pod", "v1"),
    "service": ("Service", "v1"),
    "node": ("Node", "v1"),
    "namespace": ("Namespace", "v1"),
}
# Words of a command line, as kubectl takes them too.
_SHORT = {
    "deploy": "deployment", "sts": "statefulset", "ds": "daemonset", "cj": "cronjob", "job": "job_name",
    "hpa": "horizontalpodautoscaler", "pvc": "persistentvolumeclaim", "ing": "ingress", "po": "pod", "svc": "service",
    "no": "node", "ns": "namespace",
}  # fmt: skip
_NAMESPACE = ("namespace", "exported_namespace", "kubernetes_namespace")
_TEXT = 4096  # characters of a text that is taken over
_KIND = re.compile(r"[A-Za-z][A-Za-z0-9.-]{0,252}")


@dataclass(frozen=True)
class Made:
    """What only the caller knows: the incident's id, the time in RFC 3339, and which cluster, if it was named."""

    id: str
    created: str
    cluster: str = ""


def incident_of_words(resource: str, namespace: str, made: Made) -> dict[str, Any]:
    """The incident of ``KIND/NAME`` in a namespace. Raises ``ValueError`` for another form."""
    kind, _, name = resource.partition("/")
    if not kind or not name or "/" in name or " " in resource or not resource.isprintable():
        raise ValueError("KIND/NAME such as deploy/checkout")
    word = _SHORT.get(kind.lower(), kind.lower())
    known = _LABELS.get(word) or _LABELS.get(word.removesuffix("s"))
    version = {"apiVersion": known[1]} if known else {}
    found = {**version, "kind": known[0] if known else kind, "name": name, "namespace": namespace}
    return _incident(made, namespace=namespace, resource=found)


def incident_of(document: Mapping[str, Any], made: Made) -> dict[str, Any]:
    """The incident of an alert: of a webhook's message the first alert that fires, else a single alert.

    Raises ``ValueError`` for a document that is neither, for what has been resolved, and where there is nothing to look
    at.
    """
    alerts = [alert for alert in _list(document.get("alerts")) if isinstance(alert, Mapping)]
    if not alerts and not isinstance(document.get("labels"), Mapping):
        raise ValueError("no Alertmanager message with `alerts`, no alert with `labels`, and no incident.json")
    known = [alert for alert in alerts or [document] if alert.get("status", document.get("status")) != "resolved"]
    if not known:
        raise ValueError("all of it is resolved")
    firing = [alert for alert in known if alert.get("status") == "firing"] or known
    first = firing[0]
    labels = {**_texts(document.get("commonLabels")), **_texts(first.get("labels"))}
    notes = {**_texts(document.get("commonAnnotations")), **_texts(first.get("annotations"))}
    namespace = next((labels[name] for name in _NAMESPACE if labels.get(name)), "")
    told = [notes.get(name, "") for name in ("summary", "description", "message", "runbook_url")]
    others = [_texts(alert.get("labels")).get("alertname", "an alert") for alert in firing[1:]]
    if others:
        told.append(f"{len(others)} more: {', '.join(dict.fromkeys(others))}")
    incident = _incident(
        made,
        faultId=_text(first.get("fingerprint")),
        cluster=made.cluster or labels.get("cluster", ""),
        namespace=namespace,
        resource=_resource(labels, namespace),
        faultType=labels.get("reason") or labels.get("alertname", ""),
        severity=labels.get("severity", "").upper(),
        context="\n".join(dict.fromkeys(filter(None, told))),
        timestamp=_text(first.get("startsAt")),
        triggeringEventId=_text(document.get("groupKey")),
    )
    if not {"namespace", "resource", "faultType", "context"} & {*incident}:
        raise ValueError("no label and no annotation says what to look at")
    return incident


def misnamed(incident: Mapping[str, Any]) -> str | None:
    """What of an incident's names can not be one of Kubernetes, if any: commands get them as arguments."""
    resource = incident.get("resource")
    if isinstance(resource, str):
        resource = {"name": resource.rpartition("/")[2]}
    named = resource if isinstance(resource, Mapping) else {}
    kind, name, within = (_text(named.get(key)) for key in ("kind", "name", "namespace"))
    for what, text, fits in (
        ("namespace", _text(incident.get("namespace")), is_name),
        ("namespace", within, is_name),
        ("kind", kind, _KIND.fullmatch),
        ("name", name, is_object_name),
    ):
        if text and not fits(text):
            return f"`{shown(text)}` is no {what} of Kubernetes"
    return None


def same_incident(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two documents tell of the same, whenever they were written and whatever has become of it."""
    own = ("incidentId", "createdAt", "status", "startedAt", "completedAt", "exitCode", "failureReason", "logPaths")
    return {k: v for k, v in one.items() if k not in own} == {k: v for k, v in other.items() if k not in own}


def _incident(made: Made, **told: object) -> dict[str, Any]:
    """The struct form; what nobody told is left out."""
    incident = {"incidentId": made.id, "status": "pending", "createdAt": made.created, "cluster": made.cluster, **told}
    return {name: value for name, value in incident.items() if value}


def _resource(labels: Mapping[str, str], namespace: str) -> dict[str, str]:
    for label, (kind, version) in _LABELS.items():
        if labels.get(label) and label not in ("service", "namespace"):
            found = {"apiVersion": version, "kind": kind, "name": labels[label]}
            return {**found, "namespace": namespace} if namespace and kind != "Node" else found
    for label in ("service", "namespace"):  # often those of what has measured, or of something else altogether
        if is_object_name(labels.get(label, "")):
            kind, version = _LABELS[label]
            return {"apiVersion": version, "kind": kind, "name": labels[label]}
    return {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _texts(value: object) -> dict[str, str]:
    return {str(k): v[:_TEXT] for k, v in value.items() if isinstance(v, str)} if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    return value[:_TEXT] if isinstance(value, str) else ""
