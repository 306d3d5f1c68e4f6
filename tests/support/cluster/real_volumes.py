"""A provisioner for the real cluster: volumes that are file systems in files, as large as their claims ask for."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runner.sandbox.pod import CACHE_GROUP
from tests.support.cluster.real import NAMESPACE, Cluster

CLASS = "sized"
_PAUSE = 0.3  # seconds between looks


@contextmanager
def provisioning(cluster: Cluster) -> Iterator[None]:
    """Give each claim of class ``sized`` its volume for as long as the block lasts."""
    over, folder = threading.Event(), cluster.folder / "volumes"
    folder.mkdir(exist_ok=True)
    _apply(
        cluster,
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": CLASS},
            "provisioner": "runner-tests/file",
            "reclaimPolicy": "Retain",
        },
    )

    def serve() -> None:
        while not over.wait(_PAUSE):
            for claim in _found(cluster, "pvc", "-n", NAMESPACE):
                if claim["spec"].get("storageClassName") == CLASS and claim["status"].get("phase") == "Pending":
                    _provision(cluster, folder, claim)
            for volume in _found(cluster, "pv"):
                if volume["status"].get("phase") == "Released":
                    _remove(cluster, volume)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for volume in _found(cluster, "pv"):
            _remove(cluster, volume)
        cluster.kubectl("delete", "storageclass", CLASS)


@contextmanager
def toolchain_claim(cluster: Cluster, size: str) -> Iterator[str]:
    """A claim whose directory is as the page on Pods says that it has to be."""
    name, spec = "toolchains", {"storageClassName": CLASS, "accessModes": ["ReadWriteOnce"]}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name, "namespace": NAMESPACE}}
    with provisioning(cluster):
        _apply(cluster, {**claim, "spec": {**spec, "resources": {"requests": {"storage": size}}}})
        while not (volumes := _found(cluster, "pv")):
            time.sleep(_PAUSE)
        place = Path(volumes[0]["spec"]["local"]["path"])
        os.chown(place, 0, CACHE_GROUP)
        place.chmod(0o2770)
        yield name
        cluster.kubectl("delete", "pvc", name, "-n", NAMESPACE)


def _provision(cluster: Cluster, folder: Path, claim: dict[str, Any]) -> None:
    name, size = f"pv-{claim['metadata']['uid']}", claim["spec"]["resources"]["requests"]["storage"]
    place, image = folder / name, folder / f"{name}.ext4"
    if place.exists():
        return  # it is being bound
    place.mkdir()
    subprocess.run(["truncate", f"--size={_bytes(size)}", image], check=True)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, place], check=True)
    node = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["n1"]}]}
    spec = {
        "capacity": {"storage": size},
        "accessModes": ["ReadWriteOnce"],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": CLASS,
        "claimRef": {"namespace": NAMESPACE, "name": claim["metadata"]["name"], "uid": claim["metadata"]["uid"]},
        "local": {"path": str(place)},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [node]}},
    }
    _apply(cluster, {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec})


def _remove(cluster: Cluster, volume: dict[str, Any]) -> None:
    place = Path(volume["spec"]["local"]["path"])
    subprocess.run(["umount", "--lazy", place], check=False)
    place.rmdir()
    place.with_name(f"{place.name}.ext4").unlink()
    cluster.kubectl("delete", "pv", volume["metadata"]["name"])


def _apply(cluster: Cluster, body: dict[str, Any]) -> None:
    file = cluster.folder / f"{body['metadata']['name']}.json"
    file.write_text(json.dumps(body))
    cluster.kubectl("apply", f"--filename={file}")
    file.unlink()


def _found(cluster: Cluster, *what: str) -> list[dict[str, Any]]:
    found = cluster.kubectl("get", *what, "--output=json")
    return json.loads(found)["items"] if found else []


def _bytes(size: str) -> int:
    """The number that a cluster writes as shortly as it can, such as 64Mi."""
    return int(size[:-2]) << {"Ki": 10, "Mi": 20, "Gi": 30}[size[-2:]] if size.endswith("i") else int(size)
