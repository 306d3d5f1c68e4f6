"""Alerts as incidents in struct form, from the message of an alerting service or the words of a command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.core.ids import is_name, is_object_name
from runner.core.sanitize import excerpt
from runner.triage.alert_forms import SERVICES as SERVICES
from runner.triage.alert_forms import alert_of, text

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
_CONTEXT = 16_384  # characters of all that an alert says
_KIND = re.compile(r"[A-Za-z][A-Za-z0-9.-]{0,252}")


@dataclass(frozen=True)
class IncidentMetadata:
    """Facts that only the caller has: the incident's id, the time in RFC 3339, and the cluster if it was named."""

    id: str
    created: str
    cluster: str = ""


def incident_of_words(resource: str, namespace: str, made: IncidentMetadata) -> dict[str, Any]:
    """Return the incident of ``KIND/NAME`` in a namespace. Raises ``ValueError`` for another form."""
    kind, _, name = resource.partition("/")
    if not kind or not name or "/" in name or " " in resource or not resource.isprintable():
        raise ValueError("KIND/NAME such as deploy/checkout")
    word = _SHORT.get(kind.lower(), kind.lower())
    known = _LABELS.get(word) or _LABELS.get(word.removesuffix("s"))
    version = {"apiVersion": known[1]} if known else {}
    found = {**version, "kind": known[0] if known else kind, "name": name, "namespace": namespace}
    return _incident(made, namespace=namespace, resource=found)


def incident_of(document: Mapping[str, Any], made: IncidentMetadata) -> dict[str, Any]:
    """Return the incident in the message of an alerting service, or in a single alert.

    Raises ``ValueError`` for any other document, for a resolved alert, and where there is nothing to look at.
    """
    alert = alert_of(document)
    if alert is None:
        raise ValueError(f"no message of {SERVICES}, no alert with `labels`, and no incident.json")
    if alert.resolved:
        raise ValueError("all of it is resolved")
    namespace = next((alert.labels[name] for name in _NAMESPACE if alert.labels.get(name)), "")
    incident = _incident(
        made,
        faultId=alert.id,
        cluster=made.cluster or alert.labels.get("cluster"),
        namespace=namespace,
        resource=_resource(alert.labels, namespace),
        faultType=alert.kind,
        severity=alert.severity.upper(),
        context="\n".join(dict.fromkeys(filter(None, alert.told)))[:_CONTEXT],
        timestamp=alert.since,
        triggeringEventId=alert.event,
    )
    if not {"namespace", "resource", "faultType", "context"} & {*incident}:
        raise ValueError("no label and no annotation says what to look at")
    return incident


def misnamed(incident: Mapping[str, Any]) -> str | None:
    """Say which of an incident's names is invalid in Kubernetes, if any: commands get them as arguments."""
    resource = incident.get("resource")
    if isinstance(resource, str):
        resource = {"name": resource.rpartition("/")[2]}
    named = resource if isinstance(resource, Mapping) else {}
    kind, name, within = (text(named.get(key)) for key in ("kind", "name", "namespace"))
    for what, word, fits in (
        ("namespace", text(incident.get("namespace")), is_name),
        ("namespace", within, is_name),
        ("kind", kind, _KIND.fullmatch),
        ("name", name, is_object_name),
    ):
        if word and not fits(word):
            return f"`{excerpt(word)}` is not a Kubernetes {what}"
    return None


def same_incident(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Tell whether two documents describe the same incident, whenever written and however it went on."""
    own = ("incidentId", "createdAt", "status", "startedAt", "completedAt", "exitCode", "failureReason", "logPaths")
    return {k: v for k, v in one.items() if k not in own} == {k: v for k, v in other.items() if k not in own}


def _incident(made: IncidentMetadata, **told: object) -> dict[str, Any]:
    """Return the struct form, without unknown fields."""
    incident = {"incidentId": made.id, "status": "pending", "createdAt": made.created, "cluster": made.cluster, **told}
    return {name: value for name, value in incident.items() if value}


def _resource(labels: Mapping[str, str], namespace: str) -> dict[str, str]:
    for label, (kind, version) in _LABELS.items():
        if labels.get(label) and label not in ("service", "namespace"):
            found = {"apiVersion": version, "kind": kind, "name": labels[label]}
            return {**found, "namespace": namespace} if namespace and kind != "Node" else found
    for label in ("service", "namespace"):  # often those of what has measured, or of something else altogether
        if (name := labels.get(label)) and is_object_name(name):
            kind, version = _LABELS[label]
            return {"apiVersion": version, "kind": kind, "name": name}
    return {}
