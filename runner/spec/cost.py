"""Cost ceiling of several runs, split into budgets that no answer can exceed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from runner.core.errors import OverCost, RunnerError, Unenforceable
from runner.spec.model import RunSpec

_UNITS = 1_000_000  # of a dollar: shares are rounded down, so that they never add up to more


def share_out(specs: Sequence[RunSpec], ceiling: float) -> tuple[list[RunSpec], list[RunnerError]]:
    """Runs that together cost at most ``ceiling`` dollars: each keeps its own budget, and those without one share
    equally what the others leave. With errors among the findings there is no such plan.
    """
    asking = [spec for spec in specs if spec.model is not None]
    own = math.fsum(cost for spec in asking if (cost := _budget(spec)) is not None)
    free = sum(_budget(spec) is None for spec in asking)
    findings = [*_uncounted(asking), *_over(own, free, ceiling)]
    share = math.floor((ceiling - own) * _UNITS / free) / _UNITS if free and not findings else 0.0
    return [bounded(spec, share if _budget(spec) is None else ceiling) for spec in specs], findings


def bounded(spec: RunSpec, cost_usd: float) -> RunSpec:
    """A run whose model costs at most so much, and no more than its manifest says."""
    if spec.model is None:
        return spec
    own = _budget(spec)
    budget = replace(spec.model.budget, cost_usd=cost_usd if own is None else min(own, cost_usd), strict=True)
    return replace(spec, model=replace(spec.model, budget=budget))


def _budget(spec: RunSpec) -> float | None:
    return spec.model.budget.cost_usd if spec.model is not None else None


def _uncounted(asking: Sequence[RunSpec]) -> Iterator[RunnerError]:
    for spec in asking:
        if spec.model is not None and spec.model.key_inside:
            message = f"the cost of run `{spec.name}` is not counted, because it has the key of its model"
            yield Unenforceable(message, hint="write `credentials: gateway`, or leave out --max-cost")


def _over(own: float, free: int, ceiling: float) -> Iterator[RunnerError]:
    hint = f"`--max-cost {math.ceil(own * 100) / 100:g}` or more, smaller budgets, or fewer runs: `--run NAME`"
    if own > ceiling:
        yield OverCost(f"the budgets of these runs add up to ${own:,.2f}, and --max-cost is ${ceiling:,.2f}", hint=hint)
    elif free and own == ceiling:
        yield OverCost(f"budgets leave nothing of ${ceiling:,.2f} for the {free} runs without one", hint=hint)
