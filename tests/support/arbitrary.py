"""Arbitrary values of a type that the codec stores, by its annotations."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st
from msgspec import Struct

NAMES = st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF)  # bytes of names that are not UTF-8
TEXT = st.text(st.characters() | NAMES, max_size=20)
PLAIN = {
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: TEXT,
    Path: TEXT.map(Path),
    object: TEXT | st.booleans() | st.none(),
    type(None): st.none(),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type that has a stored form: a struct, an enum, a plain one, or made of such."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is None:
        if hint in PLAIN:
            return PLAIN[hint]
        if issubclass(hint, Enum):
            return st.sampled_from(hint)
        assert issubclass(hint, Struct)
        hints = get_type_hints(hint, include_extras=True)
        return st.builds(hint, **{name: values(each) for name, each in hints.items()})
    if origin is Annotated:
        (least,) = (meta.ge for meta in inner[1:])
        return values(inner[0]).filter(lambda value: value >= least)
    if origin is Literal:
        return st.sampled_from(inner)
    of = [values(each) for each in inner if each is not Ellipsis]
    if origin in (dict, Mapping):
        return st.dictionaries(*of, max_size=3)
    if origin is tuple:
        return st.lists(*of, max_size=3).map(tuple) if Ellipsis in inner else st.tuples(*of)
    assert origin in (Union, UnionType)
    return st.one_of(of)
