"""Every event survives being stored, with any text that a file's name or a program's output may hold."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.events import events as ev
from tests.support.arbitrary import values

KINDS = {kind.__name__: kind for kind in ev.Event.__subclasses__()}


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
