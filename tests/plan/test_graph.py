from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from runner.core.errors import Cycle
from runner.plan.graph import Graph
from tests.support.params import nightly


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
    with pytest.raises(Cycle, match=path) as found:
        Graph(needs).order()
    assert found.value.hint == "remove one of these needs"


def test_random_graphs_are_ordered() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        names = [str(n) for n in range(chance.randrange(2, 40))]
        needs = {n: chance.sample(names[:i], chance.randrange(0, min(i, 4) + 1)) for i, n in enumerate(names)}
        shuffled = dict(chance.sample(list(needs.items()), len(needs)))
        position = {name: place for place, name in enumerate(Graph(shuffled).order())}

        assert all(position[need] < position[name] for name in names for need in needs[name]), seed


@pytest.mark.parametrize(
    ("needs", "weights", "path", "total"),
    [
        pytest.param({}, {}, (), 0.0, id="empty"),
        pytest.param({"a": []}, {"a": 2.0}, ("a",), 2.0, id="one"),
        pytest.param({"a": [], "b": []}, {"a": 1, "b": 1}, ("a",), 1, id="of equal ones the first"),
        pytest.param(
            {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}, {"a": 1, "b": 2, "c": 5, "d": 1}, ("a", "c", "d"), 7,
            id="diamond",
        ),
        pytest.param({"b": ["a"], "a": [], "z": []}, {"a": 1, "b": 1, "z": 9}, ("z",), 9, id="one alone is longest"),
    ],
)  # fmt: skip
def test_the_longest_path_is_the_heaviest_chain_of_needs(
    needs: dict[str, list[str]], weights: dict[str, float], path: tuple[str, ...], total: float
) -> None:
    assert Graph(needs).longest(weights) == (path, total)


def test_the_longest_path_of_random_graphs_is_that_of_a_search() -> None:
    for seed in range(100):
        chance = random.Random(seed)
        names = [str(n) for n in range(chance.randrange(1, 12))]
        needs = {n: chance.sample(names[:i], chance.randrange(0, min(i, 3) + 1)) for i, n in enumerate(names)}
        weights = {n: float(chance.randrange(1, 9)) for n in names}

        def heaviest(name: str, needs: dict[str, list[str]] = needs, weights: dict[str, float] = weights) -> float:
            return weights[name] + max((heaviest(need) for need in needs[name]), default=0.0)

        path, total = Graph(needs).longest(weights)

        assert total == max(heaviest(name) for name in names) == sum(weights[name] for name in path), seed
        assert all(a in needs[b] for a, b in pairwise(path)), seed


def mesh(layers: int, width: int) -> dict[str, list[str]]:
    """Every node needs three of the layer before."""
    return {
        f"{layer}.{n}": [f"{layer - 1}.{(n + k) % width}" for k in range(3)] if layer else []
        for layer in range(layers)
        for n in range(width)
    }


@pytest.mark.parametrize(
    ("make", "length"),
    [
        pytest.param(lambda: {str(n): [str(n - 1)] if n else [] for n in range(100_000)}, 100_000, id="chain"),
        nightly(lambda: {"r": []} | {str(n): ["r"] for n in range(99_999)}, 2, id="fan"),
        pytest.param(lambda: mesh(1_000, 100), 1_000, id="mesh"),
    ],
)
def test_100_000_nodes_are_ordered_and_measured_without_recursion(
    make: Callable[[], dict[str, list[str]]], length: int
) -> None:
    needs = make()
    graph = Graph(needs)
    position = {name: place for place, name in enumerate(graph.order())}

    path, total = graph.longest(dict.fromkeys(needs, 1.0))

    assert all(position[need] < position[name] for name, wanted in needs.items() for need in wanted)
    assert (len(path), total) == (length, float(length))
