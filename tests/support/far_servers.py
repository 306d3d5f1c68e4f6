"""Servers in a network namespace of their own, with a name server: packages of each kind, git over https and ssh.

``python -m tests.support.far_servers FOLDER ADDRESS`` serves, inside of it, the files of ``FOLDER/www``, the
repositories of ``FOLDER/git`` and their files of LFS in ``FOLDER/lfs``.
"""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread

from tests.support.git_servers import Handler, Server, lfs_server
from tests.support.needs import ADMINISTRATORS_PATH
from tests.support.situations import until

DOMAIN = "far.test"
_TYPES = {".html": "text/html", ".json": "application/json"}


@contextmanager
def far_servers(folder: Path, more: Mapping[int, Sequence[str]] | None = None) -> Iterator[str]:
    """Serve every name below ``DOMAIN`` from ``folder``; yield their address, which ``resolv.conf`` has.

    ``more`` are commands of other servers, by their port.
    """
    for part in ("git", "lfs"):
        (folder / part).mkdir(exist_ok=True)
    name, number = f"runner-f{os.getpid()}", os.getpid() % (1 << 14) * 4
    near, far = (f"10.232.{number >> 8}.{number + end & 255}" for end in (1, 2))
    _certificate(folder)
    for kind in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / kind)], check=True)
    try:
        for words in (
            f"netns add {name}",
            f"link add {name[:15]} type veth peer name eth0 netns {name}",
            f"addr add {near}/30 dev {name[:15]}",
            f"link set {name[:15]} up",
            f"-n {name} addr add {far}/30 dev eth0",
            f"-n {name} link set eth0 up",
            f"-n {name} link set lo up",
        ):
            subprocess.run(["ip", *words.split()], check=True)
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        (folder / "sshd_config").write_text(
            f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nPidFile none\n"
            "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n"
        )
        sshd = shutil.which("sshd", path=ADMINISTRATORS_PATH)
        servers: dict[int, Sequence[str]] = {
            22: [str(sshd), "-D", "-f", str(folder / "sshd_config")],
            443: [sys.executable, "-m", __name__, str(folder), far],
            **(more or {}),
        }
        (folder / "resolv.conf").write_text(f"nameserver {far}\n")
        with ExitStack() as ends:
            for words in servers.values():
                process = ends.enter_context(subprocess.Popen(["ip", "netns", "exec", name, *words]))
                ends.callback(process.terminate)
            until(lambda: all(_answers(far, port) for port in (80, *servers)))
            yield far
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)


def _answers(address: str, port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(1)
        return client.connect_ex((address, port)) == 0


def _certificate(folder: Path) -> None:
    """Make an authority and what it certifies: strict clients take no certificate for both."""
    new = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    signed = ["-CA", "authority.pem", "-CAkey", "authority.key", "-addext", f"subjectAltName=DNS:*.{DOMAIN}"]
    for name, more in (("authority", []), ("server", [*signed, "-addext", "basicConstraints=critical,CA:FALSE"])):
        words = [*new, "-subj", f"/CN={name}.{DOMAIN}", "-keyout", f"{name}.key", "-out", f"{name}.pem", *more]
        subprocess.run(words, check=True, capture_output=True, cwd=folder)


def _resolve(address: str) -> None:
    """Answer for IPv4 addresses of names below the domain; whatever else is asked for is not there."""
    with socket.socket(type=socket.SOCK_DGRAM) as server:
        server.bind((address, 53))
        while True:
            query, client = server.recvfrom(512)
            end = query.index(b"\0", 12)
            known = query[12:end].lower().endswith(b"\x03far\x04test")
            wanted = known and query[end + 1 : end + 3] == b"\0\x01"
            flags = b"\x81\x80" if known else b"\x81\x83"
            head = query[:2] + flags + b"\0\x01" + bytes([0, wanted]) + bytes(4)
            record = b"\xc0\x0c\0\x01\0\x01" + (60).to_bytes(4) + b"\0\x04" + socket.inet_aton(address)
            server.sendto(head + query[12 : end + 5] + record * wanted, client)


def main(folder: Path, address: str) -> None:
    """Serve until the end."""

    of_lfs = lfs_server([file.read_bytes() for file in (folder / "lfs").iterdir()])

    def answer(request: Handler) -> bool:
        if of_lfs(request):
            return True
        path = request.path.partition("?")[0]
        if path.startswith("/git/"):
            request.path = request.path.removeprefix("/git")
            return False
        file = folder / "www" / path.lstrip("/")
        file = file / "index.html" if file.is_dir() else file
        body = file.read_bytes() if file.is_file() else b""
        kind = _TYPES.get(file.suffix, "application/octet-stream")
        request.start(200 if file.is_file() else 404, Content_Type=kind, Content_Length=str(len(body)))
        request.wfile.write(body)
        return True

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    for port in (80, 443):
        server = Server((address, port), Handler)
        server.root, server.seen, server.answer = folder / "git", [], answer
        if port == 443:
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        Thread(target=server.serve_forever, daemon=True).start()
    _resolve(address)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
