"""The face for MCP clients on standard streams, with the client of the official SDK."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import trio
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.shared.exceptions import MCPError

from runner.cli.verbs.mcp import CLIENTS
from runner.ops.agent_type_store import StoredAgentTypes
from runner.ops.agent_types import WorkspaceConfig
from runner.ops.host import mcp_clients
from runner.ops.host.state import make_home, open_state
from runner.server.mcp.tools import all_tools
from tests.support.components import AGENTS
from tests.support.situations import ROOT, Project, until


@asynccontextmanager
async def client(project: Project, *options: str) -> AsyncIterator[Client]:
    """A client of a server that it has started; what that says beside the protocol is in `said`."""
    with open(project.home / "said", "w+") as said:
        server = StdioServerParameters(
            command=sys.executable,
            args=["-m", "runner", "mcp", "serve", *options],
            env=project.variables,
            cwd=project.folder,
        )
        async with Client(stdio_client(server, errlog=said)) as client:
            yield client


async def call(client: Client, name: str, /, **arguments: Any) -> Any:
    """The structured result of a tool, which fits its schema and is the same as its text."""
    result = await client.call_tool(name, arguments)
    assert not result.is_error, result.content
    (text,) = result.content
    if (schema := all_tools()[name].output_schema) is not None:
        jsonschema.validate(result.structured_content, schema)
        assert json.loads(text.text) == result.structured_content  # type: ignore[union-attr]
    return result.structured_content


async def refused(client: Client, name: str, /, **arguments: Any) -> str:
    """The code of a refusal."""
    result = await client.call_tool(name, arguments)
    (text,) = result.content
    assert result.is_error
    return str(text.text).partition("[")[2].partition("]")[0]  # type: ignore[union-attr]


@pytest.mark.scenario("ISO-01", only="mcp")
@pytest.mark.scenario("ISO-02", only="mcp")
@pytest.mark.scenario("ISO-03", only="mcp")
async def test_projects_and_workspaces_by_tools(project: Project) -> None:
    async with client(project) as mcp:
        listed = (await mcp.list_tools()).tools
        assert [tool.name for tool in listed] == [*all_tools()]
        for tool in listed:
            jsonschema.Draft202012Validator.check_schema(tool.input_schema)
            jsonschema.Draft202012Validator.check_schema(tool.output_schema or {})

        root = str(project.folder)
        made = await call(mcp, "project_create", name="shop", root=root, workspace_isolation=True)
        assert made["workspace_isolation"] is True
        assert (await call(mcp, "project_create", name="bank", root=root))["workspace_isolation"] is False
        for name, isolated in (("shop", True), ("bank", False)):
            assert (await call(mcp, "project_get", project=name))["workspace_isolation"] is isolated
            id = (await call(mcp, "workspace_create", project=name))["id"]
            place = (await call(mcp, "bash", workspace=id, command="pwd"))["stdout"]
            assert place == ("/workspace\n" if isolated else f"/workspace/workspaces/{id}\n")
            assert await refused(mcp, "read", workspace=id, file_path="../../../etc/passwd") == "tool.outside"
            assert await refused(mcp, "bash", workspace=id) == "server.request"
            assert await refused(mcp, "bash", workspace=id, command="true", comand="x") == "server.request"
            assert (await call(mcp, "workspace_destroy", workspace=id))["changed_files"] == 0
        assert await refused(mcp, "run_apply") == "server.no-manifests"
        with pytest.raises(MCPError, match="there is no tool `shutdown`"):
            await mcp.call_tool("shutdown", {})
    assert (project.home / "said").read_text() == ""


@pytest.mark.nightly
async def test_a_client_of_an_agent_type_has_its_tools_and_a_workspace_while_it_lives(project: Project) -> None:
    config = {"enabled": True, "provider": "local", "tools": ["read", "edit"], "setup_commands": ["echo hello >README"]}
    await make_type(project, config)
    async with client(project, "--agent-type", "worker", "--url", "ext::sh -c id") as mcp:
        assert await refused(mcp, "read", file_path="README") == "git.url"
    assert "error[git.url]" in (project.home / "said").read_text()
    async with client(project, "--agent-type", "worker") as mcp:
        assert [tool.name for tool in (await mcp.list_tools()).tools] == ["read", "edit"]
        assert (await call(mcp, "read", file_path="README"))["content"] == "hello\n"
        await call(mcp, "edit", file_path="README", old_string="hello", new_string="bye")
        assert await refused(mcp, "bash", command="touch ran") == "tool.not-enabled"
        assert await refused(mcp, "read", workspace="another", file_path="README") == "server.request"
        [row] = project.json("workspace", "list")
    said = (project.home / "said").read_text()
    assert said.startswith(f"the work of workspace {row['id']} is saved in "), said
    assert "+bye" in (Path(said.split()[-1]) / "work.patch").read_text()
    assert project.json("workspace", "list") == []


@pytest.mark.nightly
async def test_what_cannot_be_had_is_an_error_before_anything_is_read(project: Project) -> None:
    await make_type(project, {"enabled": False})
    for options, code in (
        (["--agent-type", "worker"], "workspace.disabled"),
        (["--agent-type", "other"], "server.unknown-agent-type"),
        (["--workspace", "0000"], "store.unknown-workspace"),
        (["--keep"], "cli.usage"),
    ):
        done = project.runner("mcp", "serve", *options)
        assert (done.out, code in done.err) == ("", True), done.err
    id = project.json("workspace", "create")["id"]
    async with client(project, "--workspace", id[:6]) as mcp:
        assert (await call(mcp, "bash", command="pwd"))["stdout"] == "/workspace\n"
    assert project.json("workspace", "show", id)["status"] == "ready"
    assert project.runner("workspace", "destroy", id).code == 0


@pytest.mark.nightly
async def test_runs_are_followed_by_progress_and_end_with_the_call(project: Project) -> None:
    project.script("echo begun; while [ ! -e go ]; do sleep 0.1; done")
    async with client(project, "--manifests", str(project.folder)) as mcp:
        plan = await call(mcp, "run_plan")
        assert (len(plan["plan"]["runs"]), plan["missing"]) == (1, [])

        with trio.move_on_after(5):
            await mcp.call_tool("run_apply", {"wait": True})
        run = (await call(mcp, "run_list"))["runs"][0]["id"]
        events = await call(mcp, "run_events", run=run, wait_seconds=60)
        assert (events["state"], events["events"][0]["seq"]) == ("cancelled", 1)
        assert await call(mcp, "run_events", run=run, after=events["last"]) == {**events, "events": []}
        assert await refused(mcp, "run_cancel", run=run) == "run.elsewhere"

        project.script("true")
        told: list[str] = []

        async def progress(number: float, total: float | None, message: str | None) -> None:
            assert number == len(told) + 1
            told.append(message or "")

        result = await mcp.call_tool("run_apply", {"wait": True, "key": "once"}, progress_callback=progress)
        [done] = result.structured_content["runs"]
        assert (done["state"], done["exit_code"], done["attached"]) == ("succeeded", 0, False)
        assert (told[0], told[-1]) == ("RunStarted", "RunEnded")
        assert "StepStarted agent" in told
        [again] = (await call(mcp, "run_apply", wait=True, key="once"))["runs"]
        assert again == {**done, "attached": True}
        assert await refused(mcp, "triage", directory="relative") == "server.request"
        assert await refused(mcp, "triage", directory=str(project.home / "none")) == "triage.no-incident"


@pytest.mark.nightly
async def test_a_cancelled_call_ends_what_it_runs_and_others_go_on(project: Project) -> None:
    async with client(project) as mcp:
        id = (await call(mcp, "workspace_create"))["id"]
        tree = project.home / "state" / "projects" / "default" / "workspaces" / id
        with trio.move_on_after(60) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(mcp.call_tool, "bash", {"workspace": id, "command": "touch begun; sleep 300"})
                await trio.to_thread.run_sync(until, (tree / "begun").exists)
                scope.cancel()
        assert (await call(mcp, "bash", workspace=id, command="pgrep -c sleep"))["stdout"] == "0\n"
        await call(mcp, "workspace_destroy", workspace=id, discard=True)


@contextmanager
def raw(project: Project, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server on pipes, of which each line that it says has to be a message."""
    words = [sys.executable, "-m", "runner", "mcp", "serve", *options]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, cwd=project.folder, env=project.variables, **pipes) as process:  # type: ignore[call-overload]
        yield process
        process.kill()


