"""The budget of a session: what is used, what the requests under way may still use, and who has to wait."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import trio

from runner.core.model import Budget, Reason, Usage


class BudgetUsedUp(Exception):
    """The budget admits no further request. Never leaves the gateway."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(f"the budget of this run is used up: {message}")
        self.reason = reason


@dataclass
class BudgetLedger:
    """The use of a budget, and the requests that are being answered from it."""

    budget: Budget
    usage: Usage = field(default_factory=Usage)
    turns: int = 0
    under_way: int = 0
    reserved: float = 0.0  # dollars that the requests under way can cost at most, if the budget is strict
    largest: Usage | None = None  # of one request, in tokens
    highest_cost: float = 0.0  # dollars of one request
    changed: trio.Event = field(default_factory=trio.Event)

    async def reserve(self, max_cost: float) -> None:
        """Wait until there is budget for a request that costs ``max_cost`` dollars at most.

        Raises ``BudgetUsedUp`` when there never will be.
        """
        while not (spent := self._used_up() or self._too_expensive(max_cost)):
            if self._has_budget() and self.reserved + max_cost <= self._dollars_left:
                break
            await self.changed.wait()
        if spent:
            raise BudgetUsedUp(*spent)
        self.under_way += 1
        self.reserved += max_cost

    def charge(self, usage: Usage, *, turn: bool, max_cost: float) -> None:
        """Replace the reservation of a request that has ended by its usage."""
        self.under_way -= 1
        self.reserved -= max_cost
        self.turns += turn
        self.usage += usage
        if usage.tokens and (self.largest is None or usage.tokens > self.largest.tokens):
            self.largest = usage
        self.highest_cost = max(self.highest_cost, usage.cost_usd or 0.0)
        self.changed.set()
        self.changed = trio.Event()

    def _used_up(self) -> tuple[Reason, str] | None:
        budget, usage = self.budget, self.usage
        if budget.tokens is not None and usage.tokens >= budget.tokens:
            return Reason.BUDGET, f"{usage.tokens} of {budget.tokens} tokens are used"
        if budget.cost_usd is not None and (usage.cost_usd or 0.0) >= budget.cost_usd:
            return Reason.BUDGET, f"${usage.cost_usd:.4f} of ${budget.cost_usd:.4f} are used"
        if budget.turns is not None and self.turns >= budget.turns:
            return Reason.TURNS, f"{self.turns} of {budget.turns} turns are used"
        return None

    def _has_budget(self) -> bool:
        """Tell whether one more fits beside those under way, if each becomes as large as the largest so far."""
        budget, others = self.budget, self.under_way
        if budget.turns is not None and self.turns + others >= budget.turns:
            return False
        if others == 0 or (budget.tokens is None and budget.cost_usd is None):
            return True
        if self.largest is None:  # nobody knows yet how large they are
            return False
        cost = (self.usage.cost_usd or 0) + others * self.highest_cost
        return not (
            (budget.tokens is not None and self.usage.tokens + others * self.largest.tokens >= budget.tokens)
            or (budget.cost_usd is not None and cost >= budget.cost_usd)
        )

    @property
    def _dollars_left(self) -> float:
        if not self.budget.strict or self.budget.cost_usd is None:
            return math.inf
        return self.budget.cost_usd - (self.usage.cost_usd or 0.0)

    def _too_expensive(self, max_cost: float) -> tuple[Reason, str] | None:
        """Return why a strict budget can never cover a request."""
        left, budget = self._dollars_left, self.budget.cost_usd
        if max_cost <= left:
            return None
        return Reason.BUDGET, f"an answer can cost ${max_cost:.4f}, and ${left:.4f} of ${budget:.4f} are left"
