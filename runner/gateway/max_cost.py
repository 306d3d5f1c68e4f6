"""Compute the highest cost of a request before it is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.gateway.api import Counts, inner
from runner.gateway.prices import cost_usd

DEFAULT_OUTPUT = 128_000  # tokens of an answer to a request that sets no limit: no model of the table gives longer ones
HIDDEN_INPUT = 4_000  # tokens that providers add to a request, as with tools
_OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "maxOutputTokens")
_CHOICES = ("n", "candidateCount")
_REFERENCES = ("previous_response_id", "conversation", "cachedContent")  # what of the input is not in the request


def max_cost_usd(api: str, model: str, body: Mapping[str, Any], sent_bytes: int) -> float | None:
    """Return the highest cost in dollars; ``None`` when unknown. No token is shorter than a byte of the request."""
    settings = {**inner(body, "generationConfig"), **body}
    if any(settings.get(name) for name in _REFERENCES):
        return None
    limits = [value for name in _OUTPUT_LIMITS if (value := _whole(settings.get(name)))]
    output = min(limits, default=DEFAULT_OUTPUT) * max(1, *(_whole(settings.get(name)) for name in _CHOICES))
    sent = sent_bytes + HIDDEN_INPUT
    inputs = ({kind: sent} for kind in ("fresh", "written", "written_hour"))
    found = [cost_usd(api, model, Counts(**given, output=output)) for given in inputs]
    return max((cost for cost in found if cost is not None), default=None)


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
