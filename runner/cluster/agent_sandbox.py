"""Sandboxes of kubernetes-sigs/agent-sandbox: objects of a cluster whose controller makes a pod of each.

A pod that a controller made is read back, since what it was asked for is the boundary around commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import trio

from runner.cluster.objects import ClusterObjects, Object
from runner.cluster.pod_access import Right, require_rights
from runner.core.errors import ProviderFailed
from runner.core.sanitize import excerpt, sanitize

KIND = "agent-sandbox"  # as settings name it
VERSION = "v1beta1"
GROUP = f"agents.x-k8s.io/{VERSION}"
RIGHTS: tuple[Right, ...] = tuple(
    (verb, "agents.x-k8s.io", "sandboxes", "") for verb in ("create", "get", "list", "delete")
)
POD_SECONDS = 30.0  # for the controller to make a pod
INSTALL_HINT = (
    "install kubernetes-sigs/agent-sandbox 0.5 or newer, or set RUNNER_KUBERNETES_SANDBOXES=pods for plain pods"
)
_RIGHTS_HINT = "apply `runner cluster manifest --agent-sandbox` as an administrator: it grants just these"
_OTHER_HINT = "look for what changes pods of this namespace, or set RUNNER_KUBERNETES_SANDBOXES=pods for plain pods"
_CONTROLLER = "/apis/apps/v1/namespaces/agent-sandbox-system/deployments/agent-sandbox-controller"
_OF_NODE = ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace")  # of a pod's fields, false where not told
_FALSE = ("readOnly", *_OF_NODE)
_NOTHING: tuple[Any, ...] = (None, "", "Default", [], {})  # but false and 0, which are said of a container alone
_EXACT = "securityContext"  # in which more is not stronger
_PAUSE, _LONG_PAUSE = 0.1, 1.0
_UNITS = {
    "m": Fraction(1, 1000),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "Ki": Fraction(1 << 10),
    "Mi": Fraction(1 << 20),
    "Gi": Fraction(1 << 30),
}


def sandbox_of(pod: Object) -> dict[str, Any]:
    """Return the Sandbox whose controller makes a pod like this one. Pure."""
    metadata = pod["metadata"]
    inner = {key: metadata[key] for key in ("labels", "annotations")}
    return {
        "apiVersion": GROUP,
        "kind": "Sandbox",
        "metadata": metadata,
        "spec": {"podTemplate": {"metadata": inner, "spec": pod["spec"]}, "service": False},
    }


def path_of(objects: ClusterObjects, name: str = "") -> str:
    """Return where Sandboxes are, or one."""
    return objects.path("sandboxes", name, group=GROUP)


async def served_versions(objects: ClusterObjects) -> list[str]:
    """Return the versions of Sandboxes that a cluster knows; none where it has no such objects."""
    group = await objects.get(f"/apis/{GROUP.partition('/')[0]}") or {}
    return [str(one.get("version")) for one in group.get("versions") or ()]


async def require_sandboxes(objects: ClusterObjects, pod: Object) -> None:
    """Let the cluster judge a Sandbox of this pod, and make none. Raises ``ProviderFailed``."""
    versions = await served_versions(objects)
    if VERSION not in versions:
        known = f"only {', '.join(map(excerpt, versions))} of it" if versions else "no custom resources of it"
        message = f"agent-sandbox is asked for, and cluster {objects.server} has {known}"
        raise ProviderFailed(message, hint=INSTALL_HINT)
    await require_rights(objects, RIGHTS, hint=_RIGHTS_HINT)
    body = sandbox_of(pod)
    status, answer = await objects.ask("POST", f"{path_of(objects)}?dryRun=All", body)
    if status not in (200, 201):
        said = sanitize(str(answer.get("message", status)))
        message = f"namespace `{objects.namespace}` takes no Sandbox of the runner: {said}"
        raise ProviderFailed(message, hint=INSTALL_HINT)


async def controller_words(objects: ClusterObjects) -> str:
    """Tell the controller's image and whether it is ready, as far as this account may see it."""
    status, found = await objects.ask("GET", _CONTROLLER)
    if status != 200:
        return "this account does not see its controller"
    containers = found["spec"]["template"]["spec"]["containers"]
    ready = int((found.get("status") or {}).get("readyReplicas") or 0)
    return f"its controller is {excerpt(str(containers[0]['image']))}, {ready or 'none'} ready"


