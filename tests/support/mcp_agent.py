"""Stand-ins for an agent's CLI that use MCP servers: they ask the model, and call the tools that it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support import mcp_server
from tests.support.situations import Project, document

PROGRAM = Path(mcp_server.__file__).resolve()
# As Claude Code does it, with what is needed of each protocol, and no more.
STAND_IN = """\
#!/usr/bin/env python3
import json, os, subprocess, sys, urllib.request
def post(url, body, session=None):
    headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    if session: headers["Mcp-Session-Id"] = session
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as answer:
        text = answer.read().decode()
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            text = [line[5:] for line in text.splitlines() if line.startswith("data:")][-1]
        return (json.loads(text) if text else {}), answer.headers.get("mcp-session-id")
argv = sys.argv[1:]
servers = json.load(open(argv[argv.index("--mcp-config") + 1]))["mcpServers"] if "--mcp-config" in argv else {}
sessions, tools = {}, [{"name": "Bash", "input_schema": {"properties": {"command": {"type": "string"}}}}]
for name, one in servers.items():
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "stand-in", "version": "1"}}
    _, session = post(one["url"], {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": hello})
    sessions[name] = one["url"], session
    post(*sessions[name][:1], {"jsonrpc": "2.0", "method": "notifications/initialized"}, session)
    found, _ = post(one["url"], {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}, session)
    tools += [{"name": f"mcp__{name}__{tool['name']}", "input_schema": {}} for tool in found["result"]["tools"]]
def use(name, given):
    if name == "Bash":
        return subprocess.run(given["command"], shell=True, capture_output=True, text=True).stdout
    _, server, tool = name.split("__", 2)
    url, session = sessions[server]
    method, params = "tools/call", {"name": tool, "arguments": given}
    if tool.startswith("resources"): method, params = tool, given
    answer, _ = post(url, {"jsonrpc": "2.0", "id": 2, "method": method, "params": params}, session)
    return json.dumps(answer.get("result", answer.get("error")))
messages = [{"role": "user", "content": sys.stdin.read()}]
while True:
    asked = {"model": "claude-sonnet-5-5", "messages": messages, "tools": tools}
    url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(asked).encode())) as answer:
        content = json.load(answer)["content"]
    messages.append({"role": "assistant", "content": content})
    calls = [block for block in content if block["type"] == "tool_use"]
    if not calls:
        said = next(block["text"] for block in content if block["type"] == "text")
        print(json.dumps({"type": "result", "subtype": "success", "is_error": False, "result": said}))
        break
    for call in calls:
        result = use(call["name"], call["input"])
        print(json.dumps({"type": "note", "tool": call["name"], "result": result}), flush=True)
        content = [{"type": "tool_result", "tool_use_id": call["id"], "content": result}]
        messages.append({"role": "user", "content": content})
"""


def server(name: str = "docs", **spec: Any) -> str:
    """The document of a server that does wrong what it is asked."""
    whole = {"command": ["python3", "-c", PROGRAM.read_text()], **spec}
    return document("McpServer", name, "\n".join(f"{key}: {json.dumps(value)}" for key, value in whole.items()))


def write(
    project: Project,
    tools: Path,
    *servers: str,
    used: list[Any],
    turns: list[dict[str, Any]],
    agent: str = "claude",
    model: str = "sonnet",
    provider: str = "local",
    workspace: str = "",
    more: str = "",
    run: str = "",
) -> None:
    """A run of an agent with servers, and the turns of its model."""
    spec = f"agent: {agent}\nmodel: {model}\nmcp_servers: {json.dumps(used)}\n{more}\n"
    spec += f"workspace: {{enabled: true, providers: [{provider}], toolchains: [{tools}]{workspace}}}"
    project.write(
        *servers,
        document("AgentType", "worker", spec),
        document("IncidentRun", "work", f"agent_type: worker\nprompt: use your tools\n{run}"),
    )
    (project.folder / "a.turns.yaml").write_text(json.dumps({"turns": [*turns, {"say": "all done"}]}))


def call(tool: str, name: str = "docs", /, **arguments: Any) -> dict[str, Any]:
    """A turn that calls a tool of a server."""
    return {"call": {"server": name, "tool": tool, "arguments": arguments}}


def anything(tool: str, /, **arguments: Any) -> dict[str, Any]:
    """A turn that calls what no server has listed."""
    return {"call": {"tool": f"mcp__docs__{tool}", "arguments": arguments}}
