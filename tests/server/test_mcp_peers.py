"""Servers of the protocol's own makers, hosted, and clients that others have made: of npm, and the agents' CLIs."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio

import runner.agents
from runner.core import plugins
from runner.fake_model.provider import serve_fake_model
from runner.fake_model.script import Turn
from runner.ports.agent import ModelAccess
from runner.ports.gateway import Api
from tests.server.test_hosted_mcp import client, hosting, said, state, write
from tests.support import components, mcp_conformance_server
from tests.support.http_servers import Handler, serving_http
from tests.support.needs import AGENTS as NODE
from tests.support.needs import program
from tests.support.server import Served, serving
from tests.support.situations import ROOT, Project, until

# The SDK's client leaves generators of its streams to the collector.
pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]
THERE = "127.0.0.2"  # programs reach 127.0.0.1 without a proxy
SERVERS = ("@modelcontextprotocol/server-everything@2026.8.31", "@modelcontextprotocol/server-filesystem@2026.8.31")
CLIENTS = ("@modelcontextprotocol/inspector@2.12.0", "@modelcontextprotocol/conformance@0.1.16")
NODE_PROGRAM = components.AGENTS / "bin" / "node"
HEAD = re.compile(rb"^(?:POST|GET|DELETE) \S+ HTTP/1.1\r\n", re.MULTILINE)
OF_ANY_SERVER = ("server-initialize", "ping", "tools-list", "dns-rebinding-protection", "server-sse-multiple-streams")
PYTHON_SERVERS = ("mcp-server-git==2026.10.19", "mcp-server-fetch==2026.10.24")


def installed(request: pytest.FixtureRequest, name: str, packages: tuple[str, ...]) -> Path:
    """The folder that has packages of npm, brought once and kept."""
    program("npm").require()
    folder = Path(request.config.cache.mkdir(name))
    if not (folder / "node_modules").exists():
        quiet = ("--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
        subprocess.run(["npm", "install", *quiet, "--prefix", str(folder), *packages], check=True)
    return folder


@pytest.fixture
def node_servers(request: pytest.FixtureRequest) -> Path:
    return installed(request, "mcp-servers", SERVERS)


@pytest.fixture
def python_servers(request: pytest.FixtureRequest) -> Path:
    folder = Path(request.config.cache.mkdir("mcp-python-servers"))
    if not (folder / "bin" / "mcp-server-fetch").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", *PYTHON_SERVERS], check=True)
    return folder


@pytest.fixture
def site() -> Iterator[int]:
    """A page, at a port of this host."""

    class Page(Handler):
        def do_GET(self) -> None:
            self.tell(b"the page", 404 if self.path == "/robots.txt" else 200, content_type="text/plain")

    with serving_http(Page, THERE) as port:
        yield port


def test_reference_servers_of_npm_work_hosted(project: Project, node_servers: Path) -> None:
    modules = node_servers / "node_modules" / "@modelcontextprotocol"
    lent = {"toolchains": ["node", str(node_servers)]}
    write(project, "everything", command=["node", str(modules / "server-everything/dist/index.js"), "stdio"], **lent)
    write(project, "files", command=["node", str(modules / "server-filesystem/dist/index.js"), "/workspace"], **lent)

    async def everything() -> None:
        async with client(served, "everything") as mcp:
            assert "hello" in await said(mcp, "echo", message="hello")
            assert "3" in await said(mcp, "get-sum", a=1, b=2)
            told: list[float] = []

            async def tell(progress: float, total: float | None = None, message: str | None = None) -> None:
                told.append(progress)

            slow = {"duration": 1, "steps": 3}
            await mcp.call_tool("trigger-long-running-operation", slow, progress_callback=tell)
            assert told == [1, 2, 3]
            assert (await mcp.list_prompts()).prompts
            resources = (await mcp.list_resources()).resources
            assert (await mcp.read_resource(str(resources[0].uri))).contents

    async def files() -> None:
        async with client(served, "files") as mcp:
            await said(mcp, "write_file", path="/workspace/a.txt", content="written")
            assert await said(mcp, "read_text_file", path="/workspace/a.txt") == "written"
            refused = await mcp.call_tool("read_text_file", {"path": "/etc/passwd"})
            assert refused.is_error

    with hosting(project) as served:
        until(lambda: {state(served, name)["state"] for name in ("everything", "files")} == {"ready"})
        trio.run(everything)
        trio.run(files)


def test_reference_servers_of_pypi_work_hosted(project: Project, python_servers: Path, site: int) -> None:
    below = sys.base_prefix  # where the environment's Python is
    lent = {"toolchains": [str(python_servers), *([] if below == "/usr" else [below])]}
    allow = [{"host": f"{THERE}:{site}", "private": True}]
    write(project, "git", command=["sh", "-c", f"git init -q repo; exec {python_servers}/bin/mcp-server-git"], **lent)
    write(project, "fetch", command=["mcp-server-fetch", "--allow-private-ips"], network={"allow": allow}, **lent)

    async def main() -> None:
        async with client(served, "git") as mcp:
            assert "No commits yet" in await said(mcp, "git_status", repo_path="/workspace/repo")
        async with client(served, "fetch") as mcp:
            assert "the page" in await said(mcp, "fetch", url=f"http://{THERE}:{site}/")
            refused = await mcp.call_tool("fetch", {"url": f"http://{THERE}:1/"})
            assert refused.is_error

    with hosting(project) as served:
        until(lambda: {state(served, name)["state"] for name in ("git", "fetch")} == {"ready"})
        trio.run(main)


@pytest.fixture
def clients(request: pytest.FixtureRequest) -> Path:
    """Programs of npm, which need a newer Node than Debian has."""
    NODE.require()
    return installed(request, "mcp-clients", CLIENTS) / "node_modules" / ".bin"


@contextmanager
def with_token(served: Served) -> Iterator[int]:
    """A port that leads to a server, for clients that cannot send a token: each request gets it on its way."""
    header = f"Authorization: Bearer {served.token}\r\n".encode()

    def pipe(source: socket.socket, target: socket.socket, *, adding: bool) -> None:
        with suppress(OSError):
            while chunk := source.recv(1 << 16):
                target.sendall(HEAD.sub(lambda found: found.group() + header, chunk) if adding else chunk)
            target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with suppress(OSError):
            while True:
                near, far = listener.accept()[0], socket.socket(socket.AF_UNIX)
                far.connect(str(served.socket))
                for one, other, adding in ((near, far, True), (far, near, False)):
                    threading.Thread(target=pipe, args=(one, other), kwargs={"adding": adding}, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def conforming(clients: Path, url: str, *words: str) -> str:
    """What the conformance suite says of a server with which nothing is wrong."""
    command = [NODE_PROGRAM, clients / "conformance", "server", "--url", url, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write_whole(project: Project) -> None:
    """Write the manifest of a server that has everything."""
    text = Path(mcp_conformance_server.__file__).read_text()
    passing = {"sampling": "pass", "elicitation": "pass"}
    write(project, "whole", command=["python3", "-c", text], stdio_bridge=passing)


def test_the_conformance_suite_passes_through_the_bridge(project: Project, clients: Path) -> None:
    write_whole(project)
    with hosting(project) as served, with_token(served) as port:
        until(lambda: state(served, "whole")["state"] == "ready")
        said = conforming(clients, f"http://127.0.0.1:{port}/mcp/servers/whole/mcp", "--suite", "active")
    assert "Total: 39 passed, 0 failed" in said


def test_the_conformance_suite_passes_at_the_face(project: Project, clients: Path) -> None:
    with serving(project) as served, with_token(served) as port:
        for scenario in OF_ANY_SERVER:
            said = conforming(clients, f"http://127.0.0.1:{port}/mcp", "--scenario", scenario)
            assert re.search(r"Passed: (\d+)/\1, 0 failed", said), said


def test_the_inspector_lists_and_calls(project: Project, clients: Path) -> None:
    write_whole(project)
    with hosting(project, "--listen", "127.0.0.1:0") as served:
        until(lambda: state(served, "whole")["state"] == "ready")

        def inspect(path: str, *words: str) -> Any:
            target = [f"{served.url}{path}", "--transport", "http", "--header", f"Authorization: Bearer {served.token}"]
            done = subprocess.run(
                [NODE_PROGRAM, clients / "mcp-inspector", "--cli", *target, *words],
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "HOME": str(project.home)},
                timeout=120,
            )
            assert done.returncode == 0, done.stderr
            return json.loads(done.stdout)

        listed = inspect("/mcp", "--method", "tools/list", "--strict")
        assert "project_get" in [tool["name"] for tool in listed["tools"]]
        called = inspect("/mcp", "--method", "tools/call", "--tool-name", "workspace_list")
        assert [one["status"] for one in called["structuredContent"]["workspaces"]] == ["ready"]
        hosted = "/mcp/servers/whole/mcp"
        assert len(inspect(hosted, "--method", "tools/list")["tools"]) == len(mcp_conformance_server.tools())
        simple = ("--method", "tools/call", "--tool-name", "test_simple_text")
        assert inspect(hosted, *simple)["content"] == mcp_conformance_server.CONTENT["test_simple_text"]


# Some ask the model before their servers are there, and a busy machine takes its time to start ours.
WAIT = "timeout 90 sh -c 'until test -e {}/state/state.db; do sleep 1; done'; timeout 20 tail -f /dev/null; true"
COMMANDS = {
    "claude": ["claude", "-p", "--model", "sonnet", "--tools=Bash", "--allowedTools", "Bash,mcp__runner"],
    "codex": [
        "codex",
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        "-m",
        "gpt-5",
        "-",
    ],
    "gemini": ["gemini", "--yolo", "-m", "gemini-2.5-pro"],
    "goose": ["goose", "run", "--model", "gpt-5", "--max-turns", "5", "--with-builtin", "developer", "-i", "-"],
}


@pytest.mark.parametrize("name", COMMANDS)
async def test_an_agents_cli_calls_a_tool_of_the_face(project: Project, name: str) -> None:
    """By the configuration that `runner mcp install` has written, with a script in its model's place."""
    NODE.require()
    arguments = {"name": f"of-{name}", "root": str(project.folder), "workspace_isolation": True}
    call = {"server": "runner", "tool": "project_create", "arguments": arguments}
    turns = [Turn(run=WAIT.format(project.home)), Turn.model_validate({"call": call}), Turn(say="Done.")]
    agent = plugins.load(runner.agents, name).agent
    async with serve_fake_model(turns) as port:
        base = f"http://127.0.0.1:{port}{'/v1' if agent.api is Api.OPENAI else ''}"
        own = {"workspace": str(project.folder), "home": str(project.home)}
        access = ModelAccess(base_url=base, key="sk-tests", model="tests", **own)
        setup = agent.set_up(access)
        for path, text in setup.files.items():
            (project.home / path).parent.mkdir(parents=True, exist_ok=True)
            (project.home / path).write_text(text)
        assert project.runner("mcp", "install", name).code == 0
        keys = dict.fromkeys(("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "GEMINI_API_KEY"), "sk-tests")
        path = f"{components.AGENTS / 'bin'}:{os.environ['PATH']}"
        trust = {"GEMINI_CLI_TRUST_WORKSPACE": "true"}
        env = {**project.variables, **setup.env, **keys, **trust, "PATH": path, "PYTHONPATH": str(ROOT)}
        if setup.login:
            await trio.run_process(setup.login, env=env, stdin=b"sk-tests", capture_stdout=True, capture_stderr=True)
        done = await trio.run_process(
            COMMANDS[name],
            cwd=project.folder,
            env=env,
            stdin=b"make a project",
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
    said = (done.stdout + done.stderr).decode()
    assert (done.returncode, "Done." in said) == (0, True), said
    made = [(one["name"], one["workspace_isolation"]) for one in project.json("project", "list")]
    assert made == [(f"of-{name}", True)], said
