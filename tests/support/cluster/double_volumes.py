"""Volumes of the double's StorageClasses: claims that come and go with a pod, and file systems of their size.

A class is one that keeps sizes, one that gives more (``large``), or one that says why there is no volume.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.cluster.double import Double

CLAIMS = "persistentvolumeclaims"
GOOD, LARGE = "", "large"


def bind(double: Double, pod: dict[str, Any]) -> str | None:
    """Make the claims of a pod; say why one is not bound, as its events do."""
    for volume in pod["spec"]["volumes"]:
        if "ephemeral" in volume and (why := _claim(double, pod, volume)):
            return why
    return None


def missing(double: Double, pod: dict[str, Any]) -> str | None:
    """Say that a claim which a pod names is not there, as its conditions do."""
    claims = (volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["spec"]["volumes"])
    gone = (name for name in claims if name is not None and (CLAIMS, name) not in double.objects)
    return next((f'0/1 nodes are available: persistentvolumeclaim "{name}" not found' for name in gone), None)


def _claim(double: Double, pod: dict[str, Any], volume: dict[str, Any]) -> str | None:
    of, template = pod["metadata"]["name"], volume["ephemeral"]["volumeClaimTemplate"]
    name, wanted = f"{of}-{volume['name']}", template["spec"]["storageClassName"]
    owners = [{"kind": "Pod", "name": of, "uid": pod["metadata"]["uid"]}]
    said = double.storage.get(wanted, f'storageclass.storage.k8s.io "{wanted}" not found')
    is_made = "quota" not in said
    if is_made:
        metadata = {"name": name, "uid": str(uuid.uuid4()), "ownerReferences": owners}
        double.put(CLAIMS, {"metadata": metadata, "spec": template["spec"]})
    if said in (GOOD, LARGE):
        return None
    event = {
        "metadata": {"name": f"{name}.1", "uid": str(uuid.uuid4()), "ownerReferences": owners},
        "involvedObject": {"name": name if is_made else of},
        "type": "Warning",
        "reason": "ProvisioningFailed" if is_made else "FailedBinding",
        "message": said,
    }
    double.put("events", event)
    return said


def mount(double: Double, spec: dict[str, Any], volume: dict[str, Any], place: Path) -> None:
    """Mount the file system of a claim. It is root's, but for the group that a pod asks for."""
    wanted = volume["ephemeral"]["volumeClaimTemplate"]["spec"]
    is_large = double.storage[wanted["storageClassName"]] == LARGE
    size = 3 << 30 if is_large else int(wanted["resources"]["requests"]["storage"])
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0755", "runner-tests", place], check=True)
    if group := spec["securityContext"].get("fsGroup"):
        os.chown(place, 0, group)
        place.chmod(0o2775)


def unmount(folder: Path) -> None:
    """Unmount what is mounted below a folder."""
    points = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in points:
        if point.startswith(f"{folder}/"):
            subprocess.run(["umount", "--lazy", point], check=False)
