"""Files to documents: found, read, completed from the defaults, validated, every error at its place.

Nothing here stops at the first error. What pydantic says is put into our words, so that no wording of
a library reaches a user.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from msgspec import Struct
from pydantic import BaseModel, Field, ValidationError

from runner.core import plugins
from runner.core.errors import (
    BadName,
    BadValue,
    DuplicateName,
    EmptyManifest,
    MissingField,
    NothingToRun,
    OverBudget,
    PathEscape,
    Place,
    RunnerError,
    UnknownField,
    UnknownKind,
    UnknownVersion,
    UnreadableManifest,
    in_order,
    nearest,
)
from runner.core.ids import is_name
from runner.core.sanitize import excerpt
from runner.core.settings import shipped
from runner.manifest import kinds as kinds_room
from runner.manifest import text, upgrade
from runner.manifest.kinds._fields import FORM, Body, Fault, Faults, Shape
from runner.manifest.text import Tree

API_VERSION = "runner/v1"
DEFAULTS = "defaults"  # in place of a file's name
FINDINGS = 1000  # a file; what is wrong in more places is wrong in one

Keys = tuple[str | int, ...]


class Document(Struct, frozen=True, eq=False, kw_only=True):
    """A manifest document. ``spec`` has the defaults merged in; ``data`` is what was written, whole, as plain JSON.

    ``file`` is its name for people, ``directory`` what its relative references start from. Keys lead
    from ``spec`` to a field or list item.
    """

    kind: str
    name: str
    spec: BaseModel
    file: str
    directory: Path
    data: Mapping[str, object]
    tree: Tree

    @property
    def written(self) -> dict[str, Any]:
        """Return ``spec`` as written, without defaults."""
        return cast(dict[str, Any], self.data["spec"])

    def place(self, *keys: str | int) -> Place:
        """Return the place of a value, or of its nearest written ancestor."""
        return self.tree.place("spec", *keys)

    def wrote(self, *keys: str | int) -> bool:
        """Tell whether a value is written in this document, not a default."""
        return self.tree.wrote("spec", *keys)

    def origin(self, *keys: str | int) -> str:
        """``file:line`` of a value written in this document, else ``defaults``."""
        if self.file == DEFAULTS or not self.wrote(*keys):
            return DEFAULTS
        place = self.place(*keys)
        return f"{place.file}:{place.line}"


class Metadata(Shape):
    name: str = Field(description="The document's name, once for each kind.")


class Header(Shape):
    """Fields of every document, whatever its kind."""

    apiVersion: str = Field(description="The version of the format.")
    kind: str = Field(description="Content of the document.")
    metadata: Metadata = Field(description="Name of the document, and labels.")
    spec: dict[str, Any] = Field(description="The document's body, by kind.")


class _Kinds(Mapping[str, type[Body]]):
    """Every kind by name. The module of one is imported when it is asked for: making its models takes milliseconds."""

    def __init__(self) -> None:
        self._modules = {"".join(map(str.capitalize, name.split("_"))): name for name in plugins.names(kinds_room)}

    def __getitem__(self, kind: str) -> type[Body]:
        body: type[Body] = plugins.load(kinds_room, self._modules[kind]).Spec
        return body

    def __contains__(self, kind: object) -> bool:
        return kind in self._modules

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def file_of(self, kind: str) -> str:
        """Return the name of the file with its defaults."""
        return self._modules[kind].replace("_", "-") + ".runner.yaml"


@cache
def kinds() -> _Kinds:
    return _Kinds()


class _Defaults(Mapping[str, Document]):
    """Shipped documents with the defaults, each kind's read when it is asked for."""

    def __getitem__(self, key: str) -> Document:
        return _defaults_of(key.partition(" ")[0])[key]

    def __iter__(self) -> Iterator[str]:
        for kind in kinds():
            yield from _defaults_of(kind)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@cache