async def make_pod(objects: ClusterObjects, pod: Object) -> Object:
    """Make a Sandbox, and return the pod that its controller made. Raises ``ProviderFailed``, also for another pod
    than that which was asked for.
    """
    name = str(pod["metadata"]["name"])
    made = await objects.create(path_of(objects), sandbox_of(pod), again=True)
    pause, found = _PAUSE, None
    with trio.move_on_after(POD_SECONDS):
        while (found := await objects.get(objects.path("pods", name))) is None:
            await trio.sleep(pause)
            pause = min(1.5 * pause, _LONG_PAUSE)
    if found is None:
        why = await _why_no_pod(objects, name)
        raise ProviderFailed(f"Sandbox `{name}` has no pod after {POD_SECONDS:.0f}s: {why}", hint=INSTALL_HINT)
    owners = [str(one.get("uid")) for one in found["metadata"].get("ownerReferences") or ()]
    if made is None or made["metadata"]["uid"] not in owners:
        raise ProviderFailed(f"pod `{name}` is not that of its Sandbox")
    asked = {
        "metadata": {"labels": pod["metadata"]["labels"]},
        "spec": {**dict.fromkeys(_OF_NODE, False), **pod["spec"]},
    }
    if (other := difference(asked, found)) is not None:
        raise ProviderFailed(f"the pod of Sandbox `{name}` is not as it was asked for: `{other}`", hint=_OTHER_HINT)
    return found


async def _why_no_pod(objects: ClusterObjects, name: str) -> str:
    found = await objects.get(path_of(objects, name)) or {}
    conditions = (found.get("status") or {}).get("conditions") or ()
    said = [f"{one.get('reason')}: {one.get('message')}" for one in conditions if one.get("status") == "False"]
    return sanitize("; ".join(said)) or "its controller says nothing; does it run?"


def difference(asked: Any, found: Any, place: str = "", *, exact: bool = False) -> str | None:
    """Return the first place where an object lacks what was asked for; ``None`` if nowhere. Pure.

    It may have more, but not in a security context. What a server leaves out because it says nothing is no difference,
    nor is a quantity in another unit.
    """
    if isinstance(asked, Mapping):
        fields = found if isinstance(found, Mapping) else {}
        for key, value in asked.items():
            if key not in fields and (value in ({}, [], "") or (value is False and key in _FALSE)):
                continue
            at = f"{place}.{key}" if place else str(key)
            if (other := difference(value, fields.get(key), at, exact=exact or key == _EXACT)) is not None:
                return other
        more = [str(key) for key, value in fields.items() if exact and key not in asked and value not in _NOTHING]
        return f"{place}.{more[0]}" if more else None
    if isinstance(asked, list):
        parts = found if isinstance(found, list) else []
        if len(parts) < len(asked) or (exact and len(parts) > len(asked)):
            return f"{place}[{min(len(parts), len(asked))}]"
        others = (difference(value, parts[at], f"{place}[{at}]", exact=exact) for at, value in enumerate(asked))
        return next((other for other in others if other is not None), None)
    return None if asked == found or _is_same_quantity(asked, found) else place


def _is_same_quantity(one: Any, other: Any) -> bool:
    try:
        return isinstance(one, str) and isinstance(other, str) and _quantity(one) == _quantity(other)
    except (ValueError, ZeroDivisionError):
        return False


def _quantity(text: str) -> Fraction:
    digits = text.rstrip("mkMGKi")
    return Fraction(digits) * _UNITS.get(text[len(digits) :], 1)
