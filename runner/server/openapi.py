"""The OpenAPI document of a server, from its table of routes."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from runner import __version__
from runner.core.codec import encode
from runner.server.route import BASE, Route

_OF_TOOL = re.compile(rb"runner\.ops\.tools\.(\w+)\.(\w+)")  # values of tools have the same names in each module
_REF = "#/components/schemas/{name}"
_KEYS = ("id", "name")  # fields that paths name things by
_PROBLEM = {
    "type": "object",
    "required": ["type", "status", "code", "detail", "hint"],
    "properties": {
        "type": {"type": "string"},
        "status": {"type": "integer"},
        "code": {"type": "string", "description": "The code of the error, which never changes."},
        "detail": {"type": "string"},
        "hint": {"type": ["string", "null"]},
        "errors": {"type": "array", "items": {"type": "object"}},
    },
}


def document(routes: tuple[Route, ...]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of some routes."""
    types = [
        kind for route in routes for kind in (route.body, route.query, route.headers, route.answer) if kind is not None
    ]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    by_type = dict(zip(map(repr, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(_path(route), {})[route.method.lower()] = _operation(route, by_type, components)
    for route in routes:
        if links := _links(route, routes, components):
            paths[_path(route)][route.method.lower()]["responses"][str(route.status)]["links"] = links
    found = {
        "openapi": "3.1.0",
        "info": {"title": "runner", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Problem": _PROBLEM},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }
    short = _OF_TOOL.sub(lambda name: name[1].capitalize() + name[2], encode(found))
    return msgspec.json.decode(short, type=dict[str, Any])


def _path(route: Route) -> str:
    return route.path.replace(":path", "")


def _operation_id(route: Route) -> str:
    return f"{route.method.lower()}{re.sub(r'[^a-z]+', '_', _path(route).removeprefix(BASE))}".rstrip("_")


def _links(route: Route, routes: tuple[Route, ...], components: dict[str, Any]) -> dict[str, Any]:
    """Return what can be asked about that which a collection's route has made, or about the first that it lists."""
    fields = components.get(getattr(route.answer, "__name__", ""), {}).get("properties", {})
    place = ""
    if not fields.keys() & {*_KEYS}:
        for name, field in fields.items():
            if item := field.get("items", {}).get("$ref"):
                place, fields = f"/{name}/0", components[item.rpartition("/")[2]]["properties"]
    key = next((key for key in _KEYS if key in fields), None)
    if key is None or "{" in route.path:
        return {}
    found = {}
    for other in routes:
        if other.path.startswith(f"{route.path}/{{id}}") and other.path.count("{") == 1:
            name = _operation_id(other)
            found[name] = {"operationId": name, "parameters": {"id": f"$response.body#{place}/{key}"}}
    return found


def _operation(route: Route, schemas: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    names = re.findall(r"{(\w+)", route.path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    for place, kind in (("query", route.query), ("header", route.headers)):
        schema = {"properties": {}} if kind is None else components[kind.__name__]
        for name, value in schema["properties"].items():
            required = name in schema.get("required", ())
            parameters.append({"name": name, "in": place, "required": required, "schema": value})
    answer: dict[str, Any] = {"description": "what was asked for"}
    if route.answer is not None:
        answer["content"] = {route.media: {"schema": schemas[repr(route.answer)]}}
        answer["content"] |= {media: {"schema": {"type": "string"}} for media in route.forms}
    problem = {"application/problem+json": {"schema": {"$ref": _REF.format(name="Problem")}}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": _operation_id(route),
        "responses": {
            str(204 if route.answer is None else route.status): answer,
            **{statuses: {"description": "an error", "content": problem} for statuses in ("4XX", "5XX")},
        },
    }
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        content = {"application/json": {"schema": schemas[repr(route.body)]}}
        operation["requestBody"] = {"required": True, "content": content}
    if route.raw_bytes:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
    if route.open:
        operation["security"] = []
    return operation
