"""An ssh server of the tests' own on the loopback, for one ordinary user whose account exists only for it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runner.testing.outside import descendants
from tests.support.dockerd import Daemon

NAME = "runner-tests"
_CONFIG = """
Port {port}
ListenAddress 127.0.0.1
HostKey {root}/host_key
PidFile none
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
AuthorizedKeysFile {root}/home/.ssh/authorized_keys
SetEnv DOCKER_HOST={docker}
"""
# Whoever enters sees an account that this host does not have.
_ENTER = """
mount --make-rslave / && mount --bind "$1/passwd" /etc/passwd && mount --bind "$1/group" /etc/group || exit
mkdir -p /run/sshd; shift; exec "$@"
"""


class SshServer:
    """Reached as ``host`` by programs that are started ``within``, which makes them the user ``uid``."""

    def __init__(self, root: Path, uid: int) -> None:
        self.root = root
        self.pid = 0
        self.home = root / "home"
        enter = ("unshare", "--mount", "sh", "-c", _ENTER, "sh", str(root))
        become = ("setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups")
        self.enter, self.within = enter, (*enter, *become)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.host = f"ssh://{NAME}@127.0.0.1:{self.port}"

    def break_connections(self) -> None:
        """End what serves the open connections; new ones are served."""
        for pid in descendants(self.pid):
            with suppress(ProcessLookupError):  # it went with another
                os.kill(pid, signal.SIGKILL)

    def know_host(self) -> None:
        """Let the user's ssh know the server."""
        key = " ".join((self.root / "host_key.pub").read_text().split()[:2])
        (self.home / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {key}\n")


@contextmanager
def ssh_server(root: Path, daemon: Daemon, uid: int) -> Iterator[SshServer]:
    """A server whose user ``uid`` uses a daemon."""
    server = SshServer(root, uid)
    keys = server.home / ".ssh"
    keys.mkdir(parents=True)
    root.chmod(0o755)
    for path in (root / "host_key", keys / "id_ed25519"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    (keys / "authorized_keys").write_text((keys / "id_ed25519.pub").read_text())
    others = [line for line in Path("/etc/passwd").read_text().splitlines() if line.split(":")[2] != str(uid)]
    account = f"{NAME}:x:{uid}:{uid}::{server.home}:/bin/sh"
    (root / "passwd").write_text("\n".join([*others, account, ""]))
    shutil.copy("/etc/group", root / "group")
    (root / "sshd_config").write_text(_CONFIG.format(port=server.port, root=root, docker=f"unix://{daemon.socket}"))
    for path in (server.home, *server.home.rglob("*")):
        os.chown(path, uid, uid)
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin") or "sshd"
    with (root / "log").open("wb") as log:
        process = subprocess.Popen([*server.enter, sshd, "-D", "-e", "-f", str(root / "sshd_config")], stderr=log)
    server.pid = process.pid
    try:
        _wait(server, process)
        yield server
    finally:
        process.kill()
        process.wait()


def _wait(server: SshServer, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while True:
        with socket.socket() as look:
            if look.connect_ex(("127.0.0.1", server.port)) == 0:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"sshd does not start:\n{(server.root / 'log').read_text()}")
        time.sleep(0.02)
