"""Graph of a plan as a drawing: what must have ended stands above what follows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from runner.core.model import Status
from runner.plan.model import Plan, RunPlan
from runner.report.format import duration
from runner.report.plan_graph import run_edges, step_edges

MOST = 60  # nodes that are drawn
WIDTH, HEIGHT, GAP = 200, 44, 24
_SIDE = 28  # how far an edge that passes by others keeps from them
_TEXT = 26  # characters of a line in a node


class Node(Struct, frozen=True, kw_only=True):
    x: int
    y: int
    title: str
    detail: str
    state: str


class Drawing(Struct, frozen=True, kw_only=True):
    """Nodes with their left upper corners; edges are paths of SVG, with ``firm`` ones for needs."""

    label: str
    width: int
    height: int
    nodes: Sequence[Node]
    edges: Sequence[tuple[str, bool]]


def steps_graph(run: RunPlan, states: Mapping[str, Status] | None = None) -> Drawing:
    """Draw the steps of a run, in their states if it has begun."""
    known = states or {}
    texts = [
        (step.id, duration(step.deadline_seconds), known[step.id].value if step.id in known else "")
        for step in run.steps
    ]
    return _draw(f"Steps of {run.name}", texts, step_edges(run))


def runs_graph(plan: Plan) -> Drawing:
    """Draw the runs of a plan."""
    texts = [(run.name, duration(run.worst_case()[1]), "") for run in plan.runs]
    return _draw("Order of the runs", texts, ((a, b, True) for a, b in run_edges(plan)))


def _draw(label: str, texts: Sequence[tuple[str, str, str]], edges: Iterable[tuple[int, int, bool]]) -> Drawing:
    edges = sorted(edges)
    layers = _layers(len(texts), [(a, b) for a, b, _ in edges])
    placed: list[tuple[int, int]] = []
    widths: dict[int, int] = {}
    for layer in layers:
        placed.append((widths.get(layer, 0), layer))
        widths[layer] = widths.get(layer, 0) + 1
    nodes = [
        Node(x=x * (WIDTH + GAP) + 1, y=y * (HEIGHT + GAP) + 1, title=_cut(title), detail=_cut(detail), state=state)
        for (x, y), (title, detail, state) in zip(placed, texts, strict=True)
    ]
    lines = [(_line(nodes[a], nodes[b], layers[b] - layers[a] > 1), firm) for a, b, firm in edges]
    return Drawing(
        label=label,
        width=max(widths.values(), default=0) * (WIDTH + GAP) + _SIDE,
        height=(max(layers, default=0) + 1) * (HEIGHT + GAP),
        nodes=nodes,
        edges=lines,
    )


def _layers(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return for each node the length of the longest way to it; edges lead from earlier nodes to later ones or back."""
    layers = [0] * count
    for _ in range(count):
        lower = [(a, b) for a, b in edges if layers[b] <= layers[a]]
        if not lower:
            break
        for a, b in lower:
            layers[b] = max(layers[b], layers[a] + 1)
    return layers


def _line(a: Node, b: Node, passes: bool) -> str:
    if passes:
        right = max(a.x, b.x) + WIDTH
        start, end, out = a.y + HEIGHT // 2, b.y + HEIGHT // 2, right + _SIDE
        return f"M{a.x + WIDTH} {start}C{out} {start} {out} {end} {b.x + WIDTH} {end}"
    return f"M{a.x + WIDTH // 2} {a.y + HEIGHT}L{b.x + WIDTH // 2} {b.y}"


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"
