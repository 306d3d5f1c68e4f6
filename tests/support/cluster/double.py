"""A cluster for the day: an API server, and a kubelet that runs pods as containers of the tests' docker daemon.

It keeps ConfigMaps, NetworkPolicies and pods, with watches, deletion by grace and programs over websockets, volumes
(``double_volumes``), and Jobs with what belongs to them (``double_jobs``), as far as the runner uses them, and holds
what it is given against the restricted Pod Security Standard. There is no network at all. What it does is held to the
real ones by the same conformance suite, at night.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from docker import APIClient
from docker.errors import APIError, DockerException
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Request
from wsproto.utilities import LocalProtocolError

from tests.support.cluster import double_jobs, double_sandboxes, double_volumes

NAMESPACE, CONTEXT = "agents", "double"
_ACCESS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_OBJECT = re.compile(r"/(?:api/v1|apis/[^/]+/v1[a-z0-9]*)/namespaces/([^/]+)/([a-z]+)(?:/([^/]+))?(/exec)?")
_KINDS = {
    "pods": "Pod",
    "configmaps": "ConfigMap",
    "networkpolicies": "NetworkPolicy",
    "jobs": "Job",
    "secrets": "Secret",
    "events": "Event",
    double_volumes.CLAIMS: "PersistentVolumeClaim",
    "sandboxes": "Sandbox",
}


class Double:
    """The cluster's state. ``docker`` is the daemon's address, ``folder`` has the files of pods."""

    def __init__(self, docker: str, folder: Path) -> None:
        self.docker = docker
        self.folder = folder
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.changed = threading.Condition()
        self.version = 1
        self.denied: set[tuple[str, str]] = set()  # verbs and resources
        self.classes: dict[str, str] = {}
        self.storage: dict[str, str] = {}  # StorageClasses: what is wrong with their volumes
        self.told: tuple[str, ...] = ("1", "31")  # as its version
        self.port = 0
        self.running: set[socket.socket] = set()  # connections to programs
        self.worlds = double_jobs.Worlds()
        self.workers: dict[str, subprocess.Popen[bytes]] = {}  # by the name of the pod
        self.unfit = _unfit
        self.sandboxes = double_sandboxes.Installed()

    def control(self, what: str, given: Any) -> None:
        """What tests ask for beside the API: rights, RuntimeClasses, a version, an end of connections to programs."""
        if what == "denied":
            self.denied = {(verb, resource) for verb, resource in given}
        elif what == "classes":
            self.classes = given
        elif what == "storage":
            self.storage = given
        elif what == "version":
            self.told = tuple(given)
        elif what in ("images", "quota", "unschedulable", "held"):
            setattr(self.worlds, what, given)
        elif what == "sandboxes":
            self.sandboxes = double_sandboxes.Installed(**given)
        elif what == "kill":
            os.killpg(self.workers[given].pid, signal.SIGKILL)
        else:
            for connection in [*self.running]:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def client(self) -> APIClient:
        return APIClient(self.docker, timeout=60)

    def put(self, resource: str, found: dict[str, Any]) -> None:
        with self.changed:
            self.version += 1
            found["metadata"]["resourceVersion"] = str(self.version)
            self.objects[resource, found["metadata"]["name"]] = json.loads(json.dumps(found))
            self.changed.notify_all()

    def remove(self, resource: str, name: str) -> None:
        with self.changed:
            self.version += 1
            gone = self.objects.pop((resource, name), None)
            self.changed.notify_all()
        for kind, owned in self._owned(gone) if gone is not None else ():
            self.delete(kind, owned)
        if resource == "pods":
            double_sandboxes.reconcile(self, name)

    def add_pod(self, pod: dict[str, Any]) -> None:
        """Take a pod, and let its node start it."""
        pod["metadata"].setdefault("uid", str(uuid.uuid4()))
        self.put("pods", {**pod, "status": {"phase": "Pending"}})
        threading.Thread(target=_Kubelet(self, pod["metadata"]["name"]).start, daemon=True).start()

    def _owned(self, owner: dict[str, Any]) -> list[tuple[str, str]]:
        uid = owner["metadata"].get("uid", "")
        with self.changed:
            everything = [*self.objects.items()]
        return [key for key, one in everything for by in one["metadata"].get("ownerReferences", ()) if by["uid"] == uid]

    def delete(self, resource: str, name: str) -> dict[str, Any]:
        """Begin to delete an object, and with it what belongs to it."""
        gone = {**self.objects[resource, name]}
        if resource == "pods" and "deletionTimestamp" in gone["metadata"]:
            return gone
        if resource == "pods":
            gone["metadata"] = {**gone["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
            self.put("pods", gone)
            ends = partial(self._end_worker, name) if _is_of_job(gone) else _Kubelet(self, name).delete
            threading.Thread(target=ends, daemon=True).start()
        else:
            self.remove(resource, name)
        return gone

    def _end_worker(self, name: str) -> None:
        """End the process of a Job's pod as its kubelet would."""
        grace = self.objects["pods", name]["spec"]["terminationGracePeriodSeconds"]
        if (process := self.workers.get(name)) is not None and process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        self.remove("pods", name)

    def kubeconfig(self) -> str:
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": CONTEXT,
            "contexts": [{"name": CONTEXT, "context": {"cluster": "double", "user": "me", "namespace": NAMESPACE}}],
            "clusters": [{"name": "double", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "me", "user": {}}],
        }
        return json.dumps(document)


