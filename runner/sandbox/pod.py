"""The objects of Kubernetes that a sandbox is made of, as the API takes them. Pure.

A pod has one directory for all files of its workspace, and shows parts of it in two containers: ``files``, which only
carries files and the guest's channel, and ``sandbox``, in which commands run. Before these an init container takes the
files, so that parts of the tree are there when they are mounted read-only.
"""

from __future__ import annotations

import posixpath
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from runner.core.model import Limits
from runner.sandbox.container import CHANNEL, GUEST, SOCKET
from runner.sandbox.docker_facts import TMP, tmp_bytes
from runner.sandbox.mirrored import Volume
from runner.sandbox.protected_paths import Guard, Kind
from runner.sandbox.sandbox_layout import ENV, PATHS, group, passwd

FIRST, FILES, SANDBOX = "first", "files", "sandbox"  # containers
FILES_PLACE = "/runner"  # in the container of that name
CACHE_PLACE = "/runner-cache"  # in the first container
CACHE_GROUP = 65533  # of all pods that have a cache
SYSTEM = "system"  # directory of the pod's own files among the workspace's
POLICY = "runner-no-network"
PRODUCT = {"runner.product": "runner"}

_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_CARRIER = {"limits": {"cpu": "1", "memory": "128Mi"}, "requests": {"cpu": "10m", "memory": "16Mi"}}
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_CLOSED = "127.0.0.1"  # as name server: there is nobody to ask


@dataclass(frozen=True)
class PodShape:
    """The common properties of a workspace's pods. ``pull`` is a policy of Kubernetes."""

    image: str
    pull: str
    uid: int
    limits: Limits
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    guest: str  # the ConfigMap that has it
    machine: str
    runtime_class: str | None = None
    storage_class: str | None = None  # of the volume for the files; without one they lie on the node's disk
    cache: str | None = None  # the claim that keeps toolchains
    owner: tuple[str, str] | None = None  # name and uid of the pod that it goes with


def label(text: str) -> str:
    """Return a text as a label's value: itself where that may be one, else a digest."""
    return text if _LABEL.fullmatch(text) else sha256(text.encode()).hexdigest()[:40]


def name_of(workspace: str, suffix: str) -> str:
    """Return the name of a workspace's pod; names of hosts are stricter than ids."""
    words = re.sub(r"[^a-z0-9]+", "-", workspace.lower()).strip("-")[:40].strip("-")
    return f"runner-{words or 'workspace'}-{suffix}"


def guest_map(name: str, program: bytes) -> dict[str, Any]:
    """Return the object that holds the guest; it is the same for all workspaces, and never changes."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": PRODUCT},
        "binaryData": {"guest": b64encode(program).decode()},
        "immutable": True,
    }


def closed_network() -> dict[str, Any]:
    """Return the policy that lets nothing into or out of a workspace's pod."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": POLICY, "labels": PRODUCT},
        "spec": {"podSelector": {"matchLabels": PRODUCT}, "policyTypes": ["Ingress", "Egress"]},
    }


def closes_all(spec: Mapping[str, Any]) -> bool:
    """Tell whether a policy is still the one above."""
    return (
        spec.get("podSelector") == {"matchLabels": PRODUCT}
        and sorted(spec.get("policyTypes") or ()) == ["Egress", "Ingress"]
        and not spec.get("ingress")
        and not spec.get("egress")
    )


def system_files(uid: int) -> dict[str, bytes]:
    """Return the pod's own files by their place in a sandbox; the last only has the directory of a kubeconfig made."""
    return {"etc/passwd": passwd(uid), "etc/group": group(uid), f"{PATHS.kube[1:]}/covered": b""}


