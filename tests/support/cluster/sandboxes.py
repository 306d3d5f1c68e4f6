"""A stand-in for the controller of kubernetes-sigs/agent-sandbox: a pod for each Sandbox, again when it was deleted.

It does what the project documents and its core controller does of that; there are no claims, templates and pools. Its
own program needs a newer Go than tests have. ``definition`` is what clusters of tests are given as its custom resource.
"""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from ruamel.yaml import YAML

if TYPE_CHECKING:
    from tests.support.cluster.real import Cluster

GROUP = "agents.x-k8s.io"
VERSION = "v1beta1"
FILE = Path(__file__).with_name("sandboxes.yaml")
_OWN = (f"{GROUP}/", f"extensions.{GROUP}/")  # labels that it sets itself, whatever a template says
_LOOK = 0.1  # seconds between its looks
_FNV = 0x811C9DC5


def definition() -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe").load(FILE)
    return found


def schema() -> dict[str, Any]:
    """The schema that a Sandbox has to meet."""
    [version] = definition()["spec"]["versions"]
    found: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return found


def pod_of(sandbox: dict[str, Any]) -> dict[str, Any]:
    """The pod that the controller makes of a Sandbox."""
    metadata, template = sandbox["metadata"], sandbox["spec"]["podTemplate"]
    given = template.get("metadata", {})
    owner = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "Sandbox", "name": metadata["name"], "uid": metadata["uid"]}
    labels = {name: value for name, value in given.get("labels", {}).items() if not name.startswith(_OWN)}
    annotations = {name: value for name, value in given.get("annotations", {}).items() if not name.startswith(_OWN)}
    told = {f"{GROUP}/propagated-labels": labels, f"{GROUP}/propagated-annotations": annotations}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": metadata["name"],
            "labels": {**labels, f"{GROUP}/sandbox-name-hash": _hash(metadata["name"])},
            "annotations": {**annotations, **{name: ",".join(sorted(keys)) for name, keys in told.items() if keys}},
            "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
        },
        "spec": json.loads(json.dumps(template["spec"])),
    }


def _hash(name: str) -> str:
    found = _FNV
    for byte in name.encode():
        found = (found ^ byte) * 0x01000193 % (1 << 32)
    return f"{found:08x}"


@contextmanager
def controlling(cluster: Cluster, namespace: str) -> Iterator[None]:
    """Define Sandboxes in a real cluster, and make pods of those of a namespace, for as long as the block lasts."""
    cluster.kubectl("apply", "-f", str(FILE))
    cluster.wait("definition", lambda: "sandboxes" in cluster.kubectl("api-resources", f"--api-group={GROUP}"))
    ends = threading.Event()
    thread = threading.Thread(target=_control, args=(cluster, namespace, ends))
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
        cluster.kubectl("delete", "-f", str(FILE))


def _control(cluster: Cluster, namespace: str, ends: threading.Event) -> None:
    while not ends.wait(_LOOK):
        with suppress(OSError, HTTPException):  # which tests may restart
            for sandbox in _ask(cluster, "GET", f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/sandboxes")["items"]:
                _reconcile(cluster, namespace, sandbox)


def _reconcile(cluster: Cluster, namespace: str, sandbox: dict[str, Any]) -> None:
    name = sandbox["metadata"]["name"]
    if "deletionTimestamp" in sandbox["metadata"] or sandbox["spec"]["operatingMode"] != "Running":
        return
    try:
        _ask(cluster, "POST", f"/api/v1/namespaces/{namespace}/pods", pod_of(sandbox))
    except HTTPError as error:
        ready, message = (True, "Pod exists") if error.code == 409 else (False, json.load(error)["message"])
        condition = {"type": "Ready", "status": str(ready), "reason": "DependenciesReady", "message": message}
        if not ready:
            condition["reason"] = "ReconcilerError"
        if sandbox.get("status", {}).get("conditions") != [condition]:
            path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/sandboxes/{name}/status"
            with suppress(HTTPError):  # it is gone, or has changed
                _ask(cluster, "PUT", path, {**sandbox, "status": {"conditions": [condition]}})


def _ask(cluster: Cluster, method: str, path: str, body: Any = None) -> Any:
    sent = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {cluster.token}", "Content-Type": "application/json"}
    context = ssl.create_default_context(cafile=str(cluster.folder / "ca.pem"))
    request = Request(cluster.server + path, data=sent, method=method, headers=headers)
    with urlopen(request, timeout=20, context=context) as answer:
        return json.load(answer)
