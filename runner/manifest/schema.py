"""JSON schemas of the manifests, from the models and the shipped defaults; ``python -m runner.manifest.schema``.

They describe documents as written: what a default fills is not required. Validation is the loader's;
a test shows that both judge alike. The umbrella schema chooses by ``kind``, so that an editor shows
the errors of the right branch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from runner.ids import NAME
from runner.manifest.load import API_VERSION, Header, defaults, kinds
from runner.settings import shipped

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class _Untitled(GenerateJsonSchema):
    """Without a title for each field, which would only repeat its name."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False


def schemas() -> dict[str, dict[str, Any]]:
    """Every schema by file name."""
    header = _header()
    choose = [
        {"if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]}, "then": {"$ref": _file(kind)}}
        for kind in kinds()
    ]
    umbrella = {**header, "title": "runner manifest", "allOf": choose}
    umbrella["properties"] = {**header["properties"], "kind": {**header["properties"]["kind"], "enum": [*kinds()]}}
    return {"runner.schema.json": umbrella, **{_file(kind): _kind(kind) for kind in kinds()}}


def write(folder: Path) -> None:
    for name, schema in schemas().items():
        (folder / name).write_text(json.dumps(schema, indent=2) + "\n")


def _file(kind: str) -> str:
    return f"{kind}.schema.json"


def _of(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema(schema_generator=_Untitled)


def _header() -> dict[str, Any]:
    schema = {"$schema": DIALECT, **_of(Header)}
    schema["properties"]["apiVersion"]["const"] = API_VERSION
    schema["$defs"]["Metadata"]["properties"]["name"]["pattern"] = f"^{NAME.pattern}$"
    return schema


def _kind(kind: str) -> dict[str, Any]:
    header, body = _header(), _of(kinds()[kind])
    blocks = body.pop("$defs", {})
    for (*parents, singular), plural in kinds()[kind].singular.items():
        block = body
        for parent in parents:
            block = _block(block["properties"][parent], blocks) or {}
        description = f"Another word for a list of one in `{plural}`."
        block["properties"][singular] = {**block["properties"][plural]["items"], "description": description}
    _fill(body, defaults()[kind].written, blocks)
    schema = {**header, "title": kind, "description": body["description"]}
    schema["properties"] = {
        **header["properties"],
        "kind": {**header["properties"]["kind"], "const": kind},
        "spec": body,
    }
    schema["$defs"] |= blocks
    return schema


def _fill(block: dict[str, Any], default: Mapping[str, Any], blocks: Mapping[str, Any]) -> None:
    """Put defaults into the schema of a block, and take what they fill out of ``required``."""
    for name, value in default.items():
        field = block["properties"][name]
        inner = _block(field, blocks)
        if inner is None:
            field["default"] = value
        else:
            _fill(inner, value, blocks)
    block["required"] = [name for name in block.get("required", []) if name not in default]


def _block(field: Mapping[str, Any], blocks: Mapping[str, Any]) -> dict[str, Any] | None:
    """The definition that a field refers to, alone or beside null."""
    for choice in (field, *field.get("anyOf", ())):
        if "$ref" in choice:
            return blocks[choice["$ref"].rpartition("/")[2]]  # type: ignore[no-any-return]
    return None


if __name__ == "__main__":
    write(shipped("schemas") / "v1")
