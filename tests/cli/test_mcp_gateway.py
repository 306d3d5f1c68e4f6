"""``runner mcp gateway``: several servers as one, for one client, whose end is theirs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.mcp_agent import server
from tests.support.situations import Project, leftovers, until


class Client:
    """A client on standard streams. ``told`` are messages that answer nothing it has asked."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process, self._id, self.told = process, 0, list[dict[str, Any]]()

    def say(self, **message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        assert self.process.stdout is not None
        self._id += 1
        self.say(id=self._id, method=method, params=params)
        while line := self.process.stdout.readline():
            message: dict[str, Any] = json.loads(line)
            if message.get("id") == self._id:
                return message
            self.told.append(message)
        raise AssertionError("it has ended")

    def call(self, tool: str, **arguments: Any) -> str:
        answer = self.ask("tools/call", name=tool, arguments=arguments)
        return str(answer["result"]["content"][0]["text"] if "result" in answer else answer["error"]["message"])


@contextmanager
def gateway(project: Project) -> Iterator[Client]:
    words = [sys.executable, "-m", "runner", "mcp", "gateway", str(project.folder)]
    process = subprocess.Popen(
        words, cwd=project.folder, env=project.variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    client = Client(process)
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    assert client.ask("initialize", **hello)["result"]["serverInfo"]["name"] == "runner-gateway"
    client.say(method="notifications/initialized")
    until(lambda: {*names(client)} >= {"docs__echo", "other__echo"}, seconds=120)
    try:
        yield client
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


def names(client: Client) -> list[str]:
    return [tool["name"] for tool in client.ask("tools/list")["result"]["tools"]]


def test_two_servers_are_one_whose_names_tell_them_apart_and_nothing_of_them_stays(project: Project) -> None:
    project.write(server(env={"WHO": "docs"}), server("other", env={"WHO": "other"}))
    with gateway(project) as client:
        for name in ("docs", "other"):
            assert json.loads(client.call(f"{name}__seen"))[1]["WHO"] == name
        assert client.call("echo") == "there is no tool `echo`"
        assert client.call("docs__die", code=3) == "the server has ended"
        assert client.call("other__half") == "the server has ended"
        assert client.call("other__echo", text="here") == "here"
        assert client.call("docs__echo", text="again") == "again"
        assert client.ask("prompts/get", name="docs__greet")["result"]["messages"]
        assert [one["uri"] for one in client.ask("resources/list")["result"]["resources"]] == ["docs://rules"]
        assert client.ask("resources/read", uri="docs://rules")["result"]["contents"][0]["text"] == "text"
        assert "method" not in client.ask("tools/nonsense")
    assert project.json("workspace", "list") == []
    assert client.process.returncode == 0


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.scenario("BEY-10", only="local"))],
    ids=["term", "kill"],
)
def test_a_gateway_that_is_ended_leaves_nothing(number: signal.Signals, project: Project) -> None:
    project.write(server(), server("other"))
    with gateway(project) as client:
        client.process.send_signal(number)
        client.process.wait(60)
    if number is signal.SIGKILL:
        assert [one["status"] for one in project.json("workspace", "list")] == ["ready"] * 2
        assert project.runner("recover").code == 0
    assert project.json("workspace", "list") == project.json("lease", "list") == leftovers(project.home) == []
    listed = project.json("mcp", "hosted", "list")
    assert {one["state"] for one in listed} == {"stopped"}
    assert "there is no log of" in project.runner("mcp", "hosted", "logs", listed[0]["name"]).err
