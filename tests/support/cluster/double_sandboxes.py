"""What the double knows of agent-sandbox: nothing until a test installs it; then Sandboxes, and pods of them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import jsonschema

from tests.support.cluster import sandboxes

if TYPE_CHECKING:
    from tests.support.cluster.double import Double

GROUP = f"/apis/{sandboxes.GROUP}"


class Installed:
    """``versions`` of the custom resource that are served; none when it is not installed. The controller runs, or not,
    and ``alters`` pods by what is laid over their fields.
    """

    def __init__(
        self, versions: tuple[str, ...] = (), *, runs: bool = True, alters: dict[str, Any] | None = None
    ) -> None:
        self.versions = versions
        self.runs = runs
        self.alters = alters or {}

    def group(self) -> dict[str, Any] | None:
        versions = [{"groupVersion": f"{sandboxes.GROUP}/{one}", "version": one} for one in self.versions]
        return {"kind": "APIGroup", "versions": versions} if versions else None


def why_unfit(body: dict[str, Any]) -> str | None:
    """Say what of a Sandbox its schema forbids; fields that it does not know are dropped in silence."""
    found = jsonschema.Draft7Validator(sandboxes.schema()).iter_errors(body)
    return next((f"Sandbox is invalid: {error.json_path}: {error.message}" for error in found), None)


def reconcile(double: Double, name: str) -> None:
    """Make the pod of a Sandbox, unless it is there or the Sandbox is gone, a moment later as controllers do."""
    threading.Timer(0.02, _make_pod, (double, name)).start()


def _make_pod(double: Double, name: str) -> None:
    with double.changed:
        sandbox = double.objects.get(("sandboxes", name))
        if sandbox is None or not double.sandboxes.runs or ("pods", name) in double.objects:
            return
        pod = sandboxes.pod_of(sandbox)
        pod["spec"] |= double.sandboxes.alters
        if (why := double.unfit(pod["spec"])) is None:
            double.add_pod(pod)
        else:
            condition = {"type": "Ready", "status": "False", "reason": "ReconcilerError", "message": why}
            double.put("sandboxes", {**sandbox, "status": {"conditions": [condition]}})