def pod(name: str, shape: PodShape, volumes: Sequence[Volume], guards: Iterable[Guard], *, most: int) -> dict[str, Any]:
    """Return the pod of a sandbox; ``most`` bytes are what its files may take, after which the node ends it."""
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostname": "workspace",
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": [_CLOSED]},
        "nodeSelector": {"kubernetes.io/os": "linux", "kubernetes.io/arch": _MACHINES[shape.machine]},
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": shape.uid,
            "runAsGroup": shape.uid,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [
            {"name": "guest", "configMap": {"name": shape.guest, "defaultMode": 0o555}},
            {"name": FILES, **_files_volume(shape.storage_class, most)},
            {"name": "channel", "emptyDir": {"sizeLimit": str(1 << 20)}},
            {"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": str(tmp_bytes(shape.limits))}},
        ],
        "initContainers": [_container(FIRST, shape, ["wait"], _carrier_mounts(), _CARRIER)],
        "containers": [
            _container(FILES, shape, ["wait"], _carrier_mounts(), _CARRIER),
            _container(
                SANDBOX, shape, [f"{CHANNEL}/{SOCKET}"], _sandbox_mounts(volumes, guards), _resources(shape.limits)
            ),
        ],
    }
    if shape.storage_class is not None:  # whose volumes belong to root
        spec["securityContext"]["fsGroup"] = shape.uid
    if shape.cache is not None:
        spec["securityContext"]["supplementalGroups"] = [CACHE_GROUP]
        spec["volumes"].append({"name": "cache", "persistentVolumeClaim": {"claimName": shape.cache}})
        spec["initContainers"][0]["volumeMounts"].append({"name": "cache", "mountPath": CACHE_PLACE})
    if shape.runtime_class is not None:
        spec["runtimeClassName"] = shape.runtime_class
    metadata: dict[str, Any] = {"name": name, "labels": dict(shape.labels), "annotations": dict(shape.annotations)}
    if shape.owner is not None:
        owner, uid = shape.owner
        metadata["ownerReferences"] = [{"apiVersion": "v1", "kind": "Pod", "name": owner, "uid": uid}]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def claim_of(pod: str) -> str:
    """Return the name of the claim that a cluster makes for the files of a pod."""
    return f"{pod}-{FILES}"


def _files_volume(storage_class: str | None, most: int) -> dict[str, Any]:
    """Return the place of a pod's files; the claim of a volume comes and goes with the pod."""
    if storage_class is None:
        return {"emptyDir": {"sizeLimit": str(most)}}
    wanted = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": storage_class,
        "resources": {"requests": {"storage": str(most)}},
    }
    return {"ephemeral": {"volumeClaimTemplate": {"metadata": {"labels": PRODUCT}, "spec": wanted}}}


def _container(
    name: str, shape: PodShape, arguments: list[str], mounts: list[dict[str, Any]], resources: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "image": shape.image,
        "imagePullPolicy": shape.pull,
        "command": [GUEST, *arguments],
        "env": [{"name": key, "value": value} for key, value in ENV.items()],
        "workingDir": "/",
        "resources": resources,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "privileged": False,
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [{"name": "guest", "mountPath": GUEST, "subPath": "guest", "readOnly": True}, *mounts],
    }


def _carrier_mounts() -> list[dict[str, Any]]:
    return [{"name": "files", "mountPath": FILES_PLACE}, {"name": "channel", "mountPath": CHANNEL}]


def _sandbox_mounts(volumes: Sequence[Volume], guards: Iterable[Guard]) -> list[dict[str, Any]]:
    def shown(place: str, target: str, *, writable: bool) -> dict[str, Any]:
        return {"name": "files", "mountPath": target, "subPath": place, "readOnly": not writable}

    return [
        {"name": "channel", "mountPath": CHANNEL, "readOnly": True},
        {"name": "tmp", "mountPath": TMP, "subPath": "tmp"},
        {"name": "tmp", "mountPath": "/var/tmp", "subPath": "var"},
        *_kube_cover(volumes),
        *(shown(f"{SYSTEM}/{name}", f"/{name}", writable=False) for name in ("etc/passwd", "etc/group")),
        *(shown(volume.name, volume.target, writable=volume.writable) for volume in volumes),
        *(
            shown(
                posixpath.join(volumes[0].name, guard.path),
                posixpath.join(volumes[0].target, guard.path),
                writable=guard.kind is Kind.ANCESTOR,
            )
            for guard in guards
        ),
    ]


def _resources(limits: Limits) -> dict[str, dict[str, str]]:
    """Return the limits, of which the scheduler is asked for less: agents wait for their model most of the time."""
    most: dict[str, str] = {}
    asked: dict[str, str] = {"cpu": "10m", "memory": str(16 << 20)}
    if limits.cpus is not None:
        most["cpu"] = f"{round(limits.cpus * 1000)}m"
        asked["cpu"] = f"{max(1, round(limits.cpus * 250))}m"
    if limits.memory_bytes is not None:
        most["memory"] = str(limits.memory_bytes)
        asked["memory"] = str(limits.memory_bytes // 2)
    return {"limits": most, "requests": asked}


def _kube_cover(volumes: Sequence[Volume]) -> list[dict[str, Any]]:
    """Cover the directory of a kubeconfig: the image's own is closed to everybody but root."""
    if not any(volume.target == PATHS.kube for volume in volumes):
        return []
    place = posixpath.dirname(PATHS.kube)
    return [{"name": "files", "mountPath": place, "subPath": f"{SYSTEM}{place}", "readOnly": True}]
