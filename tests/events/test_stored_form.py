"""Every event survives being stored, with any text that a file's name or a program's output may hold."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from runner.events import events as ev

NAMES = st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF)  # bytes of names that are not UTF-8
PLAIN = {
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(st.characters() | NAMES, max_size=20),
    type(None): st.none(),
}
KINDS = {kind.__name__: kind for kind in ev.Event.__subclasses__()}


def values(hint: Any) -> st.SearchStrategy[Any]:
    if hint in PLAIN:
        return PLAIN[hint]
    if not get_args(hint):
        if issubclass(hint, Enum):
            return st.sampled_from(hint)
        assert issubclass(hint, Struct)
        return st.builds(hint, **{name: values(inner) for name, inner in get_type_hints(hint).items()})
    inner = [values(each) for each in get_args(hint) if each is not Ellipsis]
    match getattr(hint, "__origin__", None):
        case kind if kind is dict:
            return st.dictionaries(*inner, max_size=3)
        case kind if kind is tuple:
            assert get_args(hint)[1:] == (Ellipsis,)
            return st.lists(*inner, max_size=3).map(tuple)
    return st.one_of(inner)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_event_is_read_as_it_was_written(name: str, data: st.DataObject) -> None:
    event = data.draw(values(KINDS[name]))

    stored = ev.encode(event)

    assert ev.decode(stored) == event
    assert stored.startswith(f'{{"type":"{name}"')  # the store's index of ends reads it there
    assert ev.as_json(ev.Recorded("r", 1, 2, event)) == {"run": "r", "seq": 1, "at": 2, **json.loads(stored)}


@pytest.mark.parametrize(
    "body",
    [
        pytest.param('{"type":"Unheard"}', id="unknown type"),
        pytest.param('{"step":"a"}', id="no type"),
        pytest.param('{"type":"StepStarted"}', id="field missing"),
        pytest.param('{"type":"StepStarted","step":"a","more":1}', id="unknown field"),
        pytest.param('{"type":"StepStarted","step":1}', id="value of another type"),
        pytest.param('{"type":"StepStarted","step":"a"', id="cut"),
        pytest.param("[]", id="no object"),
    ],
)
def test_what_no_event_is_stored_as_is_refused(body: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # the message is msgspec's
        ev.decode(body)
