"""A PostgreSQL server of the tests' own, and a proxy before it that cuts connections.

One serves a test process from its first use to its end. Root starts it as user ``postgres``, since it refuses root.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path

import psycopg
import trio

from runner.store import open_store
from tests.support.components import postgres_programs
from tests.support.git_servers import free_port, wait_for_port
from tests.support.needs import ADMINISTRATORS_PATH

_USER = "postgres"
_TEMPLATE = "runner_template"
_numbers = count(1)


class Server:
    """A server on loopback and a Unix socket in ``folder``."""

    def __init__(self, folder: Path) -> None:
        programs = postgres_programs()
        assert programs is not None
        self.folder = folder
        self.port = free_port()
        self._programs = programs
        self._user = {"user": _USER, "group": _USER} if os.geteuid() == 0 else {}
        if self._user:
            shutil.chown(folder, _USER, _USER)
        self._run("initdb", "--no-sync", "--auth=trust", f"--username={_USER}", "--encoding=UTF8", "--locale=C.UTF-8")

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), "-D", str(self.folder / "data"), *arguments]
        with (self.folder / "log").open("ab") as log:
            subprocess.run(command, check=True, cwd="/", stdout=log, stderr=log, stdin=subprocess.DEVNULL, **self._user)

    def start(self, *, durable: bool = False) -> None:
        """Start it; unless ``durable``, what a power cut would lose is not flushed."""
        settings = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": self.folder,
            "fsync": "on" if durable else "off",
            "max_connections": 200,
        }
        options = " ".join(f"-c {name}={value}" for name, value in settings.items())
        self._run("pg_ctl", "-w", "-s", "-o", options, "start")

    def stop(self, how: str = "immediate") -> None:
        self._run("pg_ctl", "-w", "-s", "-m", how, "stop")

    def restart(self) -> None:
        """Kill it and start it again, as a crash and a supervisor do."""
        self.stop()
        self.start()

    @property
    def pid(self) -> int:
        return int((self.folder / "data" / "postmaster.pid").read_text().split()[0])

    def url(self, database: str, port: int | None = None) -> str:
        return f"postgresql://{_USER}@127.0.0.1:{port or self.port}/{database}"

    def execute(self, query: str, database: str = "postgres") -> list[tuple[object, ...]]:
        with closing(psycopg.connect(self.url(database), autocommit=True)) as connection:
            cursor = connection.execute(query.encode())
            return cursor.fetchall() if cursor.description else []

    def database(self, template: str = "template0") -> str:
        name = f"test_{next(_numbers)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name


@contextmanager
def running(*, durable: bool = False) -> Iterator[Server]:
    """A server that nobody else uses."""
    with tempfile.TemporaryDirectory(prefix="runner-tests-postgres-") as folder:
        made = Server(Path(folder))
        made.start(durable=durable)
        try:
            yield made
        finally:
            made.stop()


@cache
def server() -> Server:
    """The server of this process, started by the first that asks."""
    held = ExitStack()
    made = held.enter_context(running())
    owner = os.getpid()
    atexit.register(lambda: held.close() if os.getpid() == owner else None)  # else a child that was forked
    return made


@cache
def _template() -> str:
    name = server().database()

    async def migrate() -> None:
        async with open_store(server().url(name)):
            pass

    thread = threading.Thread(target=lambda: trio.run(migrate))  # beside the loop of a test
    thread.start()
    thread.join()
    return name


def fresh_url() -> str:
    """A store of its own, with its tables."""
    return server().url(server().database(_template()))


class Cutter:
    """A proxy before a server that cuts the connection of a commit, once for each of its ``plan``, in turn.

    ``before`` loses what was sent, ``after`` the answer of the server.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self.plan: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.cut: list[str] = []

    def __enter__(self) -> Cutter:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server.port))
                silent = threading.Event()
                threading.Thread(target=self._forward, args=(client, server, silent), daemon=True).start()
                threading.Thread(target=self._answer, args=(server, client, silent), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket, silent: threading.Event) -> None:
        with client, server, suppress(OSError):
            while data := client.recv(65_536):
                if re.search(rb"COMMIT[;\0]", data) and self.plan:  # no isolation level
                    self.cut.append(self.plan.pop(0))
                    if self.cut[-1] == "before":
                        for end in (client, server):  # which the other thread keeps open
                            end.shutdown(socket.SHUT_RDWR)
                        return
                    silent.set()
                server.sendall(data)

    def _answer(self, server: socket.socket, client: socket.socket, silent: threading.Event) -> None:
        with suppress(OSError):
            while data := server.recv(65_536):
                if silent.is_set():  # the server has answered: what it was to do is done
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(data)


@contextmanager
def pooler(server: Server) -> Iterator[int]:
    """The port of a pgbouncer that gives each transaction any of two connections."""
    port, folder = free_port(), server.folder
    (folder / "users").write_text(f'"{_USER}" ""\n')
    (folder / "pgbouncer.ini").write_text(
        f"[databases]\n* = host=127.0.0.1 port={server.port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"
        f"listen_port = {port}\nunix_socket_dir =\nauth_type = trust\nauth_file = {folder}/users\n"
        "pool_mode = transaction\ndefault_pool_size = 2\nmax_client_conn = 100\n"
    )
    program = shutil.which("pgbouncer", path=ADMINISTRATORS_PATH)
    assert program is not None
    user: dict[str, str] = {"user": _USER, "group": _USER} if os.geteuid() == 0 else {}
    with subprocess.Popen(
        [program, str(folder / "pgbouncer.ini")], cwd="/", stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, **user
    ) as process:
        try:
            wait_for_port(port)
            yield port
        finally:
            process.terminate()
