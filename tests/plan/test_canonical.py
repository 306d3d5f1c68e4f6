"""The canonical form is the plain form's JSON, and what it is written from does not matter."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType

import pytest
from msgspec import Struct

from runner.core.codec import canonical, encode, plain
from runner.core.model import Feature, IsolationClass, Limits
from runner.plan.model import BUILT_IN, PlannedMount, Step

MOUNT = PlannedMount("/workspace", True, BUILT_IN)


class Nothing(Struct, frozen=True):
    pass


class One(Struct, frozen=True):
    only: object


@pytest.mark.parametrize(
    "value",
    [
        pytest.param((None, True, False, 0, 1, -1, 0.0, 1.0, 1e300, 2**70), id="scalars of equal value"),
        pytest.param('"\\\n\x00\u2028é世😀%s', id="text that needs escapes"),
        pytest.param({"b": 1, "a": {"d": (), "c": {}}, "B": "%(a)s"}, id="mappings"),
        pytest.param(MappingProxyType({2: "two", 10: "ten"}), id="keys that are not text"),
        pytest.param((IsolationClass.NAMESPACES, Feature.MEMORY, Path("a/b")), id="words"),
        pytest.param((Nothing(), One(Nothing()), One((1,)), Limits(memory_bytes=1)), id="structs of any size"),
        pytest.param(
            Step(
                id="a",
                kind="x",
                what="100%",
                phase="work",
                needs=("b",),
                deadline_seconds=1.5,
                origin="a:1",
                body=One("%s"),
                mounts=(MOUNT, MOUNT),
            ),
            id="a shared value",
        ),
        pytest.param([{"path": Path(str(n)), "set": frozenset({n})} for n in range(100)], id="short-lived values"),
    ],
)
def test_the_canonical_form_is_the_plain_form_with_sorted_keys_and_no_white_space(value: object) -> None:
    assert canonical(value) == encode(json.loads(json.dumps(plain(value), sort_keys=True)))


def test_members_of_a_set_are_sorted() -> None:
    assert canonical([frozenset({"b", "a", "c"})]) == b'[["a","b","c"]]'


def test_keys_and_fields_are_plain_themselves() -> None:
    assert plain({"a": One(Path("b")), 2: (Path("c"),)}) == {"a": {"only": "b"}, "2": ["c"]}


@pytest.mark.parametrize("value", [object(), (1j,), One({"a": object()})], ids=["top", "item", "field"])
def test_what_has_no_json_form_has_no_canonical_one(value: object) -> None:
    with pytest.raises(TypeError, match="has no JSON form"):
        canonical(value)
