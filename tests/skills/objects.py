"""Kubernetes objects in few words, as the API server holds them at ``NOW``."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.skills.api_server import GROUPS, Object

NOW = datetime(2026, 11, 21, 2, 52, tzinfo=UTC)
_NOTHING: Mapping[str, Any] = {}


def ago(minutes: float) -> str:
    return (NOW - timedelta(minutes=minutes)).strftime("%Y-%m-%dT%H:%M:%SZ")


def thing(kind: str, name: str, ns: str | None = "payments", *, old: float = 600, **parts: Any) -> Object:
    metadata = {"name": name, "creationTimestamp": ago(old), "uid": f"uid-{name}", **parts.pop("metadata", {})}
    if ns is not None:
        metadata["namespace"] = ns
    return {"apiVersion": GROUPS[kind], "kind": kind, "metadata": metadata, **parts}


def condition(type: str, status: str, reason: str = "", message: str = "", minutes: float = 10) -> Object:
    return {"type": type, "status": status, "reason": reason, "message": message, "lastTransitionTime": ago(minutes)}


def waiting(reason: str, message: str = "") -> Object:
    return {"waiting": {"reason": reason, "message": message}}


def terminated(code: int, reason: str = "Error", minutes: float = 2) -> Object:
    return {
        "terminated": {"exitCode": code, "reason": reason, "startedAt": ago(minutes + 1), "finishedAt": ago(minutes)}
    }


def running(minutes: float = 12) -> Object:
    return {"running": {"startedAt": ago(minutes)}}


RUNNING: Object = {"running": {"startedAt": ago(12)}}


def _container(image: str, cpu: str | None) -> Object:
    limits = {"memory": "256Mi"} | ({"cpu": cpu} if cpu is not None else {})
    return {
        "name": "app",
        "image": image,
        "resources": {"limits": limits, "requests": {"memory": "128Mi"}},
        "ports": [{"containerPort": 8080, "name": "http"}],
        "env": [{"name": "DB_PASSWORD", "value": "hunter2"}, {"name": "GREETING", "value": "of-the-environment"}],
        "args": ["--key", "of-the-environment"],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 5},
    }


def pod(
    name: str,
    ns: str = "payments",
    *,
    owner: str = "",
    node: str | None = "node-a",
    phase: str = "Running",
    state: Object = RUNNING,
    last: Object = _NOTHING,
    restarts: int = 0,
    ready: bool = False,
    labels: Mapping[str, str] = _NOTHING,
    init: Object | None = None,
    status: Mapping[str, Any] = _NOTHING,
    conditions: tuple[Object, ...] = (),
    deleted: float | None = None,
    image: str = "registry.example.com/payments/checkout:4.18.2",
    claimed: str | None = None,
    old: float = 13,
    cpu: str | None = None,
    init_named: str = "migrate",
    init_last: Object | None = None,
    sidecar: bool = False,
    others: tuple[str, ...] = (),
) -> Object:
    kind, _, owned_by = owner.partition("/")
    metadata: dict[str, Any] = {"labels": dict(labels)}
    if owner:
        metadata["ownerReferences"] = [{"apiVersion": GROUPS[kind], "kind": kind, "name": owned_by, "controller": True}]
    if deleted is not None:
        metadata |= {"deletionTimestamp": ago(deleted), "deletionGracePeriodSeconds": 30}
    box = _container(image, cpu)
    run = {"name": "app", "image": image, "imageID": "", "ready": ready, "restartCount": restarts, "state": state}
    given: dict[str, Any] = {"phase": phase, "conditions": list(conditions), **status}
    if node is not None and "reason" not in status:
        given["containerStatuses"] = [run | {"lastState": last}, *(run | {"name": one} for one in others)]
        given["conditions"] += [condition("Ready", str(ready), minutes=9)]
    if init is not None:
        given["initContainerStatuses"] = [
            run | {"name": init_named, "state": init, "lastState": terminated(1) if init_last is None else init_last}
        ]
    spec: dict[str, Any] = {
        "containers": [box, *(box | {"name": one} for one in others)],
        "serviceAccountName": "default",
    }
    if node:
        spec["nodeName"] = node
    if init is not None and (sidecar or init_named != "migrate"):
        spec["initContainers"] = [box | {"name": init_named} | ({"restartPolicy": "Always"} if sidecar else {})]
    if claimed is not None:
        spec["volumes"] = [{"name": "data", "persistentVolumeClaim": {"claimName": claimed}}]
    return thing("Pod", name, ns, old=old, metadata=metadata, spec=spec, status=given)


def event(
    on: str, reason: str, message: str, ns: str = "payments", *, count: int = 3, minutes: float = 1, id: str = ""
) -> Object:
    kind, _, name = on.partition("/")
    at = {"firstTimestamp": ago(minutes + 9), "lastTimestamp": ago(minutes), "eventTime": None}
    about = {"kind": kind, "name": name, "namespace": ns, "uid": f"uid-{name}"}
    body: dict[str, Any] = {
        "type": "Warning",
        "reason": reason,
        "message": message,
        "count": count,
        **at,
        "involvedObject": about,
    }
    return thing("Event", f"{name}.{reason.lower()}{id}", ns, **body)


def node(name: str = "node-a", *conditions: Object, cordoned: bool = False) -> Object:
    given = conditions or (condition("Ready", "True", "KubeletReady", "kubelet is posting ready status", 9000),)
    return thing(
        "Node",
        name,
        None,
        old=9000,
        spec={"unschedulable": True} if cordoned else {},
        status={
            "conditions": list(given),
            "nodeInfo": {"kubeletVersion": "v1.31.4"},
            "allocatable": {"cpu": "3920m", "memory": "14963Mi", "pods": "110"},
        },
    )


def deployment(
    name: str = "checkout",
    ns: str = "payments",
    *,
    wanted: int = 3,
    ready: int = 3,
    conditions: tuple[Object, ...] = (),
    **more: Any,
) -> Object:
    status = {"replicas": wanted, "readyReplicas": ready, "updatedReplicas": wanted, "conditions": list(conditions)}
    labels = {"matchLabels": {"app": name}}
    return thing("Deployment", name, ns, spec={"replicas": wanted, "selector": labels, **more}, status=status)


def replica_set(
    name: str,
    revision: int,
    *,
    wanted: int,
    image: str,
    memory: str,
    ready: int = 0,
    old: float = 600,
    by: str = "Deployment",
) -> Object:
    secret = f"hunter2-{revision}"
    header = {"name": "Authorization", "value": secret}
    probe = {"httpGet": {"path": "/healthz", "port": 8080, "httpHeaders": [header]}, "periodSeconds": revision % 100}
    box = {
        "name": "app",
        "image": image,
        "resources": {"limits": {"memory": memory}},
        "env": [{"name": "DB_PASSWORD", "value": secret}, {"name": "REGION", "value": "eu"}],
        "livenessProbe": probe,
    }
    mounted = [{"name": "settings", "configMap": {"name": f"settings-{revision}"}}]
    owner = name.rpartition("-")[0]
    return thing(
        "ReplicaSet",
        name,
        old=old,
        metadata={
            "labels": {"app": owner},
            "annotations": {
                f"{'deployment.kubernetes' if by == 'Deployment' else 'rollout.argoproj'}.io/revision": str(revision)
            },
            "ownerReferences": [{"apiVersion": GROUPS[by], "kind": by, "name": owner, "controller": True}],
        },
        spec={
            "replicas": wanted,
            "template": {"metadata": {"labels": {"app": owner}}, "spec": {"containers": [box], "volumes": mounted}},
        },
        status={"replicas": wanted, "readyReplicas": ready},
    )


def service(
    name: str = "checkout", ns: str = "payments", *, up: int = 0, down: int = 0, target: int | str = 8080
) -> tuple[Object, ...]:
    one = {"addresses": ["10.2.0.1"]}
    ends = [one | {"conditions": {"ready": True}}] * up + [one | {"conditions": {"ready": False}}] * down
    label = {"labels": {"kubernetes.io/service-name": name}}
    ports = [{"name": "http", "port": 80, "targetPort": target, "protocol": "TCP"}]
    return (
        thing(
            "Service",
            name,
            ns,
            spec={"type": "ClusterIP", "clusterIP": "10.96.0.7", "selector": {"app": name}, "ports": ports},
        ),
        thing(
            "EndpointSlice",
            f"{name}-x1",
            ns,
            metadata=label,
            addressType="IPv4",
            endpoints=ends,
            ports=[{"port": 8080}],
        ),
    )


def cron_job(
    name: str,
    schedule: str,
    *,
    last: float | None = None,
    success: float | None = None,
    active: int = 0,
    **spec: Any,
) -> Object:
    status: dict[str, Any] = (
        {"active": [{"kind": "Job", "name": f"{name}-{n}"} for n in range(active)]} if active else {}
    )
    status |= {"lastScheduleTime": ago(last)} if last is not None else {}
    status |= {"lastSuccessfulTime": ago(success)} if success is not None else {}
    box = {"name": "run", "image": "report", "env": [{"name": "DB_PASSWORD", "value": "hunter2"}]}
    template = {"spec": {"template": {"spec": {"containers": [box], "restartPolicy": "Never"}}}}
    return thing(
        "CronJob", name, old=90_000, spec={"schedule": schedule, "jobTemplate": template, **spec}, status=status
    )


def metrics(pod: str, ns: str = "payments", *, cpu: str, memory: str = "100Mi") -> Object:
    return thing("PodMetrics", pod, ns, containers=[{"name": "app", "usage": {"cpu": cpu, "memory": memory}}])


def claim(phase: str = "Pending", storage_class: str = "fast") -> Object:
    return thing(
        "PersistentVolumeClaim",
        "data-db-0",
        spec={
            "storageClassName": storage_class,
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "20Gi"}},
        },
        status={"phase": phase},
        old=14,
    )