def say(process: subprocess.Popen[bytes], *messages: dict[str, Any] | bytes) -> None:
    assert process.stdin is not None
    for message in messages:
        raw = message if isinstance(message, bytes) else json.dumps({"jsonrpc": "2.0", **message}).encode()
        process.stdin.write(raw + b"\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout is not None
    heard: dict[str, Any] = json.loads(process.stdout.readline())
    return heard


HELLO = {
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "tests", "version": "1"}},
}
READY = {"method": "notifications/initialized"}


@pytest.mark.nightly
def test_what_is_no_message_harms_nothing(project: Project) -> None:
    with raw(project) as process:
        say(process, HELLO, READY)
        assert hear(process)["result"]["serverInfo"]["name"] == "runner"
        say(process, b"{", b'{"jsonrpc": "2.0"}', b"\xff\x00", b"[1]", b"[" * 100_000)
        assert [hear(process)["error"]["code"] for _ in range(5)] == [-32700] * 5
        say(process, b"x" * 100_000_000)
        assert hear(process) == {
            "jsonrpc": "2.0",
            "id": None,
            "error": {"code": -32600, "message": "a message is longer than 16 MiB"},
        }
        peak = Path(f"/proc/{process.pid}/status").read_text().partition("VmHWM:")[2].split()[0]
        assert int(peak) < 250_000  # KiB
        say(process, {"id": 7, "result": {}}, {"id": 2, "method": "tools/call", "params": {"name": "workspace_list"}})
        assert hear(process)["result"]["structuredContent"] == {"workspaces": [], "next": None}


