"""The real server in a process of its own, and requests to it over its socket."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from runner.core.settings import Settings
from runner.ops.host import tokens
from runner.ops.host.state import make_home, open_state
from tests.support.situations import Project


def create_token(settings: Settings, name: str, scopes: tuple[str, ...]) -> str:
    async def create() -> str:
        make_home(settings)
        async with open_state(settings) as store:
            return await tokens.create_token(store, name, scopes)

    return trio.run(create)


class Connection(http.client.HTTPConnection):
    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass
class Answer:
    status: int
    headers: http.client.HTTPMessage
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def code(self) -> str:
        """The code of a refusal."""
        assert self.headers["content-type"] == "application/problem+json", self.raw
        return str(self.json["code"])


@dataclass
class Served:
    """A server that runs; ``token`` may do everything."""

    project: Project
    process: subprocess.Popen[str]
    token: str
    url: str

    @property
    def socket(self) -> Path:
        return self.project.home / "state" / "server.sock"

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        token: str | None = None,
        headers: dict[str, str] | None = None,
        seconds: float = 60,
    ) -> Answer:
        connection = self.send(method, path, body, token=token, headers=headers, seconds=seconds)
        try:
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()

    def send(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        token: str | None = None,
        headers: dict[str, str] | None = None,
        seconds: float = 60,
    ) -> http.client.HTTPConnection:
        """Send a request whose answer nobody has read yet. A body that is no text is sent as JSON."""
        connection = (
            http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=seconds)
            if self.url.startswith("http:")
            else Connection(self.socket, seconds)
        )
        raw = body if body is None or isinstance(body, str | bytes) else json.dumps(body)
        sent = {"Authorization": f"Bearer {self.token if token is None else token}"}
        sent |= {"Content-Type": "application/json"} if body is not None else {}
        with suppress(BrokenPipeError):  # of a server that has refused the request by its head
            connection.request(method, path, raw, {**sent, **(headers or {})})
        return connection

    def get(self, path: str, **more: Any) -> Any:
        answer = self.ask("GET", f"/api/v1{path}", **more)
        assert answer.status == 200, answer.raw
        return answer.json

    def post(self, path: str, body: object = None, **more: Any) -> Any:
        answer = self.ask("POST", f"/api/v1{path}", {} if body is None else body, **more)
        assert answer.status in (200, 201, 202), answer.raw
        return answer.json

    def refused(self, method: str, path: str, body: object = None, **more: Any) -> tuple[int, str]:
        answer = self.ask(method, f"/api/v1{path}", body, **more)
        return answer.status, answer.code

    def tool(self, workspace: str, tool: str, **arguments: Any) -> Any:
        return self.post(f"/workspaces/{workspace}/tools/{tool}", arguments)


@contextmanager
def serving(
    project: Project, *options: str, token: str = "tests", says: Sequence[str] | None = (), ends: int = 0
) -> Iterator[Served]:
    """A server with the home of a project; it has to end by itself when it is told to, having said these codes.

    ``None`` stands for any.
    """
    store = {name: value for name, value in project.env.items() if name == "RUNNER_DATABASE_URL"}
    secret = create_token(project.settings(**store), token, ("admin",))
    process = project.start("serve", *options)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("listening on "), process.communicate()
    try:
        yield Served(project, process, secret, line.removeprefix("listening on ").strip())
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            out, err = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    codes = re.findall(r"^\w+\[(.+?)\]", err, re.MULTILINE)
    assert (process.returncode, out, codes) == (ends, "", codes if says is None else [*says]), err
    assert "Traceback" not in err, err
