"""Dependencies that commands make, in whole runs: made once, then given to later runs and to verify."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.support.situations import REPO, Project, commit, step

THERE = "127.0.0.2"  # programs reach 127.0.0.1 without a proxy
MADE = """
  - run: {run}
    from: [requirements.txt]
    keep: [{keep}]
"""
PIP = "python3 -m venv .venv && .venv/bin/pip install --index-url http://{place}/simple -r requirements.txt"
FETCH = (
    "python3 -c \"import os, urllib.request as r; os.makedirs('lib');"
    " open('lib/data', 'wb').write(r.urlopen('http://{place}/data').read())\""
)


class Index(ThreadingHTTPServer):
    """A package index with one wheel; ``asked`` are the paths that were asked for."""

    def __init__(self) -> None:
        super().__init__((THERE, 0), Handler)
        self.asked: list[str] = []

    @property
    def place(self) -> str:
        return f"{THERE}:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        name = "left_pad-1.0-py3-none-any.whl"
        body = {"/simple/left-pad/": f'<a href="/{name}">{name}</a>'.encode(), f"/{name}": _wheel(), "/data": b"data"}
        self.send_response(200 if self.path in body else 404)
        self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/zip")
        self.send_header("Content-Length", str(len(body.get(self.path, b""))))
        self.end_headers()
        self.wfile.write(body.get(self.path, b""))

    def log_message(self, format: str, *args: object) -> None:
        pass


def _wheel() -> bytes:
    file = io.BytesIO()
    about = "left_pad-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr("left_pad.py", "pad = 'padded'\n")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: left-pad\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    return file.getvalue()


@pytest.fixture
def index() -> Iterator[Index]:
    with Index() as server:
        Thread(target=server.serve_forever).start()
        yield server
        server.shutdown()


@pytest.fixture
def repo(repository: Path) -> Path:
    (repository / ".gitignore").write_text(".venv\nlib\n")
    (repository / "requirements.txt").write_text("left-pad==1.0\n")
    commit(repository)
    return repository


def manifest(project: Project, index: Index, run: str, keep: str, script: str, *, provider: str = "local") -> None:
    """An agent that has no network itself, and checks that run its script again."""
    made = MADE.format(run=json.dumps(run.format(place=index.place)), keep=keep)
    allowed = f"network: {{dependencies: {{allow: [{{host: '{index.place}', private: true}}]}}}}"
    project.script(
        script,
        workspace=f"{REPO}\n{allowed}\ndependencies:{made}",
        run=f"verify: {{commands: [{{run: {json.dumps(script)}}}]}}",
        provider=provider,
    )


def layers(project: Project) -> list[Path]:
    return [path for path in (project.home / "state" / "dependencies").glob("*") if path.is_dir()]


@pytest.mark.slow
def test_pip_installs_once_and_the_next_runs_need_no_network(project: Project, index: Index, repo: Path) -> None:
    manifest(project, index, PIP, ".venv", ".venv/bin/python -c 'import left_pad; print(left_pad.pad)'")
    assert ".venv (to be made)" in " ".join(project.runner("plan", ".").out.split())

    first = project.succeed()
    asked = len(index.asked)
    assert "padded" in project.logs("agent")
    assert ".venv (kept)" in " ".join(project.runner("plan", ".").out.split())
    second = project.succeed()

    assert asked > 0
    assert len(index.asked) == asked
    assert [use["place"] for use in first["network"]] == [index.place]
    assert second["network"] == []
    assert step(second, "dependencies")["outcome"]["message"].startswith(f".venv kept from run {first['id']}, ")
    assert [path.name for path in layers(project)] == [layers(project)[0].name]