@contextmanager
def serving(docker: str) -> Iterator[Double]:
    """A cluster for as long as the block lasts; at its end none of its containers is left."""
    with tempfile.TemporaryDirectory(prefix="runner-tests-pods-") as folder:
        Path(folder).chmod(0o711)
        double = Double(docker, Path(folder))

        class Answer(_Answer):
            of = double

        server = _Server(("127.0.0.1", 0), Answer)
        double.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield double
        finally:
            server.shutdown()
            server.server_close()
            for process in double.workers.values():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            with closing(double.client()) as client:
                for one in client.containers(all=True, filters={"label": f"runner-tests.double={double.port}"}):
                    with suppress(DockerException):
                        client.remove_container(one["Id"], force=True, v=True)
            double_volumes.unmount(double.folder)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class _Answer(BaseHTTPRequestHandler):
    of: Double
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_DELETE = do_GET

    def _answer(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"null")
        found = _OBJECT.fullmatch(url.path)
        if url.path == "/version":
            major, minor = self.of.told
            self._say(200, {"major": major, "minor": minor, "gitVersion": f"v{major}.{minor}.0-double"})
        elif url.path == _ACCESS:
            wanted = body["spec"]["resourceAttributes"]
            what = "/".join(filter(None, (wanted["resource"], wanted.get("subresource"))))
            self._say(201, {**body, "status": {"allowed": (wanted["verb"], what) not in self.of.denied}})
        elif url.path.startswith("/apis/node.k8s.io/v1/runtimeclasses/"):
            name = url.path.rpartition("/")[2]
            known = name in self.of.classes
            self._say(200, {"handler": self.of.classes[name]}) if known else self._fail(404, "NotFound", name)
        elif url.path.startswith("/apis/storage.k8s.io/v1/storageclasses/"):
            name = url.path.rpartition("/")[2]
            self._say(200, {}) if name in self.of.storage else self._fail(404, "NotFound", name)
        elif url.path == double_sandboxes.GROUP and (group := self.of.sandboxes.group()):
            self._say(200, group)
        elif url.path.startswith("/double/"):
            self.of.control(url.path.rpartition("/")[2], body)
            self._say(200, {})
        elif found is None or found[1] != NAMESPACE or (found[2] == "sandboxes" and not self.of.sandboxes.versions):
            self._fail(404, "NotFound", f"namespaces {found[1] if found else url.path} not found")
        elif found[4]:
            self._exec(found[3], parse_qs(url.query))
        else:
            self._object(found[2], found[3], query, body)

    def _object(self, resource: str, name: str | None, query: dict[str, str], body: Any) -> None:
        if self.command == "POST":
            self._create(resource, query, body)
        elif query.get("watch"):
            self._watch(resource, query["fieldSelector"].partition("=")[2], int(query["resourceVersion"]))
        elif name is None:
            wanted = _labels(query.get("labelSelector", ""))
            about = dict(part.split("=") for part in query.get("fieldSelector", "").split(",") if part)
            with self.of.changed:
                items = [one for (kind, _), one in self.of.objects.items() if kind == resource]
            items = [one for one in items if _has(one["metadata"].get("labels", {}), wanted)]
            named = about.get("involvedObject.name")
            items = [one for one in items if named in (None, one.get("involvedObject", {}).get("name"))]
            self._say(200, {"kind": f"{_KINDS[resource]}List", "items": items})
        elif (resource, name) not in self.of.objects:
            self._fail(404, "NotFound", f'{resource} "{name}" not found')
        elif self.command == "DELETE":
            self._say(200, self.of.delete(resource, name))
        else:
            self._say(200, self.of.objects[resource, name])

    def _create(self, resource: str, query: dict[str, str], body: Any) -> None:
        name = body["metadata"]["name"]
        if resource == "pods" and (why := _unfit(body["spec"])):
            self._fail(403, "Forbidden", f'pods "{name}" is forbidden: violates PodSecurity "restricted:latest": {why}')
        elif resource == "sandboxes" and (why := double_sandboxes.why_unfit(body)):
            self._fail(422, "Invalid", why)
        elif (resource, name) in self.of.objects:
            self._fail(409, "AlreadyExists", f'{resource} "{name}" already exists')
        else:
            body["metadata"]["uid"] = str(uuid.uuid4())
            if "dryRun" not in query:
                if resource == "pods":
                    self.of.add_pod(body)
                else:
                    self.of.put(resource, body)
                if resource == "sandboxes":
                    double_sandboxes.reconcile(self.of, name)
                if resource == "jobs":
                    threading.Thread(target=double_jobs.start, args=(self.of, name), daemon=True).start()
            self._say(201, body)

    def _watch(self, resource: str, name: str, version: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with suppress(OSError):
            while True:
                found = self._next(resource, name, version)
                event = {"type": "MODIFIED", "object": found} if found else {"type": "DELETED", "object": {}}
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.flush()
                if found is None:
                    self.wfile.write(b"0\r\n\r\n")
                    return
                version = int(found["metadata"]["resourceVersion"])

    def _next(self, resource: str, name: str, version: int) -> dict[str, Any] | None:
        """Wait for a newer version of an object; ``None`` once it is gone."""
        with self.of.changed:
            self.of.changed.wait_for(lambda: self._newer(resource, name, version))
            return self.of.objects.get((resource, name))

    def _newer(self, resource: str, name: str, version: int) -> bool:
        found = self.of.objects.get((resource, name))
        return found is None or int(found["metadata"]["resourceVersion"]) > version

    def _exec(self, name: str, query: dict[str, list[str]]) -> None:
        container = _Kubelet(self.of, name).container(query["container"][0])
        with closing(self.of.client()) as client:
            try:
                made = client.exec_create(container, query["command"], stdin=True)["Id"]
                held = client.exec_start(made, socket=True)
            except APIError as error:
                self._fail(404, "NotFound", f"container not found: {error}")
                return
            self.close_connection = True
            self.of.running.add(self.connection)
            with closing(held), closing(held._sock) as inner:
                _pump(self.connection, inner, self._handshake(), lambda: client.exec_inspect(made)["ExitCode"])
            self.of.running.discard(self.connection)

    def _handshake(self) -> WSConnection:
        protocol = WSConnection(ConnectionType.SERVER)
        head = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        protocol.receive_data(f"GET {self.path} HTTP/1.1\r\n{head}\r\n".encode())
        [request] = protocol.events()
        assert isinstance(request, Request)
        self.connection.sendall(protocol.send(AcceptConnection(subprotocol=request.subprotocols[0])))
        return protocol

    def _fail(self, code: int, reason: str, message: str) -> None:
        self._say(code, {"kind": "Status", "status": "Failure", "reason": reason, "message": message, "code": code})

    def _say(self, code: int, body: Any) -> None:
        raw = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def _pump(outer: socket.socket, inner: socket.socket, protocol: WSConnection, exit_code: Any) -> None:
    """Carry input and output of a program until it ends, or the client has gone."""
    lock = threading.Lock()

    def say(channel: int, data: bytes) -> None:
        with lock, suppress(OSError, LocalProtocolError):  # the client has gone
            outer.sendall(protocol.send(BytesMessage(data=bytes([channel]) + data)))

    def feed() -> None:
        with suppress(OSError):
            while data := outer.recv(1 << 18):
                with lock:
                    protocol.receive_data(data)
                    events = [*protocol.events()]
                for event in events:
                    if isinstance(event, BytesMessage):
                        channel, data = _split(event, feeding)
                        if channel == 0:
                            inner.sendall(data)
                    elif isinstance(event, CloseConnection):
                        return
        with suppress(OSError):
            inner.shutdown(socket.SHUT_WR)

    feeding = {"channel": -1}
    inner.settimeout(None)
    outer.settimeout(None)
    thread = threading.Thread(target=feed, daemon=True)
    thread.start()
    with suppress(OSError):
        while head := _exactly(inner, 8):
            kind, size = struct.unpack(">B3xI", head)
            say(kind, _exactly(inner, size))
    code = exit_code()
    causes = {"details": {"causes": [{"reason": "ExitCode", "message": str(code)}]}, "message": f"exit code {code}"}
    say(3, json.dumps({"status": "Failure", **causes} if code else {"status": "Success"}).encode())
    with lock, suppress(OSError, LocalProtocolError):
        outer.sendall(protocol.send(CloseConnection(code=1000)))
    with suppress(OSError):
        outer.shutdown(socket.SHUT_RDWR)


def _split(event: BytesMessage, state: dict[str, int]) -> tuple[int, bytes]:
    data = bytes(event.data)
    if state["channel"] < 0:
        state["channel"], data = data[0], data[1:]
    channel = state["channel"]
    if event.message_finished:
        state["channel"] = -1
    return channel, data


def _exactly(stream: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size and (chunk := stream.recv(size - len(found))):
        found += chunk
    return found


def _labels(selector: str) -> list[tuple[str, set[str]]]:
    """The labels that a selector names, with the values that each may have."""
    found = re.findall(r"([^=, ]+)(?:=([^,]*)| in [(]([^)]*)[)])", selector)
    return [(name, {*several.split(",")} if several else {one}) for name, one, several in found]


def _has(labels: dict[str, str], wanted: list[tuple[str, set[str]]]) -> bool:
    return all(labels.get(name) in values for name, values in wanted)


def _is_of_job(pod: dict[str, Any]) -> bool:
    return any(owner["kind"] == "Job" for owner in pod["metadata"].get("ownerReferences", ()))


def _unfit(spec: dict[str, Any]) -> str | None:
    """Say what of a pod the restricted standard forbids."""
    pod = spec.get("securityContext", {})
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False:
            return "allowPrivilegeEscalation != false"
        if own.get("capabilities", {}).get("drop") != ["ALL"]:
            return "unrestricted capabilities"
    if not pod.get("runAsNonRoot") or not pod.get("runAsUser"):
        return "runAsNonRoot != true"
    if pod.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        return "seccompProfile"
    kinds = {key for volume in spec.get("volumes", ()) for key in volume if key != "name"}
    return (
        None
        if kinds <= {"configMap", "emptyDir", "ephemeral", "persistentVolumeClaim", "secret"}
        else f"volumes {kinds}"
    )


class _Kubelet:
    """What a node does for one pod."""

    def __init__(self, double: Double, name: str) -> None:
        self._double = double
        self._name = name
        self._folder = double.folder / name

    def container(self, name: str) -> str:
        return f"{self._name}-{name}"

    def start(self) -> None:
        with self._double.changed:
            if (pod := self._double.objects.get(("pods", self._name))) is None:
                return  # it is deleted already
            if (missing := double_volumes.missing(self._double, pod)) is not None:
                why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": missing}
                self._double.put("pods", {**pod, "status": {"phase": "Pending", "conditions": [why]}})
                return
            if double_volumes.bind(self._double, pod):
                return  # it waits
            self._double.put("pods", {**pod, "spec": {**pod["spec"], "nodeName": "n1"}})
        with closing(self._double.client()) as client:
            try:
                self._make_volumes(pod["spec"])
                for container in pod["spec"]["initContainers"]:
                    if not self._run(client, container, "initContainerStatuses"):
                        return
                    code = client.wait(self.container(container["name"]))["StatusCode"]
                    self._tell("initContainerStatuses", container["name"], self._ended(client, container["name"]))
                    if code:
                        self._set(phase="Failed")
                        return
                for container in pod["spec"]["containers"]:
                    if not self._run(client, container, "containerStatuses"):
                        return
                    threading.Thread(target=self._wait, args=(container["name"],), daemon=True).start()
                self._set(phase="Running", hostIP="127.0.0.1", conditions=[{"type": "Ready", "status": "True"}])
            except (DockerException, KeyError, FileNotFoundError):
                return  # it was deleted meanwhile

    def _run(self, client: APIClient, container: dict[str, Any], kind: str) -> bool:
        name, spec = container["name"], self._double.objects["pods", self._name]["spec"]
        try:
            image = client.inspect_image(container["image"])
        except APIError:
            waiting = {"reason": "ErrImagePull", "message": f"{container['image']} not found"}
            self._tell(kind, name, {"waiting": waiting})
            return False
        user = f"{spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}"
        limits = container["resources"].get("limits", {})
        host = {
            "NetworkMode": "none",
            "ReadonlyRootfs": True,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "Mounts": [self._mount(spec, mount) for mount in container["volumeMounts"]],
            **(
                {"Memory": _bytes(limits["memory"]), "MemorySwap": _bytes(limits["memory"])}
                if "memory" in limits
                else {}
            ),
            **({"CpuPeriod": 100_000, "CpuQuota": _millis(limits["cpu"]) * 100} if "cpu" in limits else {}),
        }
        config = {
            "Image": image["Id"],
            "User": user,
            "Entrypoint": container["command"],
            "Env": [f"{one['name']}={one['value']}" for one in container["env"]],
            "WorkingDir": "/",
            "Hostname": spec["hostname"],
            "NetworkDisabled": True,
            "Labels": {"runner-tests.double": str(self._double.port)},
            "HostConfig": host,
        }
        client.create_container_from_config(config, self.container(name))
        client.start(self.container(name))
        self._tell(kind, name, {"running": {}}, image["Id"])
        return True

    def _wait(self, name: str) -> None:
        with closing(self._double.client()) as client, suppress(DockerException, KeyError):
            client.timeout = None
            client.wait(self.container(name), timeout=86_400)
            self._tell("containerStatuses", name, self._ended(client, name))

    def _ended(self, client: APIClient, name: str) -> dict[str, Any]:
        state = client.inspect_container(self.container(name))["State"]
        reason = "OOMKilled" if state["OOMKilled"] else "Completed" if state["ExitCode"] == 0 else "Error"
        return {"terminated": {"exitCode": state["ExitCode"], "reason": reason}}

    def _tell(self, kind: str, name: str, state: dict[str, Any], image: str = "") -> None:
        with self._double.changed:
            pod = self._double.objects["pods", self._name]
            known = [one for one in pod["status"].get(kind, ()) if one["name"] != name]
            before: dict[str, Any] = next((one for one in pod["status"].get(kind, ()) if one["name"] == name), {})
            status = {"name": name, "state": state, "imageID": image or before.get("imageID", "")}
            self._set(**{kind: [*known, status]})

    def _set(self, **status: Any) -> None:
        with self._double.changed:
            pod = self._double.objects["pods", self._name]
            self._double.put("pods", {**pod, "status": {**pod["status"], **status}})

    def delete(self) -> None:
        with closing(self._double.client()) as client:
            pod = self._double.objects["pods", self._name]
            for container in (*pod["spec"]["containers"], *pod["spec"]["initContainers"]):
                with suppress(DockerException):
                    client.kill(self.container(container["name"]), signal="TERM")
            for container in (*pod["spec"]["containers"], *pod["spec"]["initContainers"]):
                with suppress(DockerException):
                    client.stop(self.container(container["name"]), timeout=1)
                with suppress(DockerException):
                    client.remove_container(self.container(container["name"]), force=True, v=True)
        double_volumes.unmount(self._folder)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._double.remove("pods", self._name)

    def _make_volumes(self, spec: dict[str, Any]) -> None:
        self._folder.mkdir(mode=0o711)
        for volume in spec["volumes"]:
            place = self._folder / volume["name"]
            place.mkdir()
            place.chmod(0o777)
            if "ephemeral" in volume:
                double_volumes.mount(self._double, spec, volume, place)
            if "configMap" in volume:
                found = self._double.objects["configmaps", volume["configMap"]["name"]]
                for name, content in found.get("binaryData", {}).items():
                    (place / name).write_bytes(base64.b64decode(content))
                    (place / name).chmod(volume["configMap"]["defaultMode"])

    def _mount(self, spec: dict[str, Any], mount: dict[str, Any]) -> dict[str, Any]:
        [volume] = (one for one in spec["volumes"] if one["name"] == mount["name"])
        source, target = self._folder / mount["name"], mount["mountPath"]
        if claim := volume.get("persistentVolumeClaim"):
            source = self._double.folder / f"claim-{claim['claimName']}"
        if mount.get("subPath"):
            source /= mount["subPath"]
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            options = {"SizeBytes": int(volume["emptyDir"]["sizeLimit"]), "Mode": 0o777}
            return {"Type": "tmpfs", "Target": target, "TmpfsOptions": options}
        if not source.exists():  # as a kubelet does
            source.mkdir()
            source.chmod(0o777)
        read_only = bool(mount.get("readOnly"))
        return {"Type": "bind", "Source": str(source), "Target": target, "ReadOnly": read_only}


def _bytes(text: str) -> int:
    return int(text.removesuffix("Mi")) << 20 if text.endswith("Mi") else int(text)


def _millis(text: str) -> int:
    return int(text.removesuffix("m")) if text.endswith("m") else int(text) * 1000


if __name__ == "__main__":  # a process of its own, up to the end of its input
    with serving(sys.argv[1]) as made:
        print(made.kubeconfig(), flush=True)
        sys.stdin.read()
