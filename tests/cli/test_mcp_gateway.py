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

from tests.support import dockerd
from tests.support.mcp_agent import server
from tests.support.situations import Done, Project, leftovers, until


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


def test_a_client_is_told_of_a_gateway_only_when_it_can_begin(project: Project) -> None:
    place = project.home / ".claude.json"
    folder = project.folder / "servers"

    def install(option: str = "--gateway") -> Done:
        return project.runner("mcp", "install", "claude", "--name", "tools", option, "servers")

    missing = install()
    assert (missing.code, missing.errors) == (2, ["manifest.unreadable"])
    assert "`servers` cannot be read: no such file or directory" in missing.err
    assert "= hint: name a file or a folder with a document of kind `McpServer`" in missing.err
    assert install("--manifests").errors == ["manifest.unreadable"]
    folder.mkdir()
    assert install().errors == ["manifest.nothing-to-run"]
    file = folder / "docs.runner.yaml"
    file.write_text(server(comand=["x"]))
    assert install().errors == ["manifest.unknown-field"]
    assert not place.exists()
    file.write_text(server())
    assert install().code == 0
    assert json.loads(place.read_text())["mcpServers"]["tools"]["args"][-2:] == ["gateway", str(folder)]


CLAIM = pytest.mark.scenario("BEY-10", only="provider")


@pytest.mark.parametrize(
    ("number", "provider"),
    [
        pytest.param(signal.SIGTERM, "local", marks=pytest.mark.nightly),
        pytest.param(signal.SIGKILL, "local", marks=CLAIM),
        pytest.param(signal.SIGKILL, "docker", marks=[dockerd.DOCKER.mark, CLAIM]),
        pytest.param(signal.SIGKILL, "gvisor", marks=[dockerd.GVISOR.mark, pytest.mark.nightly]),
    ],
    ids=["term", "kill-local", "kill-docker", "kill-gvisor"],
)
def test_a_gateway_that_is_ended_leaves_nothing(number: signal.Signals, provider: str, project: Project) -> None:
    """Of a server that has failed, too, which nothing holds but the gateway's lease."""
    image: dict[str, Any] = {}
    if provider != "local":
        project.env |= {"DOCKER_HOST": dockerd.host(), "WORKSPACE_PROVIDERS": provider}
        image = {"image": dockerd.IMAGE}
    failed = server("failed", command=["sh", "-c", "exit 7"], restart="never", **image)
    project.write(server(**image), server("other", **image), failed)
    with gateway(project) as client:
        until(lambda: [one["detail"] for one in listed(project) if one["state"] == "failed"] == ["exited 7"])
        workspaces = [one["id"] for one in project.json("workspace", "list")]
        client.process.send_signal(number)
        client.process.wait(60)
    if number is signal.SIGKILL:
        found = project.json("workspace", "list")
        assert sorted(one["id"] for one in found) == sorted(workspaces)
        assert [one["status"] for one in found] == ["ready"] * 3
        assert project.runner("recover").code == 0
    assert project.json("workspace", "list") == project.json("lease", "list") == leftovers(project.home) == []
    assert sorted(one["state"] for one in listed(project)) == ["failed", "stopped", "stopped"]
    for name in (one["name"] for one in listed(project)):
        assert "there is no log of" in project.runner("mcp", "hosted", "logs", name).err
    assert provider == "local" or [one for id in workspaces for one in dockerd.kept_of(id)] == []


def listed(project: Project) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = project.json("mcp", "hosted", "list")
    return found
