"""Directed acyclic graphs of named nodes: stable order, closed cycle paths and longest paths, without recursion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runner.core.errors import Cycle


class Graph:
    """Nodes and what each needs; every node in ``needs`` values is itself a key. Keeps the given order."""

    def __init__(self, needs: Mapping[str, Sequence[str]]) -> None:
        self._names = list(needs)
        index = {name: position for position, name in enumerate(self._names)}
        self._needs = [[index[need] for need in needs[name]] for name in self._names]
        self._followers: list[list[int]] = [[] for _ in self._names]
        for node, wanted in enumerate(self._needs):
            for need in wanted:
                self._followers[need].append(node)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def indegrees(self) -> dict[str, int]:
        return {name: len(needs) for name, needs in zip(self._names, self._needs, strict=True)}

    @property
    def followers(self) -> dict[str, list[str]]:
        names = self._names
        return {name: [names[f] for f in self._followers[node]] for node, name in enumerate(names)}

    def order(self) -> list[str]:
        """Every node after what it needs, otherwise in the given order of readiness. Raises ``Cycle``."""
        return [self._names[node] for node in self._order()]

    def longest(self, weights: Mapping[str, float]) -> tuple[tuple[str, ...], float]:
        """The path whose nodes weigh most together, and that sum; of equal ones the first. Raises ``Cycle``."""
        total = [weights[name] for name in self._names]  # of the heaviest path that ends with a node
        before: list[int | None] = [None] * len(total)
        for node in self._order():
            if wanted := self._needs[node]:
                before[node] = heaviest = max(wanted, key=total.__getitem__)
                total[node] += total[heaviest]
        last: int | None = max(range(len(total)), key=total.__getitem__, default=None)
        if last is None:
            return (), 0.0
        weight, path = total[last], []
        while last is not None:
            path.append(self._names[last])
            last = before[last]
        return tuple(reversed(path)), weight

    def _order(self) -> list[int]:
        waiting = [len(needs) for needs in self._needs]
        ready = [node for node, count in enumerate(waiting) if not count]
        for node in ready:  # grows while it is walked
            for follower in self._followers[node]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    ready.append(follower)
        if len(ready) < len(self._names):
            path = " -> ".join(self._cycle(waiting))
            raise Cycle(f"`{path}` goes in a circle", hint="remove one of these needs")
        return ready

    def _cycle(self, waiting: Sequence[int]) -> list[str]:
        """A closed path. Every node that still waits has a need that still waits, so walking needs must close."""
        node = next(node for node, count in enumerate(waiting) if count)
        seen: dict[int, int] = {}
        path: list[int] = []
        while node not in seen:
            seen[node] = len(path)
            path.append(node)
            node = next(need for need in self._needs[node] if waiting[need])
        closed = [*path[seen[node] :], node]
        return [self._names[n] for n in reversed(closed)]
