"""A docker daemon that shares no file and no network with this host but a wire, and asks for certificates."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.dockerd import Daemon
from tests.support.kubernetes import certificates

_PORT = 2376


class RemoteDaemon(Daemon):
    """Reached as ``host`` with the client's certificate in ``certificates``; it does not see what ``hidden`` holds."""

    def __init__(self, root: Path, hidden: Path) -> None:
        super().__init__(root)
        number = os.getpid() % (1 << 14) * 4
        self._name = f"runner-r{os.getpid()}"
        self._near, self._far = (f"10.231.{number >> 8}.{number + end & 255}" for end in (1, 2))
        self.host = f"tcp://{self._far}:{_PORT}"
        self.certificates = root / "client"
        hide = f'mount --make-rslave / && mount -t tmpfs hidden {hidden} && exec "$@"'
        enter = ("nsenter", f"--net=/run/netns/{self._name}", "unshare", "--mount")
        self.apart = (*enter, "sh", "-c", hide, "sh")
        self.listening = (
            *("--host", self.host, "--tlsverify", f"--tlscacert={root / 'ca.pem'}"),
            *(f"--tlscert={root / 'server.pem'}", f"--tlskey={root / 'server.key'}"),
        )

    def start(self, bridge: str | None = None) -> None:
        certificates(self.root, self._far)
        self.certificates.mkdir()
        for name, target in (("ca.pem", "ca.pem"), ("cert.pem", "client.pem"), ("key.pem", "client.key")):
            (self.certificates / name).write_bytes((self.root / target).read_bytes())
        wire = self._name[:15]
        for words in (
            f"netns add {self._name}",
            f"link add {wire} type veth peer name eth0 netns {self._name}",
            f"addr add {self._near}/30 dev {wire}",
            f"link set {wire} up",
            f"-n {self._name} addr add {self._far}/30 dev eth0",
            f"-n {self._name} link set eth0 up",
            f"-n {self._name} link set lo up",
        ):
            subprocess.run(["ip", *words.split()], check=True)
        super().start(bridge)

    def stop(self) -> None:
        super().stop()
        subprocess.run(["ip", "netns", "del", self._name], check=False)


@contextmanager
def remote_daemon(root: Path, hidden: Path) -> Iterator[RemoteDaemon]:
    daemon = RemoteDaemon(root, hidden)
    try:
        daemon.start()
        daemon.make_image()
        yield daemon
    finally:
        daemon.stop()