def defaults() -> Mapping[str, Document]:
    """The shipped document of each kind that holds its defaults, and those for the agents that have some of their own.

    Only a ``Policy`` says all that its kind needs; the ``spec`` of another is an empty shell. The key of an agent's own
    is kind and agent, as in ``AgentType claude``.
    """
    return _Defaults()


@cache
def _defaults_of(kind: str) -> Mapping[str, Document]:
    folder = shipped("manifests") / "defaults"
    found = {}
    for tree in text.parse(DEFAULTS, text.read(folder / kinds().file_of(kind), DEFAULTS))[0]:
        header = Header.model_validate(tree.data)
        name = header.metadata.name
        found[kind if name == DEFAULTS else f"{kind} {name}"] = Document(
            kind=kind,
            name=name,
            spec=kinds()[kind].model_validate(header.spec) if kind == "Policy" else Body.model_construct(),
            file=DEFAULTS,
            directory=folder,
            data=header.model_dump(),
            tree=tree,
        )
    return found


def _defaults_for(kind: str, written: Mapping[str, Any]) -> dict[str, Any]:
    own = defaults().get(f"{kind} {written.get('agent')}")
    return {**defaults()[kind].written, **(own.written if own else {})}


def load(path: Path) -> tuple[list[Document], list[RunnerError]]:
    """The documents of a file or folder, and everything that is wrong in any of them, by place.

    Of a folder: its ``*.runner.yaml`` and ``*.runner.yml``, then every YAML file of its folder
    ``.runner``; every YAML file of a folder that is itself named ``.runner``. A document with an error
    is left out. Names in places are as ``path`` is given.
    """
    drafts, found = survey(path)
    return [draft.document for draft in drafts if draft.document], found


@text.collector_paused()
def survey(path: Path) -> tuple[list[Draft], list[RunnerError]]:
    """Load like ``load``, and return what is known of the faulty documents too."""
    found: list[RunnerError] = []
    drafts: list[Draft] = []
    try:
        paths = files(path)
    except OSError as error:
        return [], [UnreadableManifest(f"`{excerpt(str(path))}` cannot be read: {(error.strerror or '').lower()}")]
    inside = os.path.realpath(path) if os.path.isdir(path) else None
    for file in paths:
        more, errors = _load_file(file, inside)
        if inside is not None and not more and not errors:
            message = f"`{excerpt(str(file))}` holds no document: nothing, or only comments"
            found.append(EmptyManifest(message, hint="write one, or remove the file"))
        drafts += more
        found += errors
    found += _duplicates(drafts)
    if not drafts and all(finding.severity == "warning" for finding in found):
        hint = "manifests are files named `*.runner.yaml`, or in a folder named `.runner`"
        found.append(NothingToRun(f"`{excerpt(str(path))}` holds no manifests", hint=hint))
    unique = {(f.code, f.at, f.message): f for f in found}  # one fault, used through several aliases
    return drafts, in_order(unique.values())


class Draft(Struct, frozen=True):
    """A document as far as it is known; ``document`` is there when nothing is wrong with it."""

    tree: Tree
    kind: str | None = None
    name: str | None = None
    document: Document | None = None


def files(path: Path) -> list[Path]:
    """The manifest files that a path means. Raises ``OSError``."""
    if not os.path.isdir(path):
        return [path]
    own = Path(os.path.abspath(path)).name == ".runner"
    suffixes = (".yaml", ".yml") if own else (".runner.yaml", ".runner.yml")
    found = _yaml_files(path, suffixes)
    if not own and os.path.isdir(path / ".runner"):
        found += _yaml_files(path / ".runner", (".yaml", ".yml"))
    return found


def _yaml_files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    return sorted(f for f in folder.iterdir() if f.name.endswith(suffixes) and not f.name.startswith("."))