@pytest.mark.nightly
def test_a_client_that_asks_and_never_listens_costs_no_more_memory(project: Project) -> None:
    with raw(project) as process:
        say(process, HELLO, READY)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        ask = b"".join(b'{"jsonrpc":"2.0","id":%d,"method":"tools/list"}\n' % number for number in range(2, 20_000))
        sent, quiet = 0, 0
        while sent < len(ask) and quiet < 30:
            try:
                sent, quiet = sent + os.write(process.stdin.fileno(), ask[sent:]), 0
            except BlockingIOError:
                trio.run(trio.sleep, 0.1)
                quiet += 1
        assert sent < len(ask)
        peak = Path(f"/proc/{process.pid}/status").read_text().partition("VmHWM:")[2].split()[0]
        assert int(peak) < 300_000  # KiB


@pytest.mark.nightly
@pytest.mark.parametrize("end", ["eof", "SIGTERM", "SIGINT"])
def test_the_end_of_a_client_leaves_nothing(project: Project, end: str) -> None:
    trio.run(make_type, project, {"enabled": True, "provider": "local"})
    with raw(project, "--agent-type", "worker") as process:
        say(process, HELLO, READY)
        hear(process)
        command = {"name": "bash", "arguments": {"command": "touch begun; sleep 300"}}
        say(process, {"id": 2, "method": "tools/call", "params": command})
        until(lambda: any(project.home.glob("state/projects/default/workspaces/*/begun")))
        assert process.stdin is not None
        if end == "eof":
            process.stdin.close()
            process.stdin = None
        else:
            process.send_signal(getattr(signal, end))
        out, err = process.communicate(timeout=60)
        assert (process.returncode, b"Traceback" in err) == (0, False), err
        assert all(json.loads(line)["id"] == 2 for line in out.splitlines())
        assert b"is saved in" in err
    assert project.json("workspace", "list") == []


TRUST = {"GEMINI_CLI_TRUST_WORKSPACE": "true"}  # else it starts no server


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "file", "before", "words", "shown"),
    [
        ("claude", ".claude.json", '{"theme": "dark"}', ["claude", "mcp", "list"], "✔ Connected"),
        ("codex", ".codex/config.toml", '# mine\nmodel = "x"', ["codex", "mcp", "get", "runner"], "args: {args}"),
        ("gemini", ".gemini/settings.json", '{"ui": {}}', ["gemini", "mcp", "list"], "{command} (stdio) - Connected"),
        ("goose", ".config/goose/config.yaml", "# mine\nA: b # so\n", ["goose", "info", "-v"], "cmd: {program}"),
    ],
    ids=lambda value: value if value in CLIENTS else "",
)
def test_a_client_reads_what_is_added_to_its_configuration(
    project: Project, name: str, file: str, before: str, words: list[str], shown: str
) -> None:
    path = project.home / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(before)
    path.chmod(0o640)
    for end in ("is new", "is there already"):
        assert project.runner("mcp", "install", name).out.strip().endswith(end)
    after = path.read_text()
    for kept in filter(None, before.strip("{}").splitlines()):
        assert kept in after
    assert path.stat().st_mode & 0o777 == 0o640
    other = project.runner("mcp", "install", name, "--agent-type", "worker")
    assert (other.code, "has another" in other.err, path.read_text()) == (2, True, after)

    env = {**project.variables, "PATH": f"{AGENTS / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), **TRUST}
    command = f"{sys.executable} -m runner mcp serve"
    wanted = shown.format(args=command.partition(" ")[2], command=command, program=sys.executable)

    def is_shown() -> bool:
        done = subprocess.run(words, cwd=project.folder, env=env, capture_output=True, text=True, timeout=120)
        return wanted in done.stdout + done.stderr

    until(is_shown, 240)  # Gemini CLI gives the server five seconds to answer, which is little on a busy machine


@pytest.mark.nightly
def test_a_configuration_that_cannot_be_read_stays(project: Project) -> None:
    place = project.folder / ".vscode" / "mcp.json"
    assert project.runner("mcp", "install", "vscode", "--name", "shop").code == 0
    assert json.loads(place.read_text())["servers"]["shop"]["args"][-2:] == ["mcp", "serve"]
    for text in ("// mine\n{}", "[]", '{"servers": []}', "\\xff"):
        place.write_text(text)
        done = project.runner("mcp", "install", "vscode")
        assert (done.code, place.read_text()) == (2, text), done.err
    assert {*CLIENTS} == {*mcp_clients.CLIENTS}


async def make_type(project: Project, workspace: dict[str, Any]) -> None:
    """An agent type `worker` of the server's."""
    make_home(project.settings())
    async with open_state(project.settings()) as store:
        config = msgspec.convert(workspace, WorkspaceConfig)
        await StoredAgentTypes(store).create("worker", config)
