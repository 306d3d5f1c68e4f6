"""An editor, by the language server that editors run: it finds the schemas that ``init`` writes, offline."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.needs import program as needs_program
from tests.support.situations import Project, git

SERVER = "yaml-language-server@1.25.0"
LIMIT = 20.0  # seconds for an answer


@pytest.fixture
def program(request: pytest.FixtureRequest) -> Path:
    """The server from npm, installed once and kept."""
    folder = Path(request.config.cache.mkdir(SERVER.replace("@", "-")))
    program = folder / "node_modules" / ".bin" / "yaml-language-server"
    if not program.exists():
        quiet = ("--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
        needs_program("npm").require()
        subprocess.run(["npm", "install", *quiet, "--prefix", str(folder), SERVER], check=True)
    return program


class Editor:
    """A client of the language server: JSON-RPC over its standard input and output."""

    def __init__(self, process: subprocess.Popen[bytes], root: Path) -> None:
        self._process = process
        self._root = root
        self._unread = b""
        self._number = 0
        self.ask("initialize", processId=os.getpid(), rootUri=root.as_uri(), capabilities={})
        self.tell("initialized")

    def open(self, path: Path, text: str) -> list[str]:
        """What the server says of a document with this text."""
        document = {"uri": path.as_uri(), "languageId": "yaml", "version": 1, "text": text}
        self.tell("textDocument/didOpen", textDocument=document)
        said = self._wait(
            lambda m: m.get("method") == "textDocument/publishDiagnostics" and m["params"]["uri"] == path.as_uri()
        )
        return [diagnostic["message"] for diagnostic in said["params"]["diagnostics"]]

    def complete(self, path: Path, line: int, character: int) -> list[str]:
        position = {"line": line, "character": character}
        found = self.ask("textDocument/completion", textDocument={"uri": path.as_uri()}, position=position)
        return [item["label"] for item in found["items"]]

    def ask(self, method: str, **params: object) -> Any:
        self._number += 1
        self._send({"id": self._number, "method": method, "params": params})
        return self._wait(lambda m: m.get("id") == self._number and "method" not in m)["result"]

    def tell(self, method: str, **params: object) -> None:
        self._send({"method": method, "params": params})

    def _send(self, message: dict[str, object]) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._process.stdin.flush()

    def _wait(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            message = self._receive()
            if wanted(message):
                return message
            if "id" in message and "method" in message:
                self._answer(message)

    def _answer(self, message: dict[str, Any]) -> None:
        """The server asks for settings; the network is not to be used."""
        items = message.get("params", {}).get("items", [])
        yaml = {"schemaStore": {"enable": False}, "completion": True, "validate": True}
        self._send({"id": message["id"], "result": [yaml if i.get("section") == "yaml" else {} for i in items]})

    def _receive(self) -> dict[str, Any]:
        while b"\r\n\r\n" not in self._unread:
            self._read()
        head, _, self._unread = self._unread.partition(b"\r\n\r\n")
        length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
        while len(self._unread) < length:
            self._read()
        body, self._unread = self._unread[:length], self._unread[length:]
        message: dict[str, Any] = json.loads(body)
        return message

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            assert selector.select(LIMIT), "the language server says nothing"
        self._unread += os.read(self._process.stdout.fileno(), 65536)


@contextmanager
def open_editor(program: Path, root: Path) -> Iterator[Editor]:
    with subprocess.Popen([program, "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root) as process:
        try:
            yield Editor(process, root)
        finally:
            process.kill()


@pytest.mark.nightly
@pytest.mark.slow
def test_an_editor_completes_keys_and_marks_what_is_unknown(project: Project, program: Path) -> None:
    (project.folder / "test_app.py").touch()
    git(project.folder, "init", "-q")
    git(project.folder, "add", "-A")
    git(project.folder, "commit", "-qm", "first")
    project.runner("init")
    folder = project.folder / ".runner"
    agent, check, policy = sorted(folder.glob("*.yaml"))
    nested = agent.read_text() + "    tool\n"

    with open_editor(program, project.folder) as editor:
        said = [editor.open(path, path.read_text()) for path in (agent, check, policy)]
        unknown = editor.open(folder / "unknown.yaml", policy.read_text() + "  colour: red\n")
        editor.open(folder / "begun.yaml", policy.read_text() + "  prov\n")
        keys = editor.complete(folder / "begun.yaml", policy.read_text().count("\n"), 6)
        editor.open(folder / "nested.yaml", nested)
        below = editor.complete(folder / "nested.yaml", nested.count("\n") - 1, 8)

    assert said == [[], [], []]
    assert unknown == ["Property colour is not allowed."]
    assert "providers" in keys
    assert "base_image" in below