def _load_file(path: Path, inside: str | None) -> tuple[list[Draft], list[RunnerError]]:
    file = str(path)
    try:
        if inside is not None and not Path(os.path.realpath(path)).is_relative_to(inside):
            raise PathEscape(f"`{excerpt(file)}` leads out of its folder", hint="a manifest lies where it is found")
        trees, found = text.parse(file, text.read(path, file))
    except RunnerError as error:
        return [], [error]
    drafts = []
    seen = {error.at for error in found}  # what is wrong as YAML is not judged again as a manifest
    for tree in trees:
        if len(found) > FINDINGS:
            break
        draft, errors = judge(tree, path)
        drafts.append(draft)
        found += [error for error in errors if error.at not in seen]
    if len(found) > FINDINGS:
        found[FINDINGS:] = [OverBudget(f"`{excerpt(file)}` has more than {FINDINGS} errors; the rest is not shown")]
    return drafts, found


def _duplicates(drafts: list[Draft]) -> Iterator[RunnerError]:
    first: dict[tuple[str, str], Place] = {}
    for draft in drafts:
        if draft.kind is None or draft.name is None:
            continue
        place = draft.tree.place("metadata", "name")
        earlier = first.setdefault((draft.kind, draft.name), place)
        if earlier != place:
            message = f"there are two documents `{draft.name}` of kind `{draft.kind}`"
            yield DuplicateName(message, at=place, hint="rename one of the two", also=(earlier,))


def judge(tree: Tree, path: Path) -> tuple[Draft, list[RunnerError]]:
    """Read one document of the file ``path``, and collect every fault that it has as a manifest."""
    if not isinstance(tree.data, dict):
        return Draft(tree), [BadValue(f"a document is a mapping, not {tree.written()}", at=tree.place())]
    data: dict[str, Any] = tree.data
    if data.get("apiVersion", API_VERSION) != API_VERSION:
        # The fields of another version are not ours to judge.
        return Draft(tree), [_unknown_version(f"{tree.written('apiVersion')} is not a known version", tree)]
    header, found = _validated(Header, data, tree, ())
    kind, name = _kind(tree, data, found), _name(tree, data, found)
    spec = None
    if kind is not None and isinstance(data.get("spec"), dict):
        spec, errors = _spec(kinds()[kind], _defaults_for(kind, data["spec"]), tree, data["spec"])
        found += errors
    if header is None or kind is None or name is None or spec is None or found or not tree.sound:
        return Draft(tree, kind, name), found
    return Draft(
        tree,
        kind,
        name,
        Document(kind=kind, name=name, spec=spec, file=str(path), directory=path.parent, data=data, tree=tree),
    ), found


def _kind(tree: Tree, data: dict[str, Any], found: list[RunnerError]) -> str | None:
    kind = data.get("kind")
    if not isinstance(kind, str) or kind in kinds():
        return kind if isinstance(kind, str) else None
    at = tree.place("kind")
    found.append(UnknownKind(f"`{excerpt(kind)}` is not a known kind", at=at, hint=nearest(kind[:60], kinds())))
    return None


def _name(tree: Tree, data: dict[str, Any], found: list[RunnerError]) -> str | None:
    metadata = data.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or is_name(name):
        return name if isinstance(name, str) else None
    hint = "up to 63 of a-z, 0-9 and `-`, with a letter or digit at both ends"
    found.append(BadName(f"`{excerpt(name)}` is not a name", at=tree.place("metadata", "name"), hint=hint))
    return None


def _unknown_version(message: str, tree: Tree) -> RunnerError:
    version = tree.data.get("apiVersion") if isinstance(tree.data, dict) else None
    hint = f"known versions: {API_VERSION}"
    if version in [f"runner/{name}" for name in plugins.names(upgrade)]:
        hint = f"`runner convert` rewrites it as {API_VERSION}"
    return UnknownVersion(message, at=tree.place("apiVersion"), hint=hint)


def _spec(
    body: type[Body], default: Mapping[str, Any], tree: Tree, written: dict[str, Any]
) -> tuple[BaseModel | None, list[RunnerError]]:
    faults = [*_spell_out(body, tree, written), *body.faults_as_written(written)]
    spec, found = _validated(body, _merged(body, default, written), tree, ("spec",))
    return spec, [*(_broken(fault, tree, ("spec",)) for fault in faults), *found]


