"""The one codec of what is stored, sent or digested: msgspec's JSON, with paths as text.

Names of files are bytes, of which Python holds those that are not UTF-8 as lone surrogates. JSON has these as escapes
only, and msgspec neither writes nor reads them: a value with such a text takes the way of the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from pathlib import PurePath
from typing import Any, Literal, TypeVar

import msgspec

T = TypeVar("T")


def encode(value: object, *, order: Literal["sorted"] | None = None) -> bytes:
    """Return a value as compact JSON, in UTF-8. Raises ``TypeError`` for one that has no JSON form."""
    try:
        return msgspec.json.encode(value, enc_hook=_plain, order=order)
    except UnicodeEncodeError:
        builtins = msgspec.to_builtins(value, enc_hook=_plain, order=order, str_keys=True)
        return json.dumps(builtins, separators=(",", ":")).encode()


def decode(text: bytes | str, kind: type[T]) -> T:
    """Return the value of a type, or of a union of tagged types, that a text holds. Raises ``ValueError``."""
    try:
        found: T = _decoder(kind).decode(text)  # type: ignore[arg-type]  # a class is hashable
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        return typed(json.loads(text), kind)
    return found


def typed(value: object, kind: type[T], *, place: Callable[[str], str] = str) -> T:
    """Return the value of a type that a JSON value stands for; ``place`` may give a path another place.

    Raises ``ValueError``.
    """

    def hook(kind: type, value: object) -> object:
        return _typed(kind, place(value) if issubclass(kind, PurePath) and isinstance(value, str) else value)

    return msgspec.convert(value, kind, dec_hook=_typed if place is str else hook)


def plain(value: object) -> Any:
    """Return the JSON value of a value: structs and mappings as ``dict``, sequences as ``list``, enums by their word.

    Raises ``TypeError`` for one that has none.
    """
    return json.loads(encode(value))


def canonical(value: object) -> bytes:
    """Return the one spelling of a value: JSON with sorted keys and sets and no white space, in UTF-8."""
    try:
        return encode(value, order="sorted")
    except TypeError:  # only keys that are text can be sorted
        return encode(plain(value), order="sorted")


def digest(value: object) -> str:
    return "sha256:" + sha256(canonical(value)).hexdigest()


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, dec_hook=_typed)


def _plain(value: object) -> object:
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _typed(kind: type, value: object) -> object:
    if isinstance(value, kind):  # of ``object``, which is any JSON value
        return value
    if issubclass(kind, PurePath) and isinstance(value, str):
        return kind(value)
    raise ValueError(f"{value!r} is not a {kind.__name__}")
