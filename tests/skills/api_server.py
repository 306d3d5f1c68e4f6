"""An API server that holds the objects of one cluster, for recording what the real kubectl makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.http_servers import Handler, serving_http

Object = Mapping[str, Any]

_KINDS = {
    "v1": "Pod Node Namespace Event Service PersistentVolumeClaim PersistentVolume ResourceQuota ServiceAccount",
    "rbac.authorization.k8s.io/v1": "Role RoleBinding ClusterRole ClusterRoleBinding",
    "apps/v1": "Deployment StatefulSet DaemonSet ReplicaSet",
    "batch/v1": "Job CronJob",
    "autoscaling/v2": "HorizontalPodAutoscaler",
    "discovery.k8s.io/v1": "EndpointSlice",
    "networking.k8s.io/v1": "Ingress NetworkPolicy",
    "storage.k8s.io/v1": "StorageClass VolumeAttachment",
    "metrics.k8s.io/v1beta1": "PodMetrics",
    "gateway.networking.k8s.io/v1": "HTTPRoute Gateway",
    "argoproj.io/v1alpha1": "Rollout",
}
_ADDED = {"gateway.networking.k8s.io/v1", "argoproj.io/v1alpha1"}  # served when there is an object of theirs
_CLUSTER_WIDE = {
    "Node",
    "Namespace",
    "PersistentVolume",
    "StorageClass",
    "VolumeAttachment",
    "ClusterRole",
    "ClusterRoleBinding",
}
_PLURALS = {
    "PodMetrics": "pods",
    "Ingress": "ingresses",
    "NetworkPolicy": "networkpolicies",
    "StorageClass": "storageclasses",
}
GROUPS = {kind: group for group, kinds in _KINDS.items() for kind in kinds.split()}


@dataclass(frozen=True)
class Cluster:
    """Objects, what the API server refuses to show (plural names), what ``/readyz`` says, logs by pod.

    ``lacks`` are groups that it does not serve.
    """

    objects: tuple[Object, ...] = ()
    refused: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    logs: Mapping[str, str] = field(default_factory=dict)
    refused_everywhere: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    def serves(self, group: str) -> bool:
        return group not in self.lacks and (group not in _ADDED or any(o["apiVersion"] == group for o in self.objects))


def plural(kind: str) -> str:
    return _PLURALS.get(kind, f"{kind.lower()}s")


@contextmanager
def serving(cluster: Cluster) -> Iterator[str]:
    """The URL of an API server for as long as the block lasts."""

    class Answer(Handler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            code, body = respond(cluster, url.path, {key: one[0] for key, one in parse_qs(url.query).items()})
            raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.tell(raw, code, content_type="text/plain" if isinstance(body, str) else "application/json")

    with serving_http(Answer) as port:
        yield f"http://127.0.0.1:{port}"


def respond(cluster: Cluster, path: str, query: Mapping[str, str]) -> tuple[int, Any]:
    parts = path.strip("/").split("/")
    if path == "/readyz":
        checks = [f"[{'-' if name in cluster.broken else '+'}]{name} {_said(cluster, name)}" for name in _CHECKS]
        text = "\n".join([*checks, f"readyz check {'failed' if cluster.broken else 'passed'}", ""])
        return (500 if cluster.broken else 200), text
    if path == "/api":
        return 200, {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        versions = [
            {"groupVersion": group, "version": group.split("/")[1]}
            for group in _KINDS
            if "/" in group and cluster.serves(group)
        ]
        groups = [
            {"name": one["groupVersion"].split("/")[0], "versions": [one], "preferredVersion": one} for one in versions
        ]
        return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    group = "/".join(parts[1:3]) if parts[0] == "apis" else "v1"
    rest = parts[3:] if parts[0] == "apis" else parts[2:]
    if not cluster.serves(group):
        return 404, _status(404, "NotFound", "the server could not find the requested resource")
    if not rest:
        return 200, _resources(group)
    return _objects(cluster, group, rest, query)


_CHECKS = ("ping", "log", "etcd", "informer-sync", "poststarthook/rbac/bootstrap-roles", "shutdown")


def _said(cluster: Cluster, name: str) -> str:
    return "failed: reason withheld" if name in cluster.broken else "ok"


def _resources(group: str) -> Object:
    found = [
        {"name": plural(kind), "kind": kind, "namespaced": kind not in _CLUSTER_WIDE, "verbs": ["get", "list"]}
        for kind in _KINDS.get(group, "").split()
    ]
    return {"kind": "APIResourceList", "groupVersion": group, "resources": found}


def _objects(cluster: Cluster, group: str, rest: list[str], query: Mapping[str, str]) -> tuple[int, Any]:
    namespace = rest[1] if rest[0] == "namespaces" and len(rest) > 2 else None
    name, *more = rest[2:] if namespace is not None else rest
    wide = "at the cluster scope" if namespace is None else f'in the namespace "{namespace}"'
    if name in cluster.refused or (namespace is None and name in cluster.refused_everywhere):
        who = 'User "system:serviceaccount:triage:reader"'
        api = f'API group "{group.split("/")[0] if "/" in group else ""}"'
        wanted = f'{name} "{more[0]}"' if more else name
        suffix = "" if "/" not in group else f".{group.split('/')[0]}"
        text = f'{name}{suffix} is forbidden: {who} cannot list resource "{wanted}" in {api} {wide}'
        return 403, _status(403, "Forbidden", text)
    if len(more) == 2 and more[1] == "log":
        key = f"{more[0]} previous" if query.get("previous") == "true" else more[0]
        if key not in cluster.logs:
            return 400, _status(400, "BadRequest", f'previous terminated container in pod "{more[0]}" not found')
        return 200, cluster.logs[key]
    kind = next((kind for kind in GROUPS if (plural(kind), GROUPS[kind]) == (name, group)), None)
    if kind is None:
        return 404, _status(404, "NotFound", "the server could not find the requested resource")
    items = [
        one
        for one in cluster.objects
        if one["kind"] == kind and namespace in (None, one["metadata"].get("namespace")) and _selected(one, query)
    ]
    if not more:
        return 200, {"kind": f"{kind}List", "apiVersion": group, "metadata": {"resourceVersion": "1"}, "items": items}
    one = next((one for one in items if one["metadata"]["name"] == more[0]), None)
    if one is None:
        return 404, _status(
            404, "NotFound", f'{name}{"." + group.split("/")[0] if "/" in group else ""} "{more[0]}" not found'
        )
    return 200, one


def _status(code: int, reason: str, message: str) -> Object:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


def _selected(one: Object, query: Mapping[str, str]) -> bool:
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        name, unequal, value = term.partition("!=")
        if not unequal:
            name, _, value = term.partition("=")
        found: Any = one
        for part in name.split("."):
            found = found.get(part, "") if isinstance(found, Mapping) else ""
        if (found == value) is bool(unequal):
            return False
    labels = one["metadata"].get("labels", {})
    return all(
        labels.get(key) == value
        for key, _, value in (t.partition("=") for t in query.get("labelSelector", "").split(",") if t)
    )
