from __future__ import annotations

import random
from itertools import pairwise

import pytest

from runner.errors import Cycle
from runner.plan.graph import Graph


@pytest.mark.parametrize(
    ("needs", "order"),
    [
        pytest.param({}, [], id="empty"),
        pytest.param({"a": [], "b": [], "c": []}, ["a", "b", "c"], id="given order is kept"),
        pytest.param({"c": ["b"], "b": ["a"], "a": []}, ["a", "b", "c"], id="needs come first"),
        pytest.param({"a": [], "c": ["a"], "b": ["a"]}, ["a", "c", "b"], id="followers in given order"),
    ],
)
def test_order_is_stable(needs: dict[str, list[str]], order: list[str]) -> None:
    assert Graph(needs).order() == order


@pytest.mark.parametrize(
    ("needs", "path"),
    [
        pytest.param({"a": ["a"]}, "a -> a", id="self"),
        pytest.param({"a": ["b"], "b": ["a"]}, "a -> b -> a", id="two"),
        pytest.param({"z": [], "a": ["c", "z"], "b": ["a"], "c": ["b"], "d": ["c"]}, "a -> b -> c -> a", id="three"),
    ],
)
def test_a_cycle_is_reported_as_the_closed_path(needs: dict[str, list[str]], path: str) -> None:
    with pytest.raises(Cycle, match=path):
        Graph(needs).order()


def test_random_graphs_are_ordered() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        names = [str(n) for n in range(chance.randrange(2, 40))]
        needs = {n: chance.sample(names[:i], chance.randrange(0, min(i, 4) + 1)) for i, n in enumerate(names)}
        shuffled = dict(chance.sample(list(needs.items()), len(needs)))
        position = {name: place for place, name in enumerate(Graph(shuffled).order())}

        assert all(position[need] < position[name] for name in names for need in needs[name]), seed


def test_a_chain_of_100_000_needs_no_recursion() -> None:
    names = [str(n) for n in range(100_000)]
    needs = {names[0]: []} | {b: [a] for a, b in pairwise(names)}

    assert Graph(needs).order() == names
