"""Templates in manifests: values looked up and put into text, once. No statements, no calls, no arithmetic.

Jinja's sandbox does not bound ``'a' * 10**9`` or nested loops, so an allow-list of syntax nodes decides
what a template may be; what is left can only grow with the values it names, and the result is capped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from runner.core.errors import BadTemplate, Place, nearest
from runner.core.patterns import pattern
from runner.core.sanitize import excerpt

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RESULT = 8 << 20  # characters; a prompt of 5 MiB is a real one

# NUL ends words of commands and variables, and half of a surrogate pair has no bytes.
_UNUSABLE = pattern("[\0\ud800-\udfff]")

# All that most templates hold. Text and such lookups are filled without jinja, which takes 50 ms to import.
_LOOKUP = pattern(r"\{\{ *([A-Za-z]\w*(?:\.[A-Za-z]\w*)+) *\}\}", re.ASCII)

_NAMES = pattern(r"\{\{\s*([A-Za-z]\w*(?:\.[A-Za-z]\w*)*)", re.ASCII)  # that a template begins with

_KEPT = 5_000  # templates that are not parsed again: most runs share those of their agent type
_FILTERS = ("default", "join", "lower", "tojson", "trim", "upper")


def _text(value: object) -> str:
    """Write a list, such as an output of a matrix, and whatever else is not text the way JSON does."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | tuple | bool | None) else str(value)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    from jinja2 import StrictUndefined  # 60 ms that most commands do not need
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True, finalize=_text)
    environment.filters = {name: environment.filters[name] for name in _FILTERS}
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals.clear()
    return environment


def is_template(text: str) -> bool:
    return "{{" in text or "{%" in text or "{#" in text


def check(text: str, *, at: Place | None = None) -> BadTemplate | None:
    """Return the fault in a template's form, or ``None``."""
    complaint = _complaint(text) if is_template(text) else None
    return BadTemplate(complaint[0], at=at, hint=complaint[1]) if complaint else None


@lru_cache(_KEPT)
def _complaint(text: str) -> tuple[str, str | None] | None:
    """Message and hint."""
    if _lookups(text) is not None:
        return None
    from jinja2 import TemplateSyntaxError, nodes

    try:
        tree = _environment().parse(text)
    except TemplateSyntaxError as error:
        return f"the template is malformed: {error.message}", None
    allowed = (
        nodes.Output, nodes.TemplateData, nodes.Name, nodes.Getattr, nodes.Getitem, nodes.Const, nodes.Filter,
    )  # fmt: skip
    for node in tree.find_all(nodes.Node):
        if not isinstance(node, allowed):
            word = type(node).__name__.lower()
            hint = "write {{ name.part }}, optionally with | " + ", | ".join(_FILTERS)
            return f"a template may only look values up, and this one has `{word}`", hint
        if isinstance(node, nodes.Filter) and node.name not in _FILTERS:
            return f"`{node.name}` is not a filter", f"filters: {', '.join(_FILTERS)}"
        if isinstance(node, nodes.Getattr) and node.attr.startswith("_"):
            return f"`{node.attr}` cannot be looked up", None
    return None


@lru_cache(_KEPT)
def _lookups(text: str) -> tuple[str, ...] | None:
    """Text and the dotted names between, in turn; ``None`` when only jinja knows what the template means."""
    parts = tuple(_LOOKUP.split(text))
    odd = "\r" in text or any(is_template(part) or part.endswith("{") for part in parts[::2])
    return None if odd else parts


def _looked_up(text: str, values: Mapping[str, object]) -> list[str] | None:
    """Render a template of plain lookups; ``None`` for any other, or when jinja must name what is missing."""
    parts = list(_lookups(text) or ())
    for position in range(1, len(parts), 2):
        value: object = values
        for name in parts[position].split("."):
            if not isinstance(value, Mapping) or hasattr(value, name):
                return None
            try:
                value = value[name]
            except KeyError:
                return None
        parts[position] = _text(value)
    return parts or None


def _generated(text: str, values: Mapping[str, object], at: Place | None) -> Iterator[str]:
    from jinja2 import TemplateError, UndefinedError

    try:
        yield from _compiled(text).generate(dict(values))
    except UndefinedError as error:
        name, known = _lacking(text, values)
        reason = f"the template cannot be filled: {error.message}"
        message = f"`{excerpt(name)}` is not known to the template" if name else reason
        of_others = "name the run in `needs`: outputs are those of runs that this one needs"
        hint = of_others if name.startswith("outputs.") and not known else nearest(name.rpartition(".")[2], known)
        raise BadTemplate(message, at=at, hint=hint) from None
    except TemplateError as error:
        raise BadTemplate(
            f"the template cannot be filled: {error.message}", at=at, hint="known: " + ", ".join(sorted(values))
        ) from None


def _lacking(text: str, values: Mapping[str, object]) -> tuple[str, Iterable[str]]:
    """The first dotted name in a template that stands for nothing, up to the part that there is not, and what there
    is in its place; without one, no name, and the names that every template may begin with."""
    for path in _NAMES.findall(text):
        value: object = values
        for position, part in enumerate(parts := path.split(".")):
            if not isinstance(value, Mapping):
                break
            if part not in value:
                return ".".join(parts[: position + 1]), list(map(str, value))
            value = value[part]
    return "", values


@lru_cache(_KEPT)
def _compiled(text: str) -> Template:
    return _environment().from_string(text)


def render(text: str, values: Mapping[str, object], *, at: Place | None = None) -> str:
    """Fill a template that ``check`` passed. Raises ``BadTemplate`` for unknown names and unusable results."""
    if not is_template(text):
        return text
    parts: list[str] = []
    size = 0
    for part in _looked_up(text, values) or _generated(text, values, at):
        size += len(part)
        if size > MAX_RESULT:
            raise BadTemplate(f"the template gives more than {MAX_RESULT >> 20} Mi characters", at=at)
        parts.append(part)
    filled = "".join(parts)
    if odd := _UNUSABLE.search(filled):
        raise BadTemplate(
            f"the template gives the character U+{ord(odd[0]):04X}", at=at, hint="look at the values that it takes in"
        )
    return filled
