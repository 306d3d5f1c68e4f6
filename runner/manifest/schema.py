"""JSON schemas of the manifests, from the models and the shipped defaults; ``python -m runner.manifest.schema``.

They describe documents as written: what a default fills is not required. Validation is the loader's;
a test shows that both judge alike. The umbrella schema chooses by ``kind``, so that an editor shows
the errors of the right branch. Files that are no manifests, such as the turns of a rehearsal, have schemas
beside them, and a catalog says which files each is for. Editors know draft-07 best, so each schema is
there in that form too, under the same name in the folder of its own that ``DRAFT_07`` names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from runner.core import plugins
from runner.core.ids import NAME
from runner.core.settings import shipped
from runner.manifest.load import API_VERSION, Header, defaults, kinds
from runner.manifest.model_script import Script
from runner.manifest.repository import FILE, RepositoryPolicy

DIALECT = "https://json-schema.org/draft/2020-12/schema"
DRAFT_07 = "draft-07"
UMBRELLA = "runner.schema.json"
CATALOG = "catalog.json"

# What is no manifest: a word for it, its model, its title, and the names of its files.
_OTHERS: dict[str, tuple[type[BaseModel], str, tuple[str, ...]]] = {
    "turns": (Script, "runner rehearsal turns", ("*.turns.yaml", "*.turns.yml", "*.turns.json")),
    "agentgate-policy": (RepositoryPolicy, "AgentGate workspace policy", (f"**/{FILE}",)),
}
_MANIFESTS = ("*.runner.yaml", "*.runner.yml", "**/.runner/*.yaml", "**/.runner/*.yml")


class _Untitled(GenerateJsonSchema):
    """Without a title for each field, which would only repeat its name; whole numbers have 64 bits, as in manifests."""

    def int_schema(self, schema: core_schema.IntSchema) -> dict[str, Any]:
        found = super().int_schema(schema)
        return {**found, "maximum": min(found.get("maximum", _MOST), _MOST)}

    def field_title_should_be_set(self, schema: object) -> bool:
        return False


_MOST = (1 << 63) - 1


def schemas() -> dict[str, dict[str, Any]]:
    """The schema of every kind, and the one that chooses among them, by file name, in their 2020-12 form."""
    header = _header(UMBRELLA)
    choose = [
        {"if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]}, "then": {"$ref": file_of(kind)}}
        for kind in kinds()
    ]
    umbrella = {**header, "title": "runner manifest", "allOf": choose}
    umbrella["properties"] = {**header["properties"], "kind": {**header["properties"]["kind"], "enum": [*kinds()]}}
    return {UMBRELLA: umbrella, **{file_of(kind): _kind(kind) for kind in kinds()}}


def others() -> dict[str, dict[str, Any]]:
    """The schemas of what is no manifest, by the word for it, in their 2020-12 form."""
    return {
        word: {"$schema": DIALECT, "$id": file_of(word), **_of(model), "title": title}
        for word, (model, title, _) in _OTHERS.items()
    }


def catalog() -> dict[str, Any]:
    """Build SchemaStore's catalog of the schemas; URLs are relative to the catalog."""
    entries: list[tuple[str, str, tuple[str, ...], str]]
    entries = [("runner manifest", "What AI agents may do, by kind of document.", _MANIFESTS, UMBRELLA)]
    entries += [
        (found["title"], found["description"], _OTHERS[word][2], file_of(word)) for word, found in others().items()
    ]
    return {
        "$schema": "https://json.schemastore.org/schema-catalog.json",
        "version": 1,
        "schemas": [
            {"name": name, "description": text, "fileMatch": [*files], "url": f"v1/{DRAFT_07}/{file}"}
            for name, text, files, file in entries
        ],
    }


def write(folder: Path) -> None:
    """Write both forms of every schema."""
    (folder / DRAFT_07).mkdir(exist_ok=True)
    for name, schema in (schemas() | {file_of(word): found for word, found in others().items()}).items():
        (folder / name).write_text(text_of(schema))
        (folder / DRAFT_07 / name).write_text(text_of(as_draft_07(schema)))


def text_of(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, indent=2) + "\n"


def bundled() -> dict[str, Any]:
    """The umbrella with every kind inside: one file that needs no other."""
    found = schemas()
    umbrella = found.pop(UMBRELLA)
    umbrella["$defs"] |= found
    return umbrella


def with_registered(schema: Any) -> Any:
    """The same rules, with the agents that other distributions have registered here."""
    built_in, known = [*plugins.names("runner.agents")], plugins.known("runner.agents")
    if isinstance(schema, list):
        return [with_registered(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        word: known if word == "enum" and value == built_in else with_registered(value)
        for word, value in schema.items()
    }


def as_draft_07(schema: Any) -> Any:
    """The same rules in the words of draft-07."""
    if not isinstance(schema, dict):
        return schema  # true and false are schemas too
    found: dict[str, Any] = {}
    for word, value in schema.items():
        match word:
            case "$schema":
                found[word] = "http://json-schema.org/draft-07/schema#"
            case "$ref":
                found[word] = value.replace("#/$defs/", "#/definitions/")
            case "$defs" | "properties":
                inner = {name: as_draft_07(inner) for name, inner in value.items()}
                found["definitions" if word == "$defs" else word] = inner
            case "prefixItems":
                found["items"] = [as_draft_07(inner) for inner in value]
            case "allOf" | "anyOf" | "oneOf":
                found[word] = [as_draft_07(inner) for inner in value]
            case "items" if "prefixItems" in schema:
                found["additionalItems"] = as_draft_07(value)
            case "items" | "additionalProperties" | "propertyNames" | "not" | "if" | "then" | "else":
                found[word] = as_draft_07(value)
            case _:
                found[word] = value
    if "$ref" in found and len(found) > 1:
        # draft-07 ignores what stands beside a reference
        found["allOf"] = [{"$ref": found.pop("$ref")}, *found.get("allOf", ())]
    return found


def file_of(kind: str) -> str:
    return f"{kind}.schema.json"


def _of(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema(schema_generator=_Untitled)


def _header(file: str) -> dict[str, Any]:
    schema = {"$schema": DIALECT, "$id": file, **_of(Header)}
    schema["properties"]["apiVersion"]["const"] = API_VERSION
    schema["$defs"]["Metadata"]["properties"]["name"]["pattern"] = f"^{NAME.pattern}$"
    return schema


def _kind(kind: str) -> dict[str, Any]:
    header, body = _header(file_of(kind)), _of(kinds()[kind])
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
        if inner is None or not isinstance(value, dict):
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
    (shipped("schemas") / CATALOG).write_text(text_of(catalog()))
