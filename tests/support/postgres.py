"""A PostgreSQL server of the tests' own, and a proxy before it that cuts connections.

One serves a test process from its first use to its end. Root starts it as user ``postgres``, since it refuses root.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
import threading
from contextlib import closing, suppress
from functools import cache
from itertools import count
from pathlib import Path

import psycopg
import trio

from runner.store import open_store
from tests.support.components import postgres_programs
from tests.support.git_servers import free_port

_USER = "postgres"
_TEMPLATE = "runner_template"
_numbers = count(1)


class Server:
    """A server on loopback and a Unix socket in ``folder``. ``--no-sync``: none of these tests cuts the power."""

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

    def start(self) -> None:
        settings = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": self.folder,
            "fsync": "off",
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


@cache
def server() -> Server:
    """The server of this process, started by the first that asks."""
    folder = Path(tempfile.mkdtemp(prefix="runner-tests-postgres-"))
    made = Server(folder)
    made.start()

    def end() -> None:
        if os.getpid() == owner:  # and no child that was forked
            with suppress(subprocess.CalledProcessError):
                made.stop()
            shutil.rmtree(folder)

    owner = os.getpid()
    atexit.register(end)
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