def _spell_out(body: type[Body], tree: Tree, spec: dict[str, Any]) -> Iterator[Fault]:
    """Write each field that is another word for a list of one as that list, in the data and in the tree."""
    for (*parents, singular), plural in body.singular.items():
        block: Any = spec
        for parent in parents:
            block = block.get(parent) if isinstance(block, dict) else None
        if not isinstance(block, dict) or singular not in block:
            continue
        value = block.pop(singular)
        if plural in block:
            message = f"`{singular}` is another word for `{plural}`, which is written too"
            yield Fault((*parents, singular), message, "remove one of the two")
        else:
            block[plural] = [value]
            tree.spell_out("spec", *parents, singular=singular, plural=plural)


def _merged(model: type[BaseModel], default: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """``written`` over ``default``. A block that may be left out has its defaults only where it is written."""
    result = dict(written)
    for name, value in default.items():
        inner, optional = inner_model(model, name)
        if inner is not None and isinstance(value, dict):
            block = written.get(name, None if optional else {})
            if isinstance(block, dict):
                result[name] = _merged(inner, value, block)
        else:
            result.setdefault(name, value)
    return result


@cache
def inner_model(model: type[BaseModel], name: str) -> tuple[type[BaseModel] | None, bool]:
    """The model that a field holds, be it in a list, if it holds one; and whether the field may be left empty."""

    def search(annotation: Any) -> type[BaseModel] | None:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation
        return next((found for inner in get_args(annotation) if (found := search(inner))), None)

    fields = {field.alias or key: field for key, field in model.model_fields.items()}
    annotation = fields[name].annotation
    return search(annotation), type(None) in get_args(annotation)


def _validated(
    model: type[BaseModel], data: Mapping[str, Any], tree: Tree, keys: Keys
) -> tuple[BaseModel | None, list[RunnerError]]:
    """``data``, which stands at ``keys`` in the document, as a model, or what is wrong with it."""
    try:
        return model.model_validate(data), []
    except ValidationError as error:
        details = error.errors(include_url=False)
        found = (finding for detail in details for finding in _findings(detail, model, tree, keys))
        return None, list(islice(found, FINDINGS + 1))


Model = TypeVar("Model", bound=BaseModel)


def load_value(model: type[Model], name: str, raw: bytes) -> tuple[Model | None, list[RunnerError]]:
    """One mapping that is no document, in YAML or JSON, as a model; ``name`` is what places show.

    Raises ``BadEncoding`` and ``OverBudget``.
    """
    value, _, found = load_tree(model, name, raw)
    return value, found


def load_tree(model: type[Model], name: str, raw: bytes) -> tuple[Model | None, Tree | None, list[RunnerError]]:
    """Load like ``load_value``, from a tree that knows the place of each value."""
    trees, found = text.parse(name, raw)
    if found or len(trees) != 1 or not isinstance(trees[0].data, dict):
        return None, None, found or [BadValue(f"`{excerpt(name)}` does not hold one mapping")]
    value, found = _validated(model, trees[0].data, trees[0], ())
    return cast("Model | None", value), trees[0], found


# pydantic's error type: what was expected, and a hint
_EXPECTED = {
    "string_type": ("text", "quotes make it text"),
    "string_too_short": ("long enough", "write at least one character"),
    "bool_type": ("true or false", "valid choices: false, true"),
    "int_type": ("a whole number", None),
    "float_type": ("a number", None),
    "list_type": ("a list", "write the items in brackets, or one a line behind `- `"),
    "too_short": ("long enough", "write at least one item"),
    "dict_type": ("a mapping", "write its fields below it, indented"),
    "model_type": ("a mapping", "write its fields below it, indented"),
}


def _findings(detail: Any, model: type[BaseModel], tree: Tree, prefix: Keys) -> Iterator[RunnerError]:
    own: Keys = tuple(key for key in detail["loc"] if not str(key).startswith(FORM))
    keys = (*prefix, *own)
    context: dict[str, Any] = detail.get("ctx", {})
    hint: str | None
    match detail["type"]:
        case "missing" if keys == ("apiVersion",):
            yield _unknown_version("`apiVersion` is missing in the document", tree)
        case "missing":
            description = _fields(model, own[:-1])[str(own[-1])]
            hint = f"add `{own[-1]}`: {description[0].lower()}{description[1:].removesuffix('.')}"
            at = tree.key_place(*keys[:-1])
            yield MissingField(f"`{own[-1]}` is missing in {_name_of(keys[:-1])}", at=at, hint=hint)
        case "extra_forbidden":
            name = excerpt(str(own[-1]))
            message = f"`{name}` is not a field of {_name_of(keys[:-1])}"
            yield UnknownField(message, at=tree.key_place(*keys), hint=_hint(name, model, own[:-1]))
        case "value_error" if isinstance(context["error"], Faults):
            for fault in context["error"].faults:
                yield _broken(fault, tree, keys)
        case "value_error":
            noun, _, examples = str(context["error"]).partition(" such as ")
            hint = f"for example {examples}" if examples else None
            yield BadValue(f"{tree.written(*keys)} is not {noun}", at=tree.place(*keys), hint=hint)
        case "literal_error":
            choices = re.findall(r"'([^']*)'", context["expected"]) or [context["expected"].lower()]  # or `True`
            hint = nearest(str(detail["input"])[:60], choices)
            yield BadValue(f"{tree.written(*keys)} is not a valid choice", at=tree.place(*keys), hint=hint)
        case "greater_than" | "greater_than_equal" | "less_than_equal" as bound:
            word, key = _BOUNDS[bound]
            hint = f"{word} {context[key]:g}"
            yield BadValue(f"{tree.written(*keys)} is out of range", at=tree.place(*keys), hint=hint)
        case kind:
            noun, hint = _EXPECTED[kind]
            hint = _of_another_kind(detail["input"], kind) or hint
            yield BadValue(f"{tree.written(*keys)} is not {noun}", at=tree.place(*keys), hint=hint)


def _of_another_kind(value: object, wanted: str) -> str | None:
    """The hint for a value that differs from what is wanted in how it is written only."""
    match value:
        case [str(item)] if wanted == "string_type":
            return f"write it without brackets: {excerpt(item)}"
        case list() | dict() if wanted == "string_type":
            return "write one value"
        case str() if wanted == "bool_type" and value in ("true", "false"):
            return f"quotes make it text: write {value} without them"
        case str() if wanted in ("int_type", "float_type") and value.strip().isdigit():
            return f"quotes make it text: write {value} without them"
        case _:
            return None


_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than_equal": ("at most", "le"),
}


def _broken(fault: Fault, tree: Tree, keys: Keys) -> RunnerError:
    return BadValue(fault.message, at=tree.key_place(*keys, *fault.keys), hint=fault.hint)


def _fields(model: type[BaseModel] | None, keys: Keys) -> dict[str, str]:
    """The fields of the model that ``keys`` lead to, with their descriptions."""
    for key in keys:
        if model is not None and isinstance(key, str):
            model, _ = inner_model(model, key)
    return {f.alias or name: f.description or "" for name, f in model.model_fields.items()} if model else {}


def _hint(name: str, model: type[BaseModel], keys: Keys) -> str:
    """Suggest a field for an unknown one: a near name, or the kind whose ``spec`` has it."""
    near = nearest(name, _fields(model, keys))
    bodies = {} if keys or model not in kinds().values() else kinds()
    others = [f"`{kind}`" for kind, body in bodies.items() if name in _fields(body, ())]
    if not others:
        return near
    where = f"it is a field of {' and '.join(others)}"
    return f"{near} {where}" if near.endswith("?") else where


def _name_of(keys: Keys) -> str:
    words = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return f"`{words[1:]}`" if words else "the document"
