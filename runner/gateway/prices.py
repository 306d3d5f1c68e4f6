"""Prices of models, by the table that is part of the product."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from runner.gateway.api import Counts, model_matches

_TABLE = Path(__file__).with_name("prices.json")
_MILLION = 1_000_000


@cache
def _models(api: str) -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = json.loads(_TABLE.read_bytes())["models"][api]
    return found


def is_priced(api: str, granted: str) -> bool:
    """Tell whether there is a price for a model that a manifest names, or for its family."""
    return any(model_matches(granted, model) for model in _models(api)) or _row(api, granted) is not None


def nearest_priced(api: str, named: str) -> str:
    """Return the model of the table whose name continues ``named``, the last of several, else the most similar one."""
    models = list(_models(api))
    return next(
        (name for name in reversed(models) if name.startswith(named)), get_close_matches(named, models, 1, 0)[0]
    )


def cost_usd(api: str, model: str, counts: Counts) -> float | None:
    """Return the cost of the tokens of one request; ``None`` when the model has no price here."""
    row = _row(api, model)
    if row is None:
        return None
    above = row.get("above")
    if above and counts.input > above["input_tokens"]:
        row = above
    fresh = row["input"]
    written = row.get("cache_write", fresh)
    total = (
        counts.fresh * fresh
        + counts.cached * row.get("cached", fresh)
        + counts.written * written
        + counts.written_hour * row.get("cache_write_hour", written)
        + counts.output * row["output"]
    )
    return float(total / _MILLION)


def _row(api: str, model: str) -> Mapping[str, Any] | None:
    models = _models(api)
    if model in models:
        return models[model]
    return next((row for name, row in models.items() if model_matches(name, model)), None)
