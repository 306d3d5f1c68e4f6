"""Strict models and the field types that several kinds share.

A validator that spans fields raises ``Fault`` with the name of the field at fault; the loader knows its line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from msgspec import Struct
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from runner.core.ids import IMAGE, is_image
from runner.core.patterns import pattern
from runner.core.sanitize import excerpt
from runner.core.settings import parse_cpus, parse_disk, parse_duration, parse_memory, parse_size

FORM = "\0"  # begins the tags of forms that a value may have: pydantic puts them among the keys of a fault


class Fault(Struct, frozen=True):
    """A broken rule. ``keys`` lead from the model to the field; empty means the model as a whole."""

    keys: tuple[str | int, ...]
    message: str
    hint: str | None = None


class Faults(ValueError):
    """Raised by validators; pydantic carries it to the loader."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__()
        self.faults = faults


class Shape(BaseModel):
    # Built when first used: an inner model has no validator of its own to build, nor has a kind that nobody wrote.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, written: Any) -> Any:
        """Take ``1.0`` where a whole number is wanted: in JSON it is one, and no schema can tell them apart."""
        if not isinstance(written, dict) or not any(isinstance(value, float) for value in written.values()):
            return written
        whole = {field.alias or name for name, field in cls.model_fields.items() if int in _types(field.annotation)}
        return {name: _whole(value) if name in whole else value for name, value in written.items()}


class Body(Shape):
    """The ``spec`` of a kind.

    ``singular`` holds the fields that are another word for a list of one: where such a field is
    written, and the list's name beside it.
    """

    singular: ClassVar[Mapping[tuple[str, ...], str]] = {}

    @classmethod
    def faults_as_written(cls, spec: Mapping[str, Any]) -> Iterator[Fault]:
        """Rules about what a document says itself, without the defaults."""
        yield from ()


def _types(annotation: Any) -> tuple[Any, ...]:
    """A type, or those of a union."""
    return get_args(annotation) or (annotation,)


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 63 else value


def _quantity(parse: Callable[[str], Any], words: str) -> PlainValidator:
    def convert(value: object) -> Any:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(words)  # noqa: TRY004  # pydantic collects no other
        text = str(_whole(value))
        if not text.isascii():
            raise ValueError(words)
        return parse(text)

    return PlainValidator(convert)


def _command(value: object) -> object:
    if isinstance(value, str) and value and "\0" not in value:
        return value
    if not isinstance(value, list) or not value or value[0] == "":
        raise ValueError("a command such as `npm ci` or `[npm, ci]`")
    wrong = [i for i, word in enumerate(value) if not isinstance(word, str) or "\0" in word]
    if wrong:
        raise Faults(*(Fault((i,), "each word of a command is text", "put the word in quotes") for i in wrong))
    return value


def _relative_path(text: str) -> str:
    if not text or text.startswith("/") or "\\" in text or "\0" in text or {".", ".."} & set(text.split("/")):
        raise ValueError("a path below its folder such as `src/main.py`")
    return text


def _kept_path(text: str) -> str:
    _relative_path(text.removeprefix("~/"))
    return text


def _absolute_path(text: str) -> str:
    if not text.startswith("/") or "\0" in text:
        raise ValueError("an absolute path such as `/opt/node`")
    return text


def no_repeats(items: list[str]) -> list[str]:
    first = {item: position for position, item in reversed([*enumerate(items)])}
    repeated = [position for position, item in enumerate(items) if first[item] != position]
    if repeated:
        raise Faults(*(Fault((i,), f"`{excerpt(items[i])}` is in this list already", "remove it") for i in repeated))
    return items


def _variables(env: dict[str, str]) -> dict[str, str]:
    wrong = [name for name in env if not _VARIABLE.fullmatch(name)]
    if wrong:
        hint = "letters, digits and `_`, not starting with a digit or `RUNNER_`"
        raise Faults(*(Fault((name,), f"`{excerpt(name)}` cannot name a variable", hint) for name in wrong))
    return env


def image_name(text: str) -> str:
    if not is_image(text):
        raise ValueError("the name or id of an image such as `node:22`")
    return text


def matching(pattern: re.Pattern[str], words: str, **more: Any) -> tuple[AfterValidator, Any]:
    """Return the annotations of a text that is ``words``; ``more`` is as for ``Field``."""

    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(words)
        return text

    return AfterValidator(check), Field(json_schema_extra={"pattern": f"^(?:{pattern.pattern})$"}, **more)


