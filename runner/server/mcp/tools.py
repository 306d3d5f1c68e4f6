"""Tools of MCP: the routes of the server by the names that agents know, and what has no route.

A tool's arguments are the names in a route's path, its query and its body; its schemas are those of the same types.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from runner.client.values import Form
from runner.core.errors import BadRequest
from runner.core.sanitize import excerpt
from runner.ops.tools import TOOLS
from runner.server.mcp import own
from runner.server.mcp.own import Tell
from runner.server.route import BASE, Call, Reply, Route
from runner.server.routes import plans, projects, runs, sessions, tools, workspaces

_SCHEMA = "#/$defs/{name}"
_ROUTES = {
    (route.method, route.path.removeprefix(BASE)): route
    for room in (workspaces, tools, sessions, runs, plans, projects)
    for route in room.ROUTES
}


class Tool(Struct, frozen=True, kw_only=True):
    """A tool. ``places`` maps arguments to names in the path of its route; ``tell`` is told the events of runs.

    One that ``names_host`` takes directories of the server's host, which nobody may name over HTTP.
    """

    name: str
    summary: str
    handle: Callable[[Call, Tell], Awaitable[Any]]
    answer: Any
    places: Mapping[str, str] = {}
    query: type[Struct] | None = None
    body: type[Struct] | None = None
    reads: bool = False
    destroys: bool = False
    names_host: bool = False

    @property
    def input_schema(self) -> dict[str, Any]:
        """Return the JSON schema of the arguments."""
        found: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
        for name in self.places:
            found["properties"][name] = {"type": "string", "minLength": 1, "description": f"The id of the {name}."}
            found["required"].append(name)
        for kind in (self.query, self.body):
            if kind is not None:
                schema = schema_of(kind)
                found["properties"] |= schema["properties"]
                found["required"] += schema.get("required", ())
                found.setdefault("$defs", {}).update(schema.get("$defs", {}))
        return {**found, "additionalProperties": False}

    @property
    def output_schema(self) -> dict[str, Any] | None:
        """Return the JSON schema of the result; ``None`` for one that is text, or nothing."""
        return None if self.answer in (None, str) else schema_of(self.answer)

    @property
    def description(self) -> str:
        """Return what a model reads of the tool."""
        texts = [f"{self.summary}.", *(kind.__doc__ or "" for kind in (self.body,) if kind is not None)]
        return re.sub(r"\s+", " ", " ".join(texts)).strip()

    def call(self, call: Call, arguments: Mapping[str, Any]) -> Call:
        """Return the call with its arguments. Raises ``BadRequest``."""
        left = dict(arguments)
        path = {}
        for name, place in self.places.items():
            value = left.pop(name, None)
            if not isinstance(value, str):
                raise BadRequest(f"`{name}` is missing, or not a text", hint=f"give the id of the {name}")
            path[place] = value
        query = _value(left, self.query)
        body = _value(left, self.body)
        if left:
            known = ", ".join(self.input_schema["properties"]) or "none"
            raise BadRequest(f"`{excerpt(min(left))}` is not an argument of `{self.name}`", hint=f"it has {known}")
        return replace(call, path=path, query=query, body=body)


def schema_of(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a type, with the type itself at its root."""
    (schema,), components = msgspec.json.schema_components([kind], ref_template=_SCHEMA)
    if "$ref" not in schema:
        return schema
    root = components.pop(schema["$ref"].rpartition("/")[2])
    return {**root, "$defs": components} if components else root


def _value(left: dict[str, Any], kind: type[Struct] | None) -> Any:
    """Take the fields of a type out of the arguments. Raises ``BadRequest``."""
    if kind is None:
        return None
    own_fields = {field.encode_name for field in msgspec.structs.fields(kind)}
    given = {name: left.pop(name) for name in own_fields & {*left}}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        raise BadRequest(f"the arguments do not fit: {text[:1].lower()}{text[1:]}") from error


def _routed(name: str, method: str, path: str, form: Struct | None = None, **places: str) -> Tool:
    """Return the tool that a route is; ``form`` is its query where only one makes sense."""
    route: Route = _ROUTES[method, path]

    async def handle(call: Call, tell: Tell) -> Any:
        answer = await route.handle(call if form is None else replace(call, query=form))
        return answer.value if isinstance(answer, Reply) else answer

    return Tool(
        name=name,
        summary=route.summary,
        handle=handle,
        answer=route.answer,
        places=places,
        query=route.query if form is None else None,
        body=route.body,
        reads=method == "GET" or name in ("run_plan", "read", "glob", "grep"),
        destroys=method == "DELETE",
    )


def workspace_tools(of: str = "workspace") -> dict[str, Tool]:
    """Return the tools that agents have in a workspace, which they name, or their ``session``."""
    places = {of: "id"}
    return {name: _routed(name, "POST", f"/{of}s/{{id}}/tools/{name}", None, **places) for name in TOOLS}


def all_tools() -> dict[str, Tool]:
    """Return every tool, by name."""
    found = [
        Tool(
            name="project_create",
            summary="Make a project, or change one that was made so",
            handle=own.create_project,
            body=own.NewProject,
            answer=_ROUTES["GET", "/projects/{id}"].answer,
            names_host=True,
        ),
        _routed("project_get", "GET", "/projects/{id}", project="id"),
        _routed("project_list", "GET", "/projects"),
        _routed("workspace_create", "POST", "/workspaces"),
        _routed("workspace_list", "GET", "/workspaces"),
        _routed("workspace_get", "GET", "/workspaces/{id}", workspace="id"),
        _routed("workspace_destroy", "DELETE", "/workspaces/{id}", workspace="id"),
        _routed("run_plan", "POST", "/plans", Form()),
        Tool(
            name="run_apply",
            summary="Start runs, and with `wait` follow them to their end",
            handle=own.apply_runs,
            body=own.Apply,
            answer=own.Applied,
        ),
        _routed("run_list", "GET", "/runs"),
        _routed("run_get", "GET", "/runs/{id}", run="id"),
        Tool(
            name="run_events",
            summary="Show the events of a run, past and coming",
            handle=own.show_events,
            places={"run": "id"},
            body=own.Follow,
            answer=own.RunEvents,
            reads=True,
        ),
        _routed("run_cancel", "POST", "/runs/{id}/cancel", run="id"),
        Tool(
            name="triage",
            summary="Let an agent investigate an incident of a cluster, read only, and write a report",
            handle=own.triage,
            body=own.Triage,
            answer=own.Applied,
            names_host=True,
        ),
    ]
    return {tool.name: tool for tool in found} | workspace_tools()
