"""Rights of the runner in a cluster, and the strength of its runtime's boundary."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import trio

from runner.cluster.objects import ClusterObjects, Refused
from runner.core.errors import ProviderFailed, VolumeFailed
from runner.core.model import IsolationClass, Limits
from runner.core.nurseries import unwrapping_groups
from runner.core.sanitize import excerpt, sanitize
from runner.sandbox import pod

Right = tuple[str, str, str, str]  # verb, group, resource, subresource

RIGHTS = (
    ("create", "", "pods", ""),
    ("get", "", "pods", ""),
    ("list", "", "pods", ""),
    ("watch", "", "pods", ""),
    ("delete", "", "pods", ""),
    ("get", "", "pods", "exec"),
    ("create", "", "pods", "exec"),
    ("get", "", "configmaps", ""),
    ("create", "", "configmaps", ""),
    ("get", "networking.k8s.io", "networkpolicies", ""),
    ("create", "networking.k8s.io", "networkpolicies", ""),
)
# What tells why a pod has no volume, where a StorageClass is named.
VOLUME_RIGHTS = (("list", "", "events", ""),)
# What who makes Jobs needs besides.
JOB_RIGHTS = (
    ("create", "batch", "jobs", ""),
    ("get", "batch", "jobs", ""),
    ("list", "batch", "jobs", ""),
    ("delete", "batch", "jobs", ""),
    ("list", "", "events", ""),
)
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"
_STORAGE = "/apis/storage.k8s.io/v1/storageclasses"
_HANDLERS = {"runsc": IsolationClass.KERNEL, "gvisor": IsolationClass.KERNEL}
_OLDEST = (1, 19)  # seccomp profiles as fields, immutable ConfigMaps


async def look_at_cluster(
    objects: ClusterObjects, runtime_class: str | None, storage_class: str | None = None
) -> tuple[IsolationClass, dict[str, str]]:
    """Return the class of isolation and versions. Raises ``ProviderFailed`` with what is missing first."""
    status, version = await objects.ask("GET", "/version")
    if status != 200:
        raise Refused(f"cluster {objects.server} does not tell its version: {version.get('message')}", status)
    found = f"{version.get('major', '')}.{str(version.get('minor', '')).rstrip('+')}"
    told = tuple(int(part) for part in found.split(".") if part.isdigit())
    if told and told < _OLDEST:  # servers that somebody built may not know theirs
        raise ProviderFailed(
            f"cluster {objects.server} is Kubernetes {excerpt(found)}, and 1.19 is the oldest that works"
        )
    await require_rights(objects, (*RIGHTS, *VOLUME_RIGHTS) if storage_class is not None else RIGHTS)
    isolation = await isolation_of(objects, runtime_class)
    if storage_class is not None:
        await require_storage_class(objects, storage_class)
    await _try_pod(objects, runtime_class, storage_class)
    return isolation, {"kubernetes": sanitize(str(version.get("gitVersion", found)), 40)}


RIGHTS_HINT = "apply `runner cluster manifest` as an administrator: it grants just these"


async def require_rights(objects: ClusterObjects, rights: Sequence[Right], hint: str = RIGHTS_HINT) -> None:
    """Raise ``ProviderFailed`` with the rights that the cluster denies, as people write them."""
    if lacking := await _missing(objects, rights):
        where = f"namespace `{objects.namespace}` of cluster {objects.server}"
        raise ProviderFailed(f"these rights are missing in {where}: {', '.join(lacking)}", hint=hint)


async def _missing(objects: ClusterObjects, rights: Sequence[Right]) -> list[str]:
    denied: set[str] = set()

    async def review(verb: str, group: str, resource: str, subresource: str) -> None:
        attributes = {"namespace": objects.namespace, "verb": verb, "group": group, "resource": resource}
        if subresource:
            attributes["subresource"] = subresource
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        status, answer = await objects.ask("POST", _REVIEWS, body)
        allowed = (answer.get("status") or {}).get("allowed") if status == 201 else None
        if allowed is False:
            denied.add(f"{verb} {resource}{'/' if subresource else ''}{subresource}")

    with unwrapping_groups():
        async with trio.open_nursery() as nursery:
            for right in rights:
                nursery.start_soon(review, *right)
    return sorted(denied)


async def isolation_of(objects: ClusterObjects, runtime_class: str | None) -> IsolationClass:
    """Return the class of the boundary around pods of a RuntimeClass. Raises ``ProviderFailed`` for an unknown one."""
    if runtime_class is None:
        return IsolationClass.NAMESPACES
    found = await objects.get(f"{_CLASSES}/{runtime_class}")
    if found is None:
        raise ProviderFailed(
            f"the cluster has no RuntimeClass `{excerpt(runtime_class)}`", hint="kubectl get runtimeclasses"
        )
    handler = str(found.get("handler", ""))
    if handler.startswith("kata"):
        return IsolationClass.VM
    if handler not in _HANDLERS:
        raise ProviderFailed(
            f"RuntimeClass `{excerpt(runtime_class)}` has the handler `{excerpt(handler)}`, which is neither"
            " gVisor's nor Kata's: nobody knows how strong it is",
            hint="leave RUNNER_KUBERNETES_RUNTIME_CLASS out, or name a RuntimeClass of `runsc` or `kata`",
        )
    return _HANDLERS[handler]


async def require_storage_class(objects: ClusterObjects, storage_class: str) -> None:
    """Raise ``VolumeFailed`` for a StorageClass that is not there, as far as this account may look."""
    status, _ = await objects.ask("GET", f"{_STORAGE}/{storage_class}")
    if status == 404:
        message = f"the cluster has no StorageClass `{excerpt(storage_class)}`"
        raise VolumeFailed(message, hint="see `kubectl get storageclasses`")


def probe_pod(runtime_class: str | None, storage_class: str | None) -> dict[str, Any]:
    """Return a pod like those of workspaces, which is only to be judged."""
    shape = pod.PodShape(
        image="runner.invalid/probe",
        pull="IfNotPresent",
        uid=1_000_000,
        limits=Limits(),
        labels=pod.PRODUCT,
        annotations={},
        guest="runner-guest",
        machine=platform.machine(),
        runtime_class=runtime_class,
        storage_class=storage_class,
    )
    return pod.pod("runner-probe", shape, [], [], most=1 << 20)


async def _try_pod(objects: ClusterObjects, runtime_class: str | None, storage_class: str | None) -> None:
    """Let the cluster judge such a pod, and make none. Raises ``ProviderFailed``."""
    body = probe_pod(runtime_class, storage_class)
    status, answer = await objects.ask("POST", f"{objects.path('pods')}?dryRun=All", body)
    if status not in (200, 201):
        said = sanitize(str(answer.get("message", status)))
        raise ProviderFailed(
            f"namespace `{objects.namespace}` takes no pod of the runner: {said}",
            hint="`docs/howto/kubernetes.md` says what a namespace must allow",
        )
