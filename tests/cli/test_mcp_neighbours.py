"""What a workspace that may reach every public host can reach of this host: no MCP server of another's, and no API."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_agent_mcp import tools
from tests.server.test_hosted_mcp import hosting, state
from tests.server.test_hosted_mcp import write as write_server
from tests.support import dockerd
from tests.support.mcp_agent import call, server, write
from tests.support.situations import Project, until

__all__ = ["tools"]
# Every way to each place: directly, through the proxy, by a tunnel of it, and the sockets of this host by their paths.
ATTEMPT = r"""
import json, os, socket, sys, urllib.request
from urllib.parse import urlsplit
def straight(host, port):
    with socket.create_connection((host, port), 3) as stream:
        stream.sendall(b"GET /mcp HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return stream.recv(4096)
def proxied(host, port, tunnel):
    proxy = urlsplit(os.environ["HTTP_PROXY"])
    with socket.create_connection((proxy.hostname, proxy.port), 3) as stream:
        first = f"CONNECT {host}:{port}" if tunnel else f"GET http://{host}:{port}/mcp"
        stream.sendall(f"{first} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        return stream.recv(4096)
def local(path):
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(path)
        return b"connected"
reached = {}
for host, port in json.loads(os.environ["PLACES"]):
    for way, tried in (("direct", lambda: straight(host, port)), ("proxy", lambda: proxied(host, port, False)),
                       ("tunnel", lambda: proxied(host, port, True))):
        try: reached[f"{way} {host}:{port}"] = tried().split(b"\r\n")[0].decode()
        except (OSError, KeyError) as error: reached[f"{way} {host}:{port}"] = type(error).__name__
for path in json.loads(os.environ["SOCKETS"]):
    try: reached[path] = local(path).decode()
    except OSError as error: reached[path] = type(error).__name__
print(json.dumps(reached))
"""


def addresses() -> list[str]:
    """This host's own, on every interface."""
    said = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=True).stdout
    return sorted({*re.findall(r"inet ([0-9.]+)", said), "localhost", socket.gethostname()})


@pytest.mark.parametrize(
    "provider",
    [
        pytest.param("local", marks=dockerd.DOCKER.mark),  # whose socket is tried
        pytest.param("docker", marks=[dockerd.DOCKER.mark, pytest.mark.nightly]),
        pytest.param("gvisor", marks=[dockerd.GVISOR.mark, pytest.mark.nightly]),
    ],
)
def test_no_workspace_reaches_the_mcp_servers_of_another_nor_an_api_of_this_host(
    provider: str, project: Project, tools: Path
) -> None:
    workspace, image = ", checkout_on_start: false", dict[str, Any]()
    if provider != "local":
        project.env |= {"DOCKER_HOST": dockerd.host(), "WORKSPACE_PROVIDERS": provider}
        workspace += f", base_image: {json.dumps(dockerd.IMAGE)}"
        image = {"image": dockerd.IMAGE}
    write_server(project, **image)
    near, far = (replace(project, folder=project.folder / name) for name in ("near", "far"))
    with hosting(project, "--listen", "127.0.0.1:0") as served:
        until(lambda: state(served)["state"] == "ready")
        turns = [
            call("echo", text="one"),
            {"run": "cat ~/.claude/*.json"},
            {"run": "until test -e go; do sleep 0.1; done"},
            call("echo", text="two"),
        ]
        near.folder.mkdir()
        write(near, tools, server(**image), used=["docs"], turns=turns, provider=provider, workspace=workspace)
        process = near.start("rehearse", str(near.folder), "--turns", "a.turns.yaml")
        until(lambda: [*near.home.glob("state/runs/*/logs/agent.stdout")] and "/mcp" in near.logs("agent"))
        port = int(re.search(r"127.0.0.1:([0-9]+)/mcp", near.logs("agent"))[1])  # type: ignore[index]
        ports = (port, int(served.url.rpartition(":")[2]))
        assert served.get("/projects") is not None

        far.folder.mkdir()
        places = [(host, port) for host in addresses() for port in ports]
        sockets = ["/var/run/docker.sock", dockerd.host().removeprefix("unix://")]
        script = f"PLACES={shlex.quote(json.dumps(places))} SOCKETS={shlex.quote(json.dumps(sockets))} "
        far.script(
            f"export {script}\npython3 -c {shlex.quote(ATTEMPT)}\n", provider=provider, workspace="network: open"
        )
        done = far.runner("apply", str(far.folder))
        assert done.code == 0, done.out + done.err
        reached = json.loads(far.logs("agent"))

        for tree in near.home.glob("state/projects/*/workspaces/*"):
            (tree / "go").touch()
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, out + err
        assert state(served)["state"] == "ready"
    assert len(reached) == 3 * len(places) + len(sockets)
    refused = re.compile(r"HTTP/1.1 4[0-9][0-9] |[A-Za-z]*[eE]rror")
    assert {place: said for place, said in reached.items() if not refused.match(said)} == {}
