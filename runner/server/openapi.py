"""The OpenAPI document of a server, from its table of routes."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from runner import __version__
from runner.core.codec import encode
from runner.server.route import Route

_OF_TOOL = re.compile(rb"runner\.ops\.tools\.(\w+)\.(\w+)")  # values of tools have the same names in each module
_REF = "#/components/schemas/{name}"
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
    types = [kind for route in routes for kind in (route.body, route.query, route.answer) if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    by_type = dict(zip(map(repr, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_type, components)
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


def _operation(route: Route, schemas: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    names = re.findall(r"{(\w+)}", route.path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    if route.query is not None:
        schema = components[route.query.__name__]
        for name, value in schema["properties"].items():
            required = name in schema.get("required", ())
            parameters.append({"name": name, "in": "query", "required": required, "schema": value})
    answer: dict[str, Any] = {"description": "what was asked for"}
    if route.answer is not None:
        answer["content"] = {route.media: {"schema": schemas[repr(route.answer)]}}
    problem = {"application/problem+json": {"schema": {"$ref": _REF.format(name="Problem")}}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}{re.sub(r'[^a-z]+', '_', route.path.removeprefix('/api/v1'))}".rstrip(
            "_"
        ),
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
    if route.open:
        operation["security"] = []
    return operation
