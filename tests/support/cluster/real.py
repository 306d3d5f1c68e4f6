"""A real cluster on this machine: etcd, an API server, a scheduler, controllers, and a kubelet on a docker daemon.

Each test process that asks has one, with an address of its own for its only node. Pods get an interface that leads
nowhere (``cni.sh``), since no network plug-in that enforces policies runs here; those of Jobs reach the node.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.support import components, dockerd
from tests.support.git_servers import free_port
from tests.support.kubernetes import certificates
from tests.support.needs import Component

NAMESPACE, CONTEXT = "agents", "built"
PAUSE = "runner-tests-pause:1"
_READY = 120.0  # seconds
_HERE = Path(__file__).parent
_CONTROLLERS = (
    "--controllers=namespace,serviceaccount,serviceaccount-token,garbagecollector,job,podgc,nodelifecycle,"
    "statefulset,endpoint,persistentvolume-binder,pvc-protection,pv-protection,ephemeral-volume,disruption",
)
_GATES = "--feature-gates=GenericEphemeralVolume=true"  # newer ones have it without being told


def _missing() -> str | None:
    if why := dockerd.missing():
        return why
    return None if components.cluster_is_here() else f"not built in {components.CLUSTER}"


CLUSTER = Component("Kubernetes", _missing, f"{components.COMMAND} --cluster")


class Cluster:
    """The processes of a cluster. ``kubeconfig`` is of its administrator."""

    def __init__(self, folder: Path, daemon: dockerd.Daemon) -> None:
        self.folder = folder
        self.daemon = daemon
        self.port = free_port()
        self.kubeconfig = folder / "config"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._interface = f"rk{os.getpid()}"
        self.address = f"10.213.{os.getpid() // 254 % 254}.{os.getpid() % 254 + 1}"
        self._etcd = free_port()
        self.token = secrets.token_hex(16)

    @contextmanager
    def reached(self, *ports: int) -> Iterator[None]:
        """Let pods that reach their node, as workers of Jobs do, reach ports of this host's loopback there."""
        with ExitStack() as stack:
            for port in ports:
                listener = stack.enter_context(socket.create_server((self.address, port)))
                stack.callback(listener.shutdown, socket.SHUT_RDWR)
                threading.Thread(target=_forward, args=(listener, port), daemon=True).start()
            yield

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def start(self) -> None:
        certificates(self.folder, f"127.0.0.1,IP:{self.address}")
        key = self.folder / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        (self.folder / "tokens").write_text(f"{self.token},admin,admin,system:masters\n")
        self.write_kubeconfig(self.kubeconfig, self.token)
        for words in (["add", self._interface, "type", "bridge"], ["set", self._interface, "up"]):
            subprocess.run(["ip", "link", *words], check=True)
        subprocess.run(["ip", "address", "add", f"{self.address}/32", "dev", self._interface], check=True)
        network = self.folder / "network"
        network.mkdir()
        for name in ("closed", "loopback"):
            shutil.copy(_HERE / "cni.sh", network / name)
        (network / "net.conf").write_text(json.dumps({"cniVersion": "0.3.1", "name": "closed", "type": "closed"}))
        self.start_etcd()
        self.start_server()
        for name in ("kube-scheduler", "kube-controller-manager"):
            own = ("--port=0", "--secure-port=0", f"--kubeconfig={self.kubeconfig}", "--leader-elect=false")
            accounts = (f"--service-account-private-key-file={key}", f"--root-ca-file={self.folder / 'ca.pem'}")
            more = (*accounts, *_CONTROLLERS) if "controller" in name else ()
            self._spawn(name, [*own, *more])
        self.start_kubelet()
        self.wait("node", self._is_ready)
        self.make_namespace(NAMESPACE)
        (network / "workers").write_text(self.address)

    def make_namespace(self, name: str) -> None:
        """Make one that takes pods: they need its default account."""
        self.kubectl("create", "namespace", name)
        self.wait("account", lambda: "secrets:" in self.kubectl("get", "sa", "default", "-n", name, "--output=yaml"))

    def _is_ready(self) -> bool:
        found = self.kubectl("get", "node", "n1", "--output=json")
        conditions = json.loads(found)["status"].get("conditions", ()) if found else ()
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def open_network(self) -> None:
        """From now on pods reach their node, whatever a policy says."""
        (self.folder / "network" / "open").write_text(self.address)

    def close_network(self) -> None:
        (self.folder / "network" / "open").unlink()

    def start_etcd(self) -> None:
        url = f"http://127.0.0.1:{self._etcd}"
        peer = f"http://127.0.0.1:{free_port()}"
        places = (f"--listen-client-urls={url}", f"--advertise-client-urls={url}", f"--listen-peer-urls={peer}")
        self._spawn("etcd", [f"--data-dir={self.folder / 'etcd'}", *places, "--unsafe-no-fsync"])

    def start_server(self) -> None:
        key = self.folder / "accounts.key"
        words = [
            f"--etcd-servers=http://127.0.0.1:{self._etcd}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={key}",
            f"--service-account-key-file={key}",
            "--service-cluster-ip-range=10.215.0.0/24",
            f"--cert-dir={self.folder / 'generated'}",
            f"--tls-cert-file={self.folder / 'server.pem'}",
            f"--tls-private-key-file={self.folder / 'server.key'}",
            f"--secure-port={self.port}",
            f"--token-auth-file={self.folder / 'tokens'}",
            *("--bind-address=127.0.0.1", "--insecure-port=0", "--authorization-mode=RBAC"),
            "--kubelet-preferred-address-types=InternalIP",
        ]
        self._spawn("kube-apiserver", words)
        self.wait("API server", lambda: self.kubectl("get", "--raw=/readyz") == "ok")

    def start_kubelet(self) -> None:
        words = [
            f"--kubeconfig={self.kubeconfig}",
            f"--docker-endpoint={self.daemon.host}",
            f"--pod-infra-container-image={PAUSE}",
            f"--node-ip={self.address}",
            f"--address={self.address}",
            f"--root-dir={self.folder / 'kubelet'}",
            f"--cert-dir={self.folder / 'kubelet-certificates'}",
            f"--cni-bin-dir={self.folder / 'network'}",
            f"--cni-conf-dir={self.folder / 'network'}",
            f"--cni-cache-dir={self.folder / 'network-cache'}",
            f"--seccomp-profile-root={self.folder / 'seccomp'}",
            *("--container-runtime=docker", "--network-plugin=cni", "--cgroup-driver=cgroupfs"),
            *("--cgroups-per-qos=false", "--enforce-node-allocatable=", "--fail-swap-on=false"),
            *("--hostname-override=n1", "--authorization-mode=AlwaysAllow", "--anonymous-auth=true"),
            *("--runtime-cgroups=/", "--kubelet-cgroups=/", "--healthz-port=0"),
            *("--eviction-hard=memory.available<1Mi", "--register-node=true", "--max-pods=200"),
        ]
        self._spawn("kubelet", words)

    def _spawn(self, name: str, words: Sequence[str]) -> None:
        program, gates = str(components.CLUSTER / "bin" / name), () if name == "etcd" else (_GATES,)
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [program, *words, *gates], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        process = self.processes.pop(name)
        process.send_signal(number)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def end(self) -> None:
        for name in ("kubelet", "kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd"):
            if name in self.processes:
                self.stop(name)
        subprocess.run(["ip", "link", "delete", self._interface], check=False, stderr=subprocess.DEVNULL)
        with self.daemon.client() as client:
            for one in client.containers(all=True):
                client.remove_container(one["Id"], force=True, v=True)
        mounts = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for point in sorted((point for point in mounts if point.startswith(f"{self.folder}/")), reverse=True):
            subprocess.run(["umount", "--lazy", point], check=False)

    def kubectl(self, *words: str) -> str:
        """Answer of the administrator's kubectl; nothing when it fails."""
        env = {"PATH": os.environ["PATH"], "KUBECONFIG": str(self.kubeconfig), "HOME": str(self.folder)}
        program = str(components.KUBECTL / "bin" / "kubectl")
        return subprocess.run([program, *words], check=False, capture_output=True, text=True, env=env).stdout

    def wait(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _READY
        while not holds():
            dead = [name for name, process in self.processes.items() if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                logs = "\n".join((self.folder / f"{name}.log").read_text()[-3000:] for name in dead or self.processes)
                raise RuntimeError(f"the cluster's {what} does not start; ended: {dead}\n{logs}")
            time.sleep(0.2)

    def write_kubeconfig(self, file: Path, token: str) -> None:
        authority = b64encode((self.folder / "ca.pem").read_bytes()).decode()
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": CONTEXT,
            "contexts": [{"name": CONTEXT, "context": {"cluster": "built", "user": "me", "namespace": NAMESPACE}}],
            "clusters": [
                {"name": "built", "cluster": {"server": self.server, "certificate-authority-data": authority}}
            ],
            "users": [{"name": "me", "user": {"token": token}}],
        }
        file.touch(mode=0o600)
        file.write_text(json.dumps(document))


def _forward(listener: socket.socket, port: int) -> None:
    with suppress(OSError):  # it is shut down
        while True:
            outer, _ = listener.accept()
            threading.Thread(target=_pass, args=(outer, port), daemon=True).start()


def _pass(outer: socket.socket, port: int) -> None:
    with outer, suppress(OSError), socket.create_connection(("127.0.0.1", port)) as inner:
        back = threading.Thread(target=_carry, args=(inner, outer), daemon=True)
        back.start()
        _carry(outer, inner)
        back.join()


def _carry(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@contextmanager
def running() -> Iterator[Cluster]:
    """A cluster for as long as the block lasts."""
    CLUSTER.require()
    with (
        tempfile.TemporaryDirectory(prefix="runner-tests-cluster-", ignore_cleanup_errors=True) as folder,
        dockerd.mortal("cluster") as daemon,
        daemon.client() as client,
    ):
        Path(folder).chmod(0o711)
        repository, _, tag = PAUSE.partition(":")
        client.import_image_from_data(
            dockerd.root_file_system(), repository=repository, tag=tag, changes=['CMD ["sleep", "infinity"]']
        )
        cluster = Cluster(Path(folder), daemon)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.end()