_TOOLCHAIN = pattern(r"/[^\0]*|[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_MODEL = pattern(r"[A-Za-z0-9@][A-Za-z0-9@._:/+\[\]-]{0,199}")  # a gateway takes no longer one
_TOOL = pattern(r"[A-Za-z][A-Za-z0-9_]*")
_SKILL = pattern(r"(?=.{1,64}$)[a-z0-9]+(-[a-z0-9]+)*")
_LABEL = pattern(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def _word(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("text without a NUL such as `token`")
    return text


def _variable_name(text: str) -> str:
    if not _VARIABLE.fullmatch(text) or text in ("PATH", "HOME", "PWD"):  # without which no command would start
        raise ValueError("the name of a variable such as `NPM_TOKEN`")
    return text


_VARIABLE = pattern(r"(?!RUNNER_)[A-Za-z_][A-Za-z0-9_]*")

Text = Annotated[str, Field(min_length=1)]
Duration = Annotated[
    float,
    _quantity(parse_duration, "a duration such as 90s, 5m or 1h30m"),
    WithJsonSchema(
        {
            "type": ["string", "integer"],
            "pattern": r"^(?=.*[1-9])([0-9]{1,9}|([0-9]{1,6}d)?([0-9]{1,6}h)?([0-9]{1,8}m)?([0-9]{1,9}s)?)$",
            "exclusiveMinimum": 0,
            "maximum": 10**9 - 1,
        }
    ),
]


def _size_schema(least: int, most: int) -> WithJsonSchema:
    pattern = r"^(?=.*[1-9])[0-9]{1,15}[KMGTkmgt]?([iI]?[bB])?$"
    return WithJsonSchema({"type": ["string", "integer"], "pattern": pattern, "minimum": least, "maximum": most})


_MOST_BYTES = 10**15 - 1
Size = Annotated[int, _quantity(parse_size, "a size such as 512M or 4G"), _size_schema(1, _MOST_BYTES)]
Memory = Annotated[int, _quantity(parse_memory, "a size such as 512M or 4G"), _size_schema(16 << 20, _MOST_BYTES)]
Disk = Annotated[int, _quantity(parse_disk, "a size such as 512M or 10G"), _size_schema(8 << 20, 2 << 40)]
Cpus = Annotated[
    float,
    _quantity(parse_cpus, "a number of processors such as 2 or 500m"),
    WithJsonSchema(
        {
            "type": ["string", "number"],
            "pattern": r"^(?=.*[1-9])[0-9]{1,6}(\.[0-9]{1,3})?m?$",
            "minimum": 0.01,
            "maximum": 10**6 - 0.001,
        }
    ),
]
Command = Annotated[
    str | list[str],
    PlainValidator(_command),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": "^[^\0]+$"},
                {
                    "type": "array",
                    "items": {"type": "string", "pattern": "^[^\0]*$"},
                    "prefixItems": [{"type": "string", "pattern": "^[^\0]+$"}],
                    "minItems": 1,
                },
            ]
        }
    ),
]
_RELATIVE = r"^(?!/)(?!(.*/)?\.\.?(/|$))[^\\\0]+$"
RelativePath = Annotated[
    str,
    AfterValidator(_relative_path),
    Field(json_schema_extra={"pattern": _RELATIVE}),
]
AbsolutePath = Annotated[str, AfterValidator(_absolute_path), Field(json_schema_extra={"pattern": "^/[^\0]*$"})]
Toolchain = Annotated[
    str, *matching(_TOOLCHAIN, "an absolute path such as `/opt/node`, or the name of a program such as `node`")
]
RelativePaths = Annotated[
    list[RelativePath], AfterValidator(no_repeats), Field(json_schema_extra={"uniqueItems": True})
]
KeptPath = Annotated[
    str,
    AfterValidator(_kept_path),
    Field(json_schema_extra={"pattern": f"^(?!~/(/|$))(~/)?{_RELATIVE[1:]}"}),
]
Distinct = Annotated[
    list[Text], AfterValidator(no_repeats), Field(min_length=1, json_schema_extra={"uniqueItems": True})
]
Environment = Annotated[
    dict[str, str],
    AfterValidator(_variables),
    Field(json_schema_extra={"propertyNames": {"pattern": f"^{_VARIABLE.pattern}$"}}),
]
ModelName = Annotated[str, *matching(_MODEL, "the name of a model such as `sonnet`")]
IMAGE_SCHEMA: JsonDict = {"pattern": f"^(?:{IMAGE.pattern})$"}
ImageName = Annotated[str, AfterValidator(image_name), Field(json_schema_extra=IMAGE_SCHEMA)]
ModelNames = Annotated[
    list[ModelName], AfterValidator(no_repeats), Field(min_length=1, json_schema_extra={"uniqueItems": True})
]
ToolName = Annotated[str, *matching(_TOOL, "the name of a tool such as `Bash`")]
SkillName = Annotated[str, *matching(_SKILL, "the name of a skill such as `k8s-troubleshooter`")]
SkillNames = Annotated[list[SkillName], AfterValidator(no_repeats), Field(json_schema_extra={"uniqueItems": True})]
Word = Annotated[str, AfterValidator(_word), Field(json_schema_extra={"pattern": "^[^\0]+$"})]
Namespace = Annotated[str, *matching(_LABEL, "the name of a namespace such as `shop-prod`", max_length=63)]
QueueName = Annotated[str, *matching(_LABEL, "the name of a queue such as `team-a`", max_length=63)]
VariableName = Annotated[
    str, AfterValidator(_variable_name), Field(json_schema_extra={"pattern": f"^{_VARIABLE.pattern}$"})
]
Isolation = Literal["none", "namespaces", "kernel", "vm"]


def one_of(names: Callable[[], Iterable[str]], more: Callable[[], Iterable[str]] = tuple) -> AfterValidator:
    """Return the validator of a name in a registry: one of ``names``, or of ``more``, which may take longer."""

    def check(name: str) -> str:
        if name not in (known := [*names()]) and name not in (others := [*more()]):
            expected = ", ".join(f"'{one}'" for one in others or known)
            raise PydanticCustomError("literal_error", "not one of {expected}", {"expected": expected})
        return name

    return AfterValidator(check)


def listing(names: Callable[[], Iterable[str]]) -> Callable[[JsonDict], None]:
    """Return what adds names to the JSON schema of a field."""

    def add(schema: JsonDict) -> None:
        schema["enum"] = [*names()]

    return add
