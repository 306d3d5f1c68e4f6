"""What is written as a manifest is read back as it was."""

from __future__ import annotations

import random

import pytest

from runner.manifest import text
from runner.manifest.emit import Value, emit

ODD = "ab \n\t{}:#-'\"\\|>&*!%@`\r\x07\x85\u2028é😀\ufeff,[]?1.~"


def back(spec: dict[str, Value]) -> object:
    (tree,), found = text.parse("it", emit("X", "it", spec).encode())
    assert found == []
    return tree.data["spec"]


def test_any_text_is_read_back_as_it_was() -> None:
    chance = random.Random(8)
    for _ in range(400):
        odd = "".join(chance.choice(ODD) for _ in range(chance.randint(0, 12)))
        spec: dict[str, Value] = {"plain": odd, "list": [odd], "inner": {"deep": {odd or "x": odd}}}

        assert back(spec) == spec


@pytest.mark.parametrize("word", ["no", "null", "~", "1", "1e3", "0x1f", ".inf", "", "-", "2026-11-21", "a: b", "# x"])
def test_a_text_that_could_be_taken_for_something_else_stays_one(word: str) -> None:
    assert back({"value": word}) == {"value": word}


def test_lines_are_written_as_lines_and_short_mappings_on_one() -> None:
    spec: dict[str, Value] = {
        "prompt": {"system": "one\n  two\n"},
        "limits": {"memory": "2g", "on": True, "n": [1, 0.5]},
    }

    written = emit("X", "it", spec)

    assert "  prompt:\n    system: |\n      one\n        two\n" in written
    assert 'limits: {memory: "2g", "on": true, "n": [1, 0.5]}' in written
    assert back(spec) == spec
