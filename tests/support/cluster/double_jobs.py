"""Jobs of the double: a controller, and a kubelet that runs their only container as a process of this host.

The process sees what the container would, at other places: paths below a mount are replaced in its words and variables.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.cluster.double import Double

_LAST = 2048  # bytes that a kubelet keeps of what a container has said at last
_PATIENCE = 20.0  # seconds for a ConfigMap that comes after its pod


class Worlds:
    """What tests say of the cluster beside its API: the images of nodes, and whether pods of Jobs have room."""

    def __init__(self) -> None:
        self.images: set[str] = set()
        self.quota = ""  # why no pod may be made
        self.unschedulable = ""
        self.held = False  # workers wait, before they are programs of the runner


def start(double: Double, name: str) -> None:
    """Do what the controller does for a new Job, or one that is no longer suspended."""
    job = double.objects["jobs", name]
    if job["spec"].get("suspend"):
        return
    while double.worlds.quota:
        _tell(double, name, double.worlds.quota)
        time.sleep(0.1)
        if ("jobs", name) not in double.objects:
            return
    template = json.loads(json.dumps(job["spec"]["template"]))
    if why := double.unfit(template["spec"]):
        _tell(double, name, f'pods "{name}-x" is forbidden: violates PodSecurity "restricted:latest": {why}')
        return
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
    pod_name = f"{name}-{uuid.uuid4().hex[:5]}"
    metadata = {"name": pod_name, "uid": str(uuid.uuid4()), "ownerReferences": [owner]}
    pod = {**template, "metadata": {**template["metadata"], **metadata}, "status": {"phase": "Pending"}}
    double.put("pods", pod)
    threading.Thread(target=_Worker(double, pod_name, name).run, daemon=True).start()


def _tell(double: Double, name: str, message: str) -> None:
    event = {
        "metadata": {"name": f"{name}.failed"},
        "involvedObject": {"kind": "Job", "name": name},
        "reason": "FailedCreate",
        "message": f"Error creating: {message}",
    }
    double.put("events", event)


_MOUNT = """
mount -t tmpfs none "$1"
if [ -d "$0" ]; then mkdir "$2"; else touch "$2"; fi
mount --bind "$0" "$2"
shift 2
exec "$@"
"""


class _Worker:
    """The pod of a Job."""

    def __init__(self, double: Double, name: str, job: str) -> None:
        self._double = double
        self._name = name
        self._job = job
        self._folder = double.folder / name

    def run(self) -> None:
        spec = self._double.objects["pods", self._name]["spec"]
        [container] = spec["containers"]
        while self._double.worlds.unschedulable:
            why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            with suppress(KeyError):  # it was deleted meanwhile
                self._set(conditions=[{**why, "message": self._double.worlds.unschedulable}])
            time.sleep(0.1)
        if ("pods", self._name) not in self._double.objects:
            return
        if "/never" in container["image"]:
            self._wait_in("ErrImageNeverPull", "its policy is Never")
            return
        if container["image"] not in self._double.worlds.images:
            self._wait_in("ErrImagePull", f"{container['image']}: not found")
            return
        variables = self._variables(container)
        if variables is None or not self._make_volumes(spec):
            return
        log = self._folder / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [
                    *self._held(),
                    *self._mounted(container),
                    *(self._placed(spec, container, word) for word in container["command"]),
                ],
                cwd=self._placed(spec, container, container["workingDir"]),
                env={name: self._placed(spec, container, value) for name, value in variables.items()},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._double.workers[self._name] = process
        self._set(phase="Running", containerStatuses=[self._status(container, {"running": {}})])
        code = process.wait()
        said = log.read_bytes()[-_LAST:].decode(errors="replace") if code else ""
        ended = {"exitCode": code % 256, "reason": "Completed" if code == 0 else "Error", "message": said}
        with suppress(KeyError):  # it was deleted meanwhile
            self._set(
                phase="Failed" if code else "Succeeded",
                containerStatuses=[self._status(container, {"terminated": ended})],
            )
            job = self._double.objects["jobs", self._job]
            failed = {"type": "Failed", "reason": "BackoffLimitExceeded", "message": "Job has reached the limit"}
            condition = failed if code else {"type": "Complete"}
            self._double.put("jobs", {**job, "status": {"conditions": [{**condition, "status": "True"}]}})

    def _held(self) -> list[str]:
        """What a command waits behind for as long as workers are held; TERM ends it, as it would the worker."""
        if not self._double.worlds.held:
            return []
        hold = self._folder / "held"
        hold.touch()

        def release() -> None:
            while self._double.worlds.held:
                time.sleep(0.05)
            hold.unlink()

        threading.Thread(target=release, daemon=True).start()
        return ["sh", "-c", 'while [ -e "$0" ]; do sleep 0.05; done; exec "$@"', str(hold)]

    def _mounted(self, container: dict[str, Any]) -> list[str]:
        """What a command runs behind to see its kubeconfig where its plan says: that place is in no word of it."""
        for mount in container["volumeMounts"]:
            if mount["name"] == "kubeconfig":
                source, parent = self._folder / mount["name"] / mount["subPath"], Path(mount["mountPath"]).parent
                if not source.exists():
                    source.mkdir()  # as a kubelet does
                parent.mkdir(exist_ok=True)
                return ["unshare", "--mount", "sh", "-c", _MOUNT, str(source), str(parent), mount["mountPath"]]
        return []

    def _wait_in(self, reason: str, message: str) -> None:
        [container] = self._double.objects["pods", self._name]["spec"]["containers"]
        waiting = {"waiting": {"reason": reason, "message": message}}
        self._set(containerStatuses=[self._status(container, waiting)])

    def _status(self, container: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        return {"name": container["name"], "image": container["image"], "state": state}

    def _set(self, **status: Any) -> None:
        with self._double.changed:
            pod = self._double.objects["pods", self._name]
            self._double.put("pods", {**pod, "status": {**pod["status"], **status}})

    def _variables(self, container: dict[str, Any]) -> dict[str, str] | None:
        """The environment of the container; ``None`` when a Secret that it names is not there."""
        found = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        for source in container.get("envFrom", ()):
            secret = self._double.objects.get(("secrets", source["secretRef"]["name"]))
            if secret is None:
                self._wait_in("CreateContainerConfigError", f'secret "{source["secretRef"]["name"]}" not found')
                return None
            found |= {name: base64.b64decode(value).decode() for name, value in secret.get("data", {}).items()}
        metadata = self._double.objects["pods", self._name]["metadata"]
        for one in container["env"]:
            path = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
            found[one["name"]] = metadata[path.removeprefix("metadata.")] if path else one["value"]
        return found

    def _make_volumes(self, spec: dict[str, Any]) -> bool:
        self._folder.mkdir(mode=0o711)
        for volume in spec["volumes"]:
            place = self._folder / volume["name"]
            place.mkdir()
            if "secret" in volume:
                secret = self._double.objects.get(("secrets", volume["secret"]["secretName"]), {})
                for name, value in secret.get("data", {}).items():
                    (place / name).write_bytes(base64.b64decode(value))
                    (place / name).chmod(volume["secret"]["defaultMode"])
            if "configMap" not in volume:
                continue
            key, deadline = ("configmaps", volume["configMap"]["name"]), time.monotonic() + _PATIENCE
            while key not in self._double.objects:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.02)
            for name, text in self._double.objects[key].get("data", {}).items():
                (place / name).write_text(text)
        return True

    def _placed(self, spec: dict[str, Any], container: dict[str, Any], text: str) -> str:
        for mount in container["volumeMounts"]:
            place = mount["mountPath"]
            if place == "/tmp":  # where tests have files that the process is to see
                continue
            if text == place or text.startswith(f"{place}/"):
                return str(self._folder / mount["name"]) + text.removeprefix(place)
        return text
